"""Heads learn what the papers' losses say, follow a policy, and never change what it samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.models.causal_lm import CausalLM
from rollout.speculation.eagle import EagleModel
from rollout.speculation.medusa import MedusaHeads
from rollout_trainers import Example, Sample
from rollout_trainers.config import OptimizerSection
from rollout_trainers.drafter import DrafterTrainer, DrafterTraining, objective_of, sequences_of
from rollout_trainers.fresh_heads import fresh_eagle, fresh_medusa, load_heads, save_heads
from tests.support.drafters import eagle_reference, make_eagle, make_medusa, medusa_reference, target_features
from tests.support.oracle import load_reference
from tests.support.tiny import make_tiny_llama

PROMPTS = [[7, 8, 9], [20, 21, 22, 23], [40, 50], [77]]
PLAIN = DrafterTraining(feature_noise=0.0, temperature=0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="4MiB", max_model_len=256)


@pytest.fixture
def target(llm: LLM) -> CausalLM:
    model: CausalLM = llm.collective_rpc(lambda worker: worker.model)[0]
    return model


def sampled(llm: LLM, params: SamplingParams) -> list[Sample]:
    return [
        Sample(
            example=Example(output.prompt_token_ids),
            group=group,
            prompt_token_ids=output.prompt_token_ids,
            completion_token_ids=one.token_ids,
            text="",
            finish_reason="length",
            sampled_logprobs=one.sampled_logprobs,
            raw_logprobs=one.raw_logprobs,
            entropy=one.entropy,
            seed=one.seed,
            sample_index=one.sample_index,
            policy_version=0,
        )
        for group, output in enumerate(llm.generate(PROMPTS, params))
        for one in output.outputs
    ]


def some_samples(llm: LLM) -> list[Sample]:
    return sampled(llm, SamplingParams(max_tokens=9, seed=4, ignore_eos=True, n=2))


def medusa_loss(module: MedusaHeads, folder: Path, samples: list[Sample]) -> torch.Tensor:
    """By loops in float64: the mean over all sampled tokens that lie far enough, head by head."""
    tensors = {name: parameter.detach().double().requires_grad_() for name, parameter in module.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for head in range(len(module)):
        losses = []
        for sample in samples:
            tokens = [*sample.prompt_token_ids, *sample.completion_token_ids]
            features, _, output = target_features(folder, tokens)
            output = tensors[f"{head}.1.weight"] if module.config.has_own_output else output.detach()
            for place in range(len(sample.prompt_token_ids), len(tokens)):
                if place - head - 2 >= 0:
                    hidden = medusa_reference(tensors, features[place - head - 2], head, 1)
                    losses.append(-torch.log_softmax(output @ hidden / PLAIN.temperature, -1)[tokens[place]])
        total = total + 0.8**head * torch.stack(losses).mean()
    total.backward()
    compare_gradients(module, tensors)
    return total


def eagle_loss(module: EagleModel, folder: Path, samples: list[Sample]) -> torch.Tensor:
    tensors = {name: parameter.detach().double().requires_grad_() for name, parameter in module.named_parameters()}
    distances, divergences = [], []
    for sample in samples:
        tokens = [*sample.prompt_token_ids, *sample.completion_token_ids]
        features, embedded, output = (tensor.detach() for tensor in target_features(folder, tokens))
        guessed = eagle_reference(tensors, embedded[1:], features[:-1])  # row i guesses the feature of token i + 1
        for place in range(max(1, len(sample.prompt_token_ids) - 1), len(tokens) - 1):
            difference = (guessed[place - 1] - features[place]).abs()
            distances.append(torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean())
            wanted = torch.softmax(output @ features[place] / PLAIN.temperature, -1)
            found = torch.log_softmax(output @ guessed[place - 1] / PLAIN.temperature, -1)
            divergences.append(-(wanted * found).sum())
    total = torch.stack(distances).mean() + 0.1 * torch.stack(divergences).mean()
    total.backward()
    compare_gradients(module, tensors)
    return total


def compare_gradients(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        wanted = tensors[name].grad
        assert parameter.grad is not None and wanted is not None, name
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(parameter.grad.numpy(), wanted.numpy(), atol=2e-4 * scale + 1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (lambda path: make_medusa(path, num_heads=3), medusa_loss),
        (lambda path: make_medusa(path, num_heads=2, own_output=True), medusa_loss),
        (make_eagle, eagle_loss),
    ],
    ids=["medusa", "medusa with outputs of its own", "eagle"],
)
def test_losses_and_gradients_are_those_of_the_papers(
    llm: LLM,
    target: CausalLM,
    folder: Path,
    tmp_path: Path,
    make: Callable[[Path], Path],
    reference: Callable[..., torch.Tensor],
) -> None:
    module, samples = load_heads(make(tmp_path), target), some_samples(llm)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    batch = sequences_of(target, samples)
    loss = objective_of(module, target, PLAIN).loss(batch, 10_000, torch.Generator())
    assert loss is not None
    loss.value.backward()
    np.testing.assert_allclose(
        float(loss.value.detach()), float(reference(module, folder, samples).detach()), rtol=1e-5
    )
    assert all(parameter.grad is None for parameter in target.parameters())


def test_at_most_so_many_tokens_are_learned_from(llm: LLM, target: CausalLM) -> None:
    samples = some_samples(llm)
    batch = sequences_of(target, samples)
    learned = batch.places(2)
    wanted = [
        place - 2
        for sample, start in zip(samples, batch.query_start.tolist(), strict=False)
        for place in range(
            start + max(2, len(sample.prompt_token_ids)), start + len(sample.prompt_token_ids) + sample.num_tokens
        )
    ]
    assert learned.tolist() == wanted
    trainer = DrafterTrainer(fresh_medusa(target), target, DrafterTraining(tokens_per_step=9))
    assert trainer.learn(samples)["drafter/loss"] > 0
    assert trainer.learn([]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_heads_follow_a_policy_and_only_its_speed_suffers_where_they_do_not(
    folder: Path, tmp_path: Path, method: str
) -> None:
    llm = LLM(folder, kv_cache_memory="4MiB", max_model_len=256)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    model: CausalLM = llm.collective_rpc(lambda worker: worker.model)[0]
    heads = fresh_medusa(model, 2) if method == "medusa" else fresh_eagle(model, folder)
    save_heads(heads, tmp_path, folder)
    speculative = {
        "method": method,
        "model": str(tmp_path),
        "num_speculative_tokens": 2,
        "max_batch_for_speculation": 64,
        "only_if_faster": False,
    }
    drafting = LLM(folder, kv_cache_memory="4MiB", max_model_len=256, speculative_config=speculative)

    def share_that_is_right() -> float:
        before = drafting.get_metrics()
        outputs = drafting.generate(PROMPTS, params)
        for one, wanted in zip(outputs, llm.generate(PROMPTS, params), strict=True):
            for a, b in zip(one.outputs, wanted.outputs, strict=True):
                assert a.token_ids == b.token_ids and np.array_equal(a.raw_logprobs, b.raw_logprobs)
        now = drafting.get_metrics()
        right, drafted = (now[name] - before[name] for name in ("accepted_draft_tokens_total", "draft_tokens_total"))
        return right / drafted

    before = share_that_is_right()
    optimizer = OptimizerSection(learning_rate=1e-2)
    trainer = DrafterTrainer(heads, model, DrafterTraining(optimizer, tokens_per_step=512))
    samples = sampled(llm, params)
    losses = [trainer.learn(samples)["drafter/loss"] for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    with drafting.policy_update(version=1) as update:
        update.load(model.named_parameters())
        update.load(trainer.named_parameters())
    receipt = drafting.verify()
    assert any(name.startswith("drafter.") for name in receipt.tensors)
    assert share_that_is_right() > before + 0.3
    weights = {name: tensor * 1.5 for name, tensor in model.named_parameters()}
    for engine in (drafting, llm):  # the heads stay behind
        with engine.policy_update(version=2) as update:
            update.load(weights.items())
    share_that_is_right()


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_heads_that_were_saved_are_the_same_when_they_are_loaded(
    target: CausalLM, folder: Path, tmp_path: Path, method: str
) -> None:
    heads = fresh_medusa(target, 2, 2) if method == "medusa" else fresh_eagle(target, str(folder), seed=3)
    for parameter in heads.parameters():
        parameter.data += 0.01
    save_heads(heads, str(tmp_path), str(folder))
    loaded = dict(load_heads(str(tmp_path), target).named_parameters())
    for name, parameter in heads.named_parameters():
        assert torch.equal(loaded.pop(name), parameter)
    assert not loaded


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ({"tokens_per_step": 1.5}, "tokens_per_step=1.5"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"head_decay": -1.0}, "head_decay=-1.0"),
        ({"head_decay": 1.5}, "head_decay=1.5"),
        ({"head_decay": None}, "head_decay=None"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": True}, "seed=True"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"optimizer": 1e-3}, "optimizer=0.001"),
        ({"token_weight": float("nan")}, "token_weight=nan"),
        ({"feature_noise": -0.1}, "feature_noise=-0.1"),
    ],
)
def test_what_is_not_valid_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DrafterTraining(**fields)


def test_other_modules_are_refused(target: CausalLM) -> None:
    with pytest.raises(ValueError, match="Linear is no drafter"):
        DrafterTrainer(torch.nn.Linear(2, 2), target)


def test_targets_of_another_kind_are_refused(target: CausalLM, folder: Path) -> None:
    other: Any = load_reference(folder)
    for make in (
        lambda: DrafterTrainer(fresh_medusa(target), other),
        lambda: fresh_medusa(other),
        lambda: fresh_eagle(other, folder),
        lambda: load_heads(folder, other),
    ):
        with pytest.raises(ValueError, match=r"target is a LlamaForCausalLM: it must be a CausalLM of rollout\.models"):
            make()


def test_outputs_of_generate_are_learned_from_as_their_samples_are(llm: LLM, target: CausalLM) -> None:
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True, n=2)
    outputs = llm.generate(PROMPTS, params)
    one, other = (DrafterTrainer(fresh_medusa(target), target, PLAIN) for _ in range(2))
    for _ in range(2):
        assert one.learn(outputs) == other.learn(sampled(llm, params))
    for (name, tensor), (_, wanted) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(tensor, wanted), name


def test_forced_tokens_are_no_samples_of_the_policy(llm: LLM, target: CausalLM) -> None:
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[0]], replace(params, forced_token_ids=[11, 12, 13]))
    assert output.outputs[0].num_forced_tokens == 3
    (plain,) = llm.generate([[*PROMPTS[0], 11, 12, 13]], params)
    sample = replace(plain.outputs[0], token_ids=output.outputs[0].token_ids[3:])
    losses = [
        DrafterTrainer(fresh_medusa(target), target, PLAIN).learn([one])
        for one in (output, replace(plain, outputs=[sample]))
    ]
    assert losses[0] == losses[1]


def test_what_cannot_be_learned_from_is_refused_and_nothing_moves(llm: LLM, target: CausalLM) -> None:
    trainer = DrafterTrainer(fresh_medusa(target), target, PLAIN)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=9, seed=4, ignore_eos=True))
    wrong: Any
    for wrong, named in ((outputs[0].outputs, "CompletionOutput"), ([[1, 2, 3]], "list"), (["text"], "str")):
        with pytest.raises(TypeError, match=f"{named} is nothing to learn from"):
            trainer.learn(wrong)
    with pytest.raises(ValueError, match="part of a stream"):
        trainer.learn([replace(outputs[0], is_delta=True)])
    for rate in (float("nan"), float("inf"), 0.0, -1e-3):
        with pytest.raises(ValueError, match=rf"rate={rate} is not valid"):
            trainer.learn(outputs, rate)
    for name, tensor in trainer.named_parameters():
        assert not tensor.any(), name  # as fresh heads are


def test_heads_that_cannot_be_are_refused(target: CausalLM, folder: Path, tmp_path: Path) -> None:
    for number in (0, -1, 1.5, True):
        wrong: Any = number
        with pytest.raises(ValueError, match=rf"medusa\.num_heads={number}"):
            fresh_medusa(target, wrong)
        with pytest.raises(ValueError, match=rf"medusa\.num_layers={number}"):
            fresh_medusa(target, 2, wrong)
    nowhere = tmp_path / "nowhere"
    for make in (lambda: fresh_eagle(target, nowhere), lambda: load_heads(nowhere, target)):
        with pytest.raises(ValueError, match=f"{nowhere}"):
            make()
    with pytest.raises(ValueError, match=f"{nowhere}"):
        save_heads(fresh_eagle(target, folder), tmp_path / "heads", nowhere)
    assert not (tmp_path / "heads").exists()
    other = make_tiny_llama(nowhere, vocab_size=99)
    with pytest.raises(ValueError, match=r"vocab_size=99 and hidden_size=64, and the target has \[131, 64\]"):
        fresh_eagle(target, other)
    linear: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear is no drafter that can be saved"):
        save_heads(linear, tmp_path / "heads", folder)
