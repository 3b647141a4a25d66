"""Policies that transformers and PEFT run: logprobs and gradients are those of a plain loop over whole logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from rollout import LLM
from rollout_trainers import transformers_policy
from rollout_trainers.config import OptimizerSection
from rollout_trainers.lora import add_adapter
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import Denominators
from rollout_trainers.make_policy import load_causal_lm
from rollout_trainers.objective import micro_batch_loss
from rollout_trainers.optimizer import MasterAdamW
from rollout_trainers.packing import PackedBatch, pack
from rollout_trainers.padding import padded_micro_batches
from rollout_trainers.policy_config import LoraSection
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.transformers_policy import TransformersPolicy
from rollout_trainers.types import Example, Sample
from tests.support.causal_lms import plain_logprobs
from tests.support.live_bytes import LiveBytes
from tests.support.samples import make_sample
from tests.support.tiny import make_tiny_llama, make_tiny_model

# Plain, with norms of queries and keys, with soft caps, with sliding windows, with scaled logits (both ways), with a
# bias in the head, with a decoder within the decoder, with experts, and without attention.
ARCHITECTURES = ["Llama", "Qwen3", "Gemma2", "Gemma3", "Cohere", "Granite", "Phi", "OPT", "Mixtral", "Mamba"]
CPU = torch.device("cpu")


def samples() -> list[Sample]:
    found = [
        make_sample([5, 6, 7], [8, 9, 10, 11], advantage=1.0),
        make_sample([5, 6, 7], [12, 2], advantage=-0.5),
        make_sample([20, 21, 22, 23, 24, 25, 26], [0], advantage=0.25),
        make_sample([1], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13], advantage=-1.0),
    ]
    found[3].loss_mask = np.array([True] * 4 + [False] * 4 + [True] * 2)
    found[3].sampled_logprobs = found[3].sampled_logprobs[:6]
    return found


def tiny_model(folder: Path, architecture: str = "Llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        make_tiny_model(folder, f"{architecture}ForCausalLM", dtype), dtype=dtype
    )


def adapted(model: PreTrainedModel, **options: Any) -> PeftModel:
    """With an adapter that changes something."""
    peft = add_adapter(model, LoraSection(rank=4, alpha=8.0, **options), seed=1)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return peft


def objective(logprobs: torch.Tensor, entropies: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    return (logprobs * batch.advantages).sum() + 0.1 * entropies.sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


# case TR-06
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_and_entropies_are_those_of_the_models_own_logits(architecture: str, tmp_path: Path):
    model = tiny_model(tmp_path, architecture)
    policy = TransformersPolicy(model, temperature=0.7)
    batch = pack(samples(), range(4))
    with torch.no_grad():
        logprobs, entropies = policy.logprobs(batch)
        expected, expected_entropies = plain_logprobs(model, samples(), 0.7)
        assert (expected - plain_logprobs(model, samples(), 1.0)[0]).abs().max() > 1e-2
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(policy.frozen_logprobs(batch), expected, rtol=1e-5, atol=1e-5)


def test_a_soft_cap_of_the_logits_is_part_of_the_logprobs(tmp_path: Path):
    model = tiny_model(tmp_path, "Gemma2")
    batch = pack(samples(), range(4))
    capped = TransformersPolicy(model, 1.0).frozen_logprobs(batch)
    model.config.final_logit_softcapping = None
    assert (capped - TransformersPolicy(model, 1.0).frozen_logprobs(batch)).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["Gemma2", "Phi"])  # with what follows the head, and with a bias
def test_bfloat16_models_have_logits_that_are_not_rounded(architecture: str, tmp_path: Path):
    model = tiny_model(tmp_path, architecture, torch.bfloat16)
    policy = TransformersPolicy(model, temperature=1.0)
    batch = pack(samples(), range(4))
    hidden = policy.hidden(batch)
    logprobs, _ = policy.token_logprobs(hidden, batch)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    logits = copy.deepcopy(head).float()(hidden.detach().float())
    if architecture == "Gemma2":
        logits = 30 * torch.tanh(logits / 30)
    expected = torch.log_softmax(logits, -1)[torch.arange(len(batch.targets)), batch.targets]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert (plain_logprobs(model, samples(), 1.0)[0] - expected).abs().max() > 1e-3
    logprobs.sum().backward()
    gradient = head.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    assert gradient.any()


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2", "Mixtral"])
def test_gradients_are_those_of_a_plain_loop(architecture: str, tmp_path: Path):
    model = tiny_model(tmp_path, architecture)
    policy = TransformersPolicy(model, temperature=0.7)
    for batch in padded_micro_batches(samples(), 16):
        objective(*policy.logprobs(batch), batch).backward()
    ours = gradients(model)
    objective(*plain_logprobs(model.eval(), samples(), 0.7), pack(samples(), range(4))).backward()
    plain = gradients(model)
    assert ours.keys() == plain.keys()
    for name in plain:
        assert (ours[name] - plain[name]).norm() <= 1e-4 * plain[name].norm() + 1e-6, name


def test_logits_that_must_be_made_in_the_models_own_pass_are_the_same(tmp_path: Path):
    """As under accelerate's FSDP2 and mixed precision. The latter replaces the model's forward method."""
    model = tiny_model(tmp_path)
    policy = TransformersPolicy(model, temperature=0.7)
    policy.wrap(model, writes=True, most=int, at_once=True)
    batch = pack(samples(), range(4))
    objective(*policy.logprobs(batch), batch).backward()
    ours = gradients(model)
    expected, expected_entropies = plain_logprobs(model.eval(), samples(), 0.7)
    objective(expected, expected_entropies, batch).backward()
    for name, gradient in gradients(model).items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
    assert (policy.frozen_logprobs(batch) - expected).abs().max() < 1e-5

    forward = model.forward

    def rounded(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*arguments, **options)

    model.forward = rounded  # type: ignore[method-assign]
    difference = (policy.frozen_logprobs(batch) - plain_logprobs(model, samples(), 0.7)[0]).abs()
    assert difference.max() < 0.05
    assert (policy.frozen_logprobs(batch) - expected).abs().max() > 1e-4  # it was this method that ran


def test_only_adapters_get_gradients_and_these_are_a_plain_loops(tmp_path: Path):
    model = adapted(tiny_model(tmp_path))
    policy = TransformersPolicy(model, temperature=0.7)
    batch = pack(samples(), range(4))
    objective(*policy.logprobs(batch), batch).backward()
    ours = gradients(model)
    assert ours.keys() == {name for name, _ in policy.named_parameters()}
    assert all("lora_" in name for name in ours)
    objective(*plain_logprobs(model.eval(), samples(), 0.7), batch).backward()
    for name, gradient in gradients(model).items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_logits_in_parts_change_neither_values_nor_gradients_and_are_not_all_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = make_tiny_llama(tmp_path, vocab_size=4096, hidden_size=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = TransformersPolicy(model, temperature=0.7)
    many = [make_sample([index, 5, 6], list(range(20, 52)), advantage=1.0) for index in range(8)]
    batch = pack(many, range(8))

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        with LiveBytes(model.parameters(), settle=0.0) as memory:
            logprobs, entropies = policy.logprobs(batch)
            objective(logprobs, entropies, batch).backward()
        return logprobs.detach(), gradients(model), memory.peak

    logprobs, whole, peak = run()
    monkeypatch.setattr(transformers_policy, "_LOGIT_BYTES", 4 * 4096 * 16)
    parts_logprobs, parts, parts_peak = run()
    torch.testing.assert_close(parts_logprobs, logprobs, rtol=1e-6, atol=1e-6)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-5)
    all_logits = 4 * 4096 * batch.num_completion_tokens
    assert peak > 3 * all_logits  # the logits, their log-softmax, and what the entropy is made of
    assert parts_peak < all_logits


# case TR-06
def test_before_an_update_the_logprobs_are_the_engines_within_rounding_and_nothing_is_clipped(tmp_path: Path):
    folder = make_tiny_llama(tmp_path, tokenizer=True)
    llm = LLM(folder, dtype="float32", max_model_len=128, kv_cache_memory="4 MiB")
    producer = RolloutProducer(llm, temperature=0.7, max_tokens=16, seed=3)
    sampled = producer.produce(1, [Example("abc"), Example("hello world")], group_size=3)
    for sample, advantage in zip(sampled, (1.0, -1.0, 0.5, -0.5, 2.0, -2.0), strict=True):
        sample.advantage = advantage
    policy = TransformersPolicy(load_causal_lm(folder, "float32", CPU), temperature=0.7)
    for batch in padded_micro_batches(sampled, 60):
        logprobs, entropies = policy.logprobs(batch)
        for old in (batch.sampler_logprobs, policy.frozen_logprobs(batch)):
            assert (torch.exp(logprobs.detach() - old) - 1).abs().max() < 1e-3
        denominators = Denominators(batch.num_completion_tokens, len(batch.sample_indices), 16)
        micro = micro_batch_loss(logprobs, entropies, batch, denominators, LossSection())
        assert (micro.clipped.low, micro.clipped.high) == (0, 0)
        assert abs(micro.drift_sum) < 1e-3
        forgotten = TransformersPolicy(policy.causal_lm, temperature=1.0).frozen_logprobs(batch)
        assert (torch.exp(forgotten - batch.sampler_logprobs) - 1).abs().max() > 1e-3


def test_the_reference_is_a_copy_of_the_weights_that_the_run_began_with(tmp_path: Path):
    model = tiny_model(tmp_path)
    policy = TransformersPolicy(model, temperature=0.7, keep_reference=True)
    batch = pack(samples(), range(4))
    before = policy.frozen_logprobs(batch)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert torch.equal(policy.reference_logprobs([batch])[0], before)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    assert not torch.equal(policy.frozen_logprobs(batch), before)


def test_the_reference_of_an_adapter_is_its_base_without_a_copy_and_it_learns_on_afterwards(tmp_path: Path):
    base = tiny_model(tmp_path)
    batch = pack(samples(), range(4))
    before = TransformersPolicy(base, temperature=0.7).frozen_logprobs(batch)
    model = adapted(base)
    policy = TransformersPolicy(model, temperature=0.7, keep_reference=True)
    optimizer = MasterAdamW(policy.named_parameters(), OptimizerSection())
    with LiveBytes(model.parameters(), settle=0.0) as memory:
        (reference,) = policy.reference_logprobs([batch])
    assert torch.equal(reference, before)
    assert memory.peak < sum(parameter.nbytes for parameter in base.parameters()) / 2
    own = policy.frozen_logprobs(batch)
    assert (own - before).abs().max() > 1e-2
    objective(*policy.logprobs(batch), batch).backward()
    assert optimizer.step(1e-2) > 0
    assert not torch.equal(policy.frozen_logprobs(batch), own)


def test_an_adapter_begins_as_no_change_at_all_the_same_for_the_same_seed(tmp_path: Path):
    base = tiny_model(tmp_path)
    batch = pack(samples(), range(4))
    before = TransformersPolicy(base, temperature=1.0).frozen_logprobs(batch)
    state = torch.get_rng_state()
    one, same, other = (add_adapter(copy.deepcopy(base), LoraSection(rank=4), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(TransformersPolicy(one, 1.0).frozen_logprobs(batch), before)
    values = [dict(model.named_parameters()) for model in (one, same, other)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert any(not torch.equal(values[0][name], values[2][name]) for name in values[0])


def test_every_choice_of_lora_reaches_peft(tmp_path: Path):
    section = LoraSection(
        rank=4,
        alpha=8.0,
        dropout=0.25,
        target_modules=["q_proj", "v_proj", "o_proj"],
        exclude_modules=["o_proj"],
        layers_to_transform=[1],
        rank_pattern={"v_proj": 2},
        alpha_pattern={"v_proj": 16},
        use_rslora=True,
        initialization="gaussian",
    )
    model = add_adapter(tiny_model(tmp_path), section, seed=1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if "lora_A" in name}
    prefix = "base_model.model.model.layers.1.self_attn"
    assert shapes == {
        f"{prefix}.q_proj.lora_A.default.weight": (4, 64),
        f"{prefix}.v_proj.lora_A.default.weight": (2, 64),
    }
    layers = {name: module for name, module in model.named_modules() if name.endswith(("q_proj", "v_proj"))}
    scaled = {name: layer.scaling["default"] for name, layer in layers.items() if hasattr(layer, "scaling")}
    assert scaled == {f"{prefix}.q_proj": 8 / 4**0.5, f"{prefix}.v_proj": 16 / 2**0.5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["not_there"]}, r"policy.lora.target_modules names 'not_there': the model has .*q_proj"),
        ({"target_modules": ["q_proj", "not_there"]}, r"policy.lora.target_modules names 'not_there': the model has"),
        ({"exclude_modules": ["not_there"]}, r"policy.lora.exclude_modules names 'not_there': the targets .*q_proj"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["k_proj"]}, r"names 'k_proj': the targets are q_proj$"),
        ({"exclude_modules": ["layers.7.self_attn.q_proj"]}, r"exclude_modules names 'layers.7.self_attn.q_proj'"),
        ({"rank_pattern": {"not_there": 2}}, r"policy.lora.rank_pattern names 'not_there': the targets are .*q_proj"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"k_proj": 2}}, r"alpha_pattern names 'k_proj': the targ"),
        ({"rank_pattern": {".*_proj": 8, "q_proj": 2}}, r"rank_pattern names 'q_proj', which no target goes by"),
        ({"exclude_modules": ["lm_head"]}, r"exclude_modules names 'lm_head': the targets are [^h]*$"),
        ({"layers_to_transform": [1]}, r"layers_to_transform=\[1\] is not valid with target_modules='all-linear'"),
        ({"layers_to_transform": [7], "target_modules": ["q_proj"]}, r"has 7: the model has layers 0 to 1"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(tmp_path: Path, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        add_adapter(tiny_model(tmp_path), LoraSection(rank=4, **fields), seed=1)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_an_adapter_of_embeddings_that_are_the_head_is_refused(tmp_path: Path, module: str):
    model = load_causal_lm(make_tiny_llama(tmp_path, tie=True), "auto", CPU)
    with pytest.raises(ValueError, match=r"target_modules is not valid for this model: .*\(tie_word_embeddings\)"):
        add_adapter(model, LoraSection(rank=4, target_modules=["q_proj", module]), seed=1)


def test_adapters_are_dropped_out_while_they_learn_and_nowhere_else(tmp_path: Path):
    policy = TransformersPolicy(adapted(tiny_model(tmp_path), dropout=0.5), temperature=1.0)
    batch = pack(samples(), range(4))
    frozen = policy.frozen_logprobs(batch)
    torch.manual_seed(0)
    learning = policy.logprobs(batch)[0].detach()
    torch.manual_seed(0)
    assert torch.equal(policy.logprobs(batch)[0], learning)
    assert not torch.allclose(policy.logprobs(batch)[0], learning)
    assert torch.equal(policy.frozen_logprobs(batch), frozen)


def test_a_models_own_dropout_is_switched_off(tmp_path: Path):
    folder = make_tiny_model(tmp_path, "GPT2LMHeadModel", torch.float32)
    assert AutoConfig.from_pretrained(folder).resid_pdrop > 0
    policy = TransformersPolicy(load_causal_lm(folder, "auto", CPU), temperature=1.0)
    batch = pack(samples(), range(4))
    assert torch.equal(policy.logprobs(batch)[0].detach(), policy.frozen_logprobs(batch))


@pytest.mark.parametrize("with_adapter", [False, True])
def test_gradient_checkpointing_changes_no_bit_and_keeps_less(with_adapter: bool, tmp_path: Path):
    folder = make_tiny_llama(tmp_path, num_layers=6, near_uniform=True)
    many = [make_sample([index, 5, 6], list(range(20, 52)), advantage=1.0) for index in range(8)]
    batch = pack(many, range(8))
    found = []
    for checkpointing in (False, True):
        model: torch.nn.Module = load_causal_lm(folder, "float32", CPU)
        if with_adapter:
            model = adapted(model)
        policy = TransformersPolicy(model, 0.7, gradient_checkpointing=checkpointing)
        with LiveBytes(model.parameters(), settle=0.0) as memory:
            loss = objective(*policy.logprobs(batch), batch)
            kept = memory.live
        loss.backward()
        found.append((loss.detach(), gradients(model), kept))
    (plain_loss, plain, plain_kept), (loss, ours, kept) = found
    assert torch.equal(loss, plain_loss)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert kept < plain_kept / 3


class AddsItsInput(LlamaForCausalLM):
    """Its logits are not a function of its last hidden states alone."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits + input_ids[..., None]
        return output


