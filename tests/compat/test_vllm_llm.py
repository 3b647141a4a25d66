"""`rollout.compat.vllm.LLM`, driven as TRL drives vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rollout
import rollout.compat
from rollout import SamplingParams
from rollout.compat.vllm import LLM
from rollout.errors import (
    TensorShapeError,
    UncoveredParametersError,
    UnknownTensorError,
    WeightsNotLoadedError,
)
from tests.support.oracle import load_reference, reference_logprobs

PROMPT = [5, 17, 99, 3, 64, 28, 11]
SMALL: dict[str, Any] = {"kv_cache_memory": "1MiB", "block_size": 4}
# What TRL 1.16 passes, apart from the model.
TRL: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.3,
    "max_model_len": None,
    "max_num_seqs": 8,
    "enable_sleep_mode": True,
    "model_impl": "vllm",
    "distributed_executor_backend": "external_launcher",
    "seed": 0,
    "max_num_batched_tokens": 4096,
    "logprobs_mode": "processed_logprobs",
    "quantization": None,
    "trust_remote_code": False,
}
BOTH = TRL | SMALL
TOKENS = SamplingParams(temperature=0.7, max_tokens=6, logprobs=0, ignore_eos=True)


@pytest.fixture
def checkpoints(tiny_model: Callable[..., Path]) -> tuple[Path, Path]:
    """The model that an engine begins with, and the one that its trainer has."""
    return tiny_model(seed=1), tiny_model(seed=2)


@pytest.fixture
def llm(checkpoints: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(checkpoints[0], **BOTH) as llm:
        yield llm


def rows(*prompts: list[int]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def push(llm: LLM, checkpoint: Path, leave_out: str = "") -> None:
    """As TRL does it: one tensor a call, by the path into vLLM's insides."""
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name != leave_out:
            model = llm.llm_engine.model_executor.driver_worker.model_runner.model
            assert model.load_weights([(name, tensor)]) == {name}


def test_weights_pushed_one_by_one_are_one_policy(llm: LLM, checkpoints: tuple[Path, Path]):  # cases WS-01, WS-05
    before = llm.generate(rows(PROMPT), TOKENS)[0]
    push(llm, checkpoints[1])
    assert llm.reset_prefix_cache()
    after = llm.generate(rows(PROMPT), TOKENS)[0]
    assert (before.policy_version, after.policy_version, llm.policy_version) == (0, 1, 1)
    assert after.num_cached_tokens == 0
    seed = after.outputs[0].seed
    with rollout.LLM(checkpoints[1], **SMALL) as fresh:
        assert llm.receipt is not None and fresh.receipt is not None
        assert llm.receipt.parameters_fingerprint == fresh.receipt.parameters_fingerprint
        (expected,) = fresh.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=6, ignore_eos=True, seed=seed))
    assert after.outputs[0].token_ids == expected.outputs[0].token_ids
    assert np.array_equal(after.outputs[0].sampled_logprobs, expected.outputs[0].sampled_logprobs)


def test_a_push_without_a_reset_is_in_force_when_tokens_are_asked_for(llm: LLM, checkpoints: tuple[Path, Path]):
    push(llm, checkpoints[1])
    assert llm.generate(rows(PROMPT), TOKENS)[0].policy_version == 1


def test_a_policy_that_is_not_whole_serves_nobody_until_it_is(llm: LLM, checkpoints: tuple[Path, Path]):
    missing = "model.layers.1.mlp.up_proj.weight"
    push(llm, checkpoints[1], leave_out=missing)
    with pytest.raises(UncoveredParametersError, match=missing):
        llm.reset_prefix_cache()
    with pytest.raises(rollout.errors.EngineUnusableError):
        llm.generate(rows(PROMPT), TOKENS)
    push(llm, checkpoints[1])
    llm.reset_prefix_cache()
    assert llm.generate(rows(PROMPT), TOKENS)[0].policy_version == 1


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("model.layers.0.mlp.up.weight", (96, 64), UnknownTensorError),
        ("model.norm.weight", (65,), TensorShapeError),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_and_the_old_policy_stays(
    llm: LLM, name: str, shape: tuple[int, ...], error: type[Exception]
):
    before = llm.generate(rows(PROMPT), TOKENS)[0]
    with pytest.raises(error, match=name):
        llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, torch.zeros(shape))])
    after = llm.generate(rows(PROMPT), TOKENS)[0]
    assert (before.policy_version, after.policy_version) == (0, 0)


def test_sleep_as_trl_does_it(llm: LLM, checkpoints: tuple[Path, Path]):  # cases SW-03, WS-03
    for step in (1, 2):
        llm.sleep(level=2)
        with pytest.raises((WeightsNotLoadedError, rollout.errors.EngineAsleepError)):
            llm.generate(rows(PROMPT), TOKENS)
        llm.wake_up(tags=["weights"])
        push(llm, checkpoints[step % 2])
        llm.reset_prefix_cache()
        llm.wake_up(tags=["kv_cache"])
        (output,) = llm.generate(rows(PROMPT), TOKENS)
        assert output.policy_version == step
        check_logprobs(output, checkpoints[step % 2])


