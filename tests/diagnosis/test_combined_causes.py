"""Two causes at once: both are named, the larger first. And healthy pairs of sampler and trainer: nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout import LLM, Cause, SamplingParams
from tests.support.oracle import load_reference
from tests.support.policies import Policies, push_mapping, random_prompt
from tests.support.tiny import make_tiny_llama
from tests.support.trainers import compared_without_temperature, left_padded, logprobs_of, overwrite_kv_cache

PROMPTS = [random_prompt(37, 1), random_prompt(9, 2), random_prompt(52, 3)]
PARAMS = SamplingParams(n=2, max_tokens=24, seed=5, ignore_eos=True)
COLD = SamplingParams(n=2, max_tokens=24, seed=5, ignore_eos=True, temperature=0.6)
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("float32"))


@pytest.fixture
def llm(policies: Policies) -> LLM:
    return policies.engine()


def test_wrong_weights_and_leaking_padding(llm: LLM, policies: Policies) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    for change, order in ((0.3, [Cause.BATCH_VARIANCE, Cause.WRONG_WEIGHTS]), (30.0, None)):
        trainer = policies.reference(0)
        with torch.no_grad():
            trainer.get_parameter(NAME)[3] += change
        diagnosis = llm.diagnose(outputs, left_padded(trainer), parameters=trainer.named_parameters())
        assert set(diagnosis.causes) == {Cause.BATCH_VARIANCE, Cause.WRONG_WEIGHTS}
        sizes = [diagnosis.parts[cause].mean_abs for cause in diagnosis.causes]
        assert sizes == sorted(sizes, reverse=True)
        assert order is None or list(diagnosis.causes) == order
        assert NAME in diagnosis.sentence and "padding" in diagnosis.sentence


def test_stale_kv_and_a_forgotten_temperature(llm: LLM, policies: Policies) -> None:
    llm.generate(PROMPTS, COLD)
    overwrite_kv_cache(llm)
    outputs = llm.generate(PROMPTS, COLD)
    trainer = policies.reference(0)
    used = compared_without_temperature(trainer, outputs)
    diagnosis = llm.diagnose(outputs, trainer, trainer_logprobs=used, sampling_params=COLD)
    assert diagnosis.causes == (Cause.STALE_KV, Cause.SAMPLING_SEMANTICS)
    assert diagnosis.parts[Cause.UNEXPLAINED].max_abs < 1e-4


@pytest.mark.parametrize("change", [0.02, 0.2])
def test_rounding_and_one_wrong_tensor(tmp_path: Path, change: float) -> None:
    folder = make_tiny_llama(tmp_path, dtype=torch.bfloat16)
    llm = LLM(folder, kv_cache_memory="2MiB")
    outputs = llm.generate(PROMPTS, PARAMS)
    trainer = load_reference(folder, torch.bfloat16)
    with torch.no_grad():
        trainer.get_parameter(NAME)[:, :] += change * (torch.arange(96) % 7 == 0)[:, None]
    diagnosis = llm.diagnose(outputs, trainer)
    assert set(diagnosis.causes) == {Cause.PRECISION, Cause.WRONG_WEIGHTS}
    assert diagnosis.verdict is (Cause.WRONG_WEIGHTS if change > 0.1 else Cause.PRECISION)
    assert diagnosis.evidence["tensors_differ"] == [NAME]


def test_policy_lag_and_leaking_padding(llm: LLM, policies: Policies) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    push_mapping(llm, policies.weights(1))
    trainer = policies.reference(1)
    diagnosis = llm.diagnose(outputs, left_padded(trainer), parameters=trainer.named_parameters())
    assert diagnosis.causes == (Cause.POLICY_LAG, Cause.BATCH_VARIANCE)


def test_parts_add_up_to_the_gap(llm: LLM, policies: Policies) -> None:
    llm.generate(PROMPTS, COLD)
    overwrite_kv_cache(llm)
    outputs = llm.generate(PROMPTS, COLD)
    trainer = policies.reference(1)
    used = compared_without_temperature(trainer, outputs)
    diagnosis = llm.diagnose(outputs, trainer, trainer_logprobs=used, sampling_params=COLD)
    assert sum(part.mean for part in diagnosis.parts.values()) == pytest.approx(diagnosis.gap.mean, abs=1e-9)
    assert sum(part.share for part in diagnosis.parts.values()) == pytest.approx(1.0)
    sampled = [completion.sampled_logprobs for output in outputs for completion in output.outputs]
    expected = sum(float((a - b).sum()) for a, b in zip(used, sampled, strict=True)) / diagnosis.num_tokens
    assert diagnosis.gap.mean == pytest.approx(expected, abs=1e-5)  # trainer's numbers less sampled_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16])
def test_healthy_pairs_are_none_or_precision(engine: torch.dtype, seed: int, tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, dtype=engine, seed=seed, tie=seed % 2 == 0)
    llm = LLM(folder, kv_cache_memory="2MiB")
    params = SamplingParams(n=3, max_tokens=20, seed=seed, temperature=0.8, top_p=0.95)
    outputs = llm.generate([random_prompt(11 + 17 * place, seed + place) for place in range(3)], params)
    for dtype in (torch.float32, torch.bfloat16):
        trainer = load_reference(folder, dtype)
        exact = engine is torch.float32 and dtype is torch.float32
        for given in ({}, {"parameters": trainer.named_parameters()}):
            model = logprobs_of(trainer) if given else trainer
            diagnosis = llm.diagnose(outputs, model, sampling_params=params, **given)
            assert diagnosis.causes == (() if exact else (Cause.PRECISION,)), str(diagnosis)
        unknown = llm.diagnose(outputs, logprobs_of(trainer), sampling_params=params)
        assert unknown.causes == (() if exact else (Cause.PRECISION,)), str(unknown)
    shared = llm.diagnose(outputs, llm.shared_model(), sampling_params=params)
    assert shared.verdict is Cause.NONE
    assert shared.gap.max_abs == 0.0


@pytest.mark.parametrize("dropout", [0.05, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_a_trainer_in_train_mode_is_another_implementation(
    llm: LLM, policies: Policies, dtype: torch.dtype, dropout: float
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    trainer = load_reference(policies.folders[0], dtype).train()
    for module in trainer.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout  # pyright: ignore[reportArgumentType]
    torch.manual_seed(0)
    diagnosis = llm.diagnose(outputs, trainer)
    assert diagnosis.causes == (Cause.IMPLEMENTATION,), str(diagnosis)
    assert "change from call to call" in diagnosis.sentence and "ignore it" not in diagnosis.sentence
    torch.manual_seed(0)
    for given in ({}, {"parameters": trainer.named_parameters()}):
        as_function = llm.diagnose(outputs, logprobs_of(trainer), **given)
        assert "change from call to call" in as_function.sentence
        assert as_function.verdict in (Cause.IMPLEMENTATION, Cause.PRECISION)
        assert as_function.verdict is Cause.IMPLEMENTATION or dropout < 0.1  # a little is like rounding for a function
    trainer.eval()
    healthy = llm.diagnose(outputs, trainer)
    assert healthy.causes == (() if dtype is torch.float32 else (Cause.PRECISION,))
    assert "call to call" not in healthy.sentence


def test_attention_scaled_otherwise_in_bfloat16_is_no_rounding_to_ignore(llm: LLM, policies: Policies) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    trainer = load_reference(policies.folders[0], torch.bfloat16)
    for layer in trainer.model.layers:
        layer.self_attn.scaling *= 1.1
    diagnosis = llm.diagnose(outputs, trainer)
    left, rounding = (diagnosis.parts[cause].mean_abs for cause in (Cause.IMPLEMENTATION, Cause.PRECISION))
    assert left == pytest.approx(diagnosis.evidence["rounding"]["left_in_float32"])
    assert left > 0.5 * rounding
    assert diagnosis.causes == (Cause.IMPLEMENTATION, Cause.PRECISION)
    assert "ignore it" not in diagnosis.sentence
    healthy = llm.diagnose(outputs, load_reference(policies.folders[0], torch.bfloat16))
    assert healthy.causes == (Cause.PRECISION,) and "ignore it" in healthy.sentence
