"""Logprobs that are NaN or infinite are named, with sample and position, and never taken for "no gap"."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout import LLM, Cause, RequestOutput, SamplingParams
from rollout_trainers.corrections import Mismatch
from rollout_trainers.mismatch import examine
from rollout_trainers.packing import PackedBatch
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.types import Example, Sample
from tests.support.policies import Policies, random_prompt
from tests.support.trainers import LogprobFunction, logprobs_of

PARAMS = SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True)
PROMPTS = [random_prompt(19, 1), random_prompt(9, 2), random_prompt(30, 3)]
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("float32"))


@pytest.fixture(scope="module")
def llm(policies: Policies) -> LLM:
    return policies.engine()


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS)


@pytest.fixture
def reference(policies: Policies) -> PreTrainedModel:
    return policies.reference(0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_that_the_trainer_used_is_named(
    llm: LLM, outputs: list[RequestOutput], reference: PreTrainedModel, value: float
) -> None:
    numbers = [sample.sampled_logprobs.tolist() for output in outputs for sample in output.outputs]
    numbers[2][5] = value
    for most in (8, 1):  # of many samples this one is looked at first
        diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=numbers, max_samples=most)
        assert diagnosis.causes == (Cause.NOT_FINITE,)
        assert f"(trainer_logprobs) are not finite: {value} at completion token 5 of sample 2" in diagnosis.sentence
        assert diagnosis.num_tokens == (5 * 12 if most == 8 else 0) + 5
        assert diagnosis.gap.max_abs < 1e-4  # of the tokens that can be compared


def test_nothing_but_bad_numbers_has_no_parts(
    llm: LLM, outputs: list[RequestOutput], reference: PreTrainedModel
) -> None:
    diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=[[math.nan] * 12] * 6)
    assert diagnosis.causes == (Cause.NOT_FINITE,)
    assert "72 of 72 tokens" in diagnosis.sentence
    assert diagnosis.parts == {} and diagnosis.metrics() == {} and diagnosis.num_tokens == 0
    assert "no gap" not in str(diagnosis)


def all_nan(sequences: list[list[int]]) -> list[list[float]]:
    return [[math.nan] * (len(sequence) - 1) for sequence in sequences]


def test_a_function_or_a_module_that_gives_nan_is_named(
    llm: LLM, outputs: list[RequestOutput], reference: PreTrainedModel
) -> None:
    reference.register_forward_hook(spoil_logits)
    for trainer in (all_nan, reference):
        diagnosis = llm.diagnose(outputs, trainer)
        assert diagnosis.causes == (Cause.NOT_FINITE,)
        assert "the trainer's logprobs are not finite: nan at completion token 0 of sample 0" in diagnosis.sentence


def spoil_logits(module: torch.nn.Module, args: object, output: dict[str, torch.Tensor]) -> None:
    output["logits"].mul_(math.nan)


def test_a_trainers_weight_that_is_not_finite_is_named_too(
    llm: LLM, outputs: list[RequestOutput], reference: PreTrainedModel
) -> None:
    with torch.no_grad():
        reference.get_parameter(NAME)[3, 0] = math.nan
    diagnosis = llm.diagnose(outputs, reference)
    assert diagnosis.causes == (Cause.NOT_FINITE, Cause.WRONG_WEIGHTS)
    assert f"the trainer's weights are not finite either ({NAME})" in diagnosis.sentence
    assert diagnosis.evidence["tensors_differ"] == [NAME]


def test_other_causes_are_found_in_the_tokens_that_are_finite(
    llm: LLM, outputs: list[RequestOutput], reference: PreTrainedModel
) -> None:
    with torch.no_grad():
        reference.get_parameter(NAME)[3] += 1.0
    diagnosis = llm.diagnose(outputs, first_is_nan(logprobs_of(reference)), parameters=reference.named_parameters())
    assert diagnosis.causes == (Cause.NOT_FINITE, Cause.WRONG_WEIGHTS)
    assert diagnosis.evidence["samples"] == [2, 3, 4, 5]  # the two others begin with NaN
    assert diagnosis.parts[Cause.WRONG_WEIGHTS].mean_abs > 1e-3


def first_is_nan(function: LogprobFunction) -> LogprobFunction:
    def spoiled(sequences: list[list[int]]) -> list[np.ndarray]:
        arrays = function(sequences)
        bad = [sequence[: len(PROMPTS[0])] == PROMPTS[0] for sequence in sequences]
        return [np.full(len(array), math.nan) if is_bad else array for array, is_bad in zip(arrays, bad, strict=True)]

    return spoiled


def test_nan_only_in_a_batch_says_so(llm: LLM, outputs: list[RequestOutput], reference: PreTrainedModel) -> None:
    function = logprobs_of(reference)

    def spoiled(sequences: list[list[int]]) -> list[np.ndarray]:
        return function(sequences) if len(sequences) == 1 else [array * math.nan for array in function(sequences)]

    diagnosis = llm.diagnose(outputs, spoiled, parameters=reference.named_parameters())
    assert diagnosis.causes == (Cause.NOT_FINITE,)
    assert "of all samples in one batch are not finite" in diagnosis.sentence


class SpoiledPolicy(SharedPolicy):
    """A policy whose logprobs overflow."""

    def frozen_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        return super().frozen_logprobs(batch) * math.nan


def test_a_grpo_run_whose_logprobs_are_nan_gets_an_answer(policies: Policies) -> None:
    llm = policies.engine()  # of its own: the policy trains its very tensors
    samples = [
        Sample(
            example=Example("abc"),
            group=0,
            prompt_token_ids=output.prompt_token_ids,
            completion_token_ids=sample.token_ids,
            text="",
            finish_reason="length",
            sampled_logprobs=sample.sampled_logprobs,
            raw_logprobs=sample.raw_logprobs,
            entropy=np.zeros(12, np.float32),
            seed=0,
            sample_index=index,
            policy_version=output.policy_version,
            receipt_id=output.receipt_id,
        )
        for output in llm.generate(PROMPTS, PARAMS)
        for index, sample in enumerate(output.outputs)
    ]
    policy = SpoiledPolicy(llm.shared_model(), 1.0)
    finding = examine(llm, policy, samples, 1.0, 100, 3, Mismatch(math.nan, math.nan, math.nan, 72))
    assert finding.verdict == "not finite"
    assert "nan at completion token 0 of sample" in finding.text
    assert finding.metrics == {}