def check_logprobs(output: rollout.RequestOutput, checkpoint: Path) -> None:
    """The dictionaries hold the sampled token alone, with its logprob at the temperature, as transformers has it."""
    sample = output.outputs[0]
    raw = torch.as_tensor(reference_logprobs(load_reference(checkpoint), PROMPT + sample.token_ids)).double()
    tempered = torch.log_softmax(raw[len(PROMPT) - 1 : -1] / 0.7, dim=-1)
    assert sample.logprobs is not None
    for row, token_id, entry in zip(tempered, sample.token_ids, sample.logprobs, strict=True):
        assert list(entry) == [token_id]
        assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry[token_id].rank == 1 + int((row > row[token_id]).sum())


def test_logprobs_of_zero_are_those_of_the_sampled_token_after_the_temperature(
    llm: LLM, checkpoints: tuple[Path, Path]
):
    check_logprobs(llm.generate(rows(PROMPT), TOKENS)[0], checkpoints[0])


def test_equal_rows_are_samples_of_one_prompt_that_is_computed_once(llm: LLM, checkpoints: tuple[Path, Path]):
    other = [8, 9, 10, 11, 12]
    with rollout.LLM(checkpoints[0], **SMALL) as plain:
        expected = plain.generate([PROMPT, other, PROMPT], [with_n(4), with_n(2), with_n(1)])
        computed = plain.engine.counters.num_computed_tokens
    outputs = llm.generate(rows(PROMPT, PROMPT, PROMPT, PROMPT, other, other, PROMPT), TOKENS)
    assert [output.prompt_token_ids for output in outputs] == [PROMPT] * 4 + [other] * 2 + [PROMPT]
    assert all(len(output.outputs) == 1 and output.outputs[0].index == 0 for output in outputs)
    samples = [sample for output in expected for sample in output.outputs]
    for output, sample in zip(outputs, samples, strict=True):  # bit for bit, under their own seeds and indices
        row = output.outputs[0]
        assert (row.token_ids, row.seed, row.sample_index) == (sample.token_ids, sample.seed, sample.sample_index)
        assert np.array_equal(row.sampled_logprobs, sample.sampled_logprobs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 7
    assert llm.engine.counters.num_computed_tokens == computed


def with_n(n: int) -> SamplingParams:
    return SamplingParams(n=n, temperature=0.7, max_tokens=6, ignore_eos=True)


def test_equal_rows_with_a_seed_have_equal_samples_as_under_vllm(llm: LLM):
    seeded = SamplingParams(temperature=0.7, max_tokens=6, ignore_eos=True, seed=5)
    one, two = llm.generate(rows(PROMPT, PROMPT), seeded)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


def test_other_calls_go_to_the_engine_as_they_are(llm: LLM):  # online DPO: text, and two samples a prompt
    outputs = llm.generate([PROMPT, PROMPT], with_n(2), use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [2, 2]
    assert llm.generate([]) == []
    with pytest.raises(ValueError, match="multi_modal_data"):
        llm.generate([{"prompt_token_ids": PROMPT, "multi_modal_data": {"image": object()}}], TOKENS)


def test_completions_end_where_the_context_does(llm: LLM):
    assert llm.llm_engine.model_config.max_model_len == 512
    (output,) = llm.generate(rows([7] * 508), TOKENS)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tensor_parallel_size", 2),
        ("distributed_executor_backend", "ray"),
        ("model_impl", "transformers"),
        ("quantization", "bitsandbytes"),
        ("trust_remote_code", True),
        ("enable_sleep_mode", "yes"),
    ],
)
def test_what_this_engine_does_not_do_is_refused_by_name(checkpoints: tuple[Path, Path], argument: str, value: object):
    options: dict[str, Any] = {**TRL, **SMALL, argument: value}
    with pytest.raises(ValueError, match=f"{argument}={value!r}"):
        LLM(checkpoints[0], **options)


@pytest.mark.slow
def test_engines_in_processes_of_their_own_take_pushed_weights(checkpoints: tuple[Path, Path]):
    replicas: dict[str, Any] = {"data_parallel_size": 2, "num_threads": 1}
    with LLM(checkpoints[0], **BOTH | replicas) as llm:
        push(llm, checkpoints[1])
        llm.reset_prefix_cache()
        outputs = llm.generate(rows(PROMPT, PROMPT, [8, 9, 10]), TOKENS)
    assert [output.policy_version for output in outputs] == [1, 1, 1]
    check_logprobs(outputs[0], checkpoints[1])