def test_what_cannot_be_trained_so_is_refused(tmp_path: Path):
    folder = make_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="AddsItsInput"):
        TransformersPolicy(AddsItsInput.from_pretrained(folder), temperature=1.0)
    with pytest.raises(ValueError, match="Linear is no policy"):
        TransformersPolicy(torch.nn.Linear(2, 2), temperature=1.0)
    policy = TransformersPolicy(tiny_model(tmp_path / "llama"), temperature=1.0)
    with pytest.raises(ValueError, match="keep_reference"):
        policy.reference_logprobs([pack(samples(), range(4))])


def test_what_is_saved_loads_in_transformers_and_in_peft(tmp_path: Path):
    folder = make_tiny_llama(tmp_path / "source", tokenizer=True)
    model = adapted(load_causal_lm(folder, "float32", CPU))
    TransformersPolicy(model, temperature=1.0).save(tmp_path / "saved", folder)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = plain_logprobs(model.eval(), samples(), 1.0)[0]
        assert (plain_logprobs(plain, samples(), 1.0)[0] - expected).abs().max() > 1e-2
        torch.testing.assert_close(plain_logprobs(merged, samples(), 1.0)[0], expected, rtol=1e-4, atol=1e-4)
        loaded = PeftModel.from_pretrained(plain, str(tmp_path / "saved" / "adapter"))
        assert torch.equal(plain_logprobs(loaded, samples(), 1.0)[0], expected)


def test_a_peft_model_of_ones_own_is_a_policy(tmp_path: Path):
    own = get_peft_model(tiny_model(tmp_path), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    policy = TransformersPolicy(own, temperature=1.0)
    kinds = {name.split(".")[-3] for name, _ in policy.named_parameters()}
    assert kinds == {"lora_A", "lora_B", "lora_magnitude_vector"}
