"""Extreme parameters, and logits that are not numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.core.schedule import Draw
from rollout.sampling.sampler import sample_rows
from rollout.worker.inputs import StepInputs
from rollout_kernels import SampleResult
from tests.support.tiny import make_tiny_llama


def test_values_outside_a_parameters_range_are_refused_by_name() -> None:
    # case SP-01
    wrong = {
        "temperature": (math.inf, math.nan, -1, -1e-9, "1", True, 10**400),
        "top_p": (0, 0.0, -0.1, 1.1, math.nan, math.inf),
        "top_k": (-2, 1.5, True),
        "min_p": (-0.1, 1.1, math.nan),
        "repetition_penalty": (0, 0.0, 1e-300, math.nan, 10**400),
        "n": (0, -1, 1.5),
        "max_tokens": (0, -5, 2.5),
        "min_tokens": (-1, 17),
        "seed": (-2, 2**63, 1.5),
        "stop": ("", ["a", ""], [3], b"a"),
        "first_sample_index": (-1, 2**31),
        "logit_bias": ({1: 1e300}, {1: math.nan}, {1: 10**400}, {"9" * 5000: 1.0}, {"1": 1, 1: 2}, {"abc": 1}, {-1: 1}),
        "stop_token_ids": ([-1], [1.5]),
        "logprobs": (-2, 1.5),
    }
    for field, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=field):
                SamplingParams(**{field: value})


def test_every_valid_extreme_gives_finite_probabilities(tmp_path: Path) -> None:
    # case SP-01
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory="8MiB")
    prompt = [7, 5, 3]
    greedy = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    extremes = [
        *({"temperature": t} for t in (1e-12, 1e-4, 1e-2, 100.0, 1e6)),
        *({"top_p": p} for p in (1e-9, 1.0)),
        *({"top_k": k} for k in (-1, 0, 1, 131, 140, 2**40)),
        *({"min_p": p} for p in (0.0, 1.0)),
    ]
    params = [SamplingParams(seed=5, max_tokens=8, ignore_eos=True, **extreme) for extreme in extremes]
    params += [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)] * 3  # greedy beside sampled rows
    outputs = [output.outputs[0] for output in llm.generate([prompt] * len(params), params)]
    for asked, completion in zip(params, outputs, strict=True):
        for array in (completion.raw_logprobs, completion.sampled_logprobs, completion.kept_mass, completion.entropy):
            assert np.isfinite(array).all(), asked
        assert all(0 <= token_id < 131 for token_id in completion.token_ids)
        if asked.temperature <= 1e-4 or asked.top_k == 1 or asked.top_p == 1e-9 or asked.min_p == 1.0:
            assert completion.token_ids == greedy.token_ids, asked
    plain = llm.generate(prompt, SamplingParams(seed=5, max_tokens=8, ignore_eos=True))[0].outputs[0]
    off = [c for asked, c in zip(params, outputs, strict=True) if asked.top_k in (131, 140, 2**40)]
    assert len(off) == 3 and all(completion.token_ids == plain.token_ids for completion in off)


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all nan", "all -inf"])
@pytest.mark.parametrize(("temperature", "enforce_eager"), [(0.0, False), (1.0, False), (1.0, True)])
def test_logits_that_are_not_numbers_end_their_own_request_in_error(
    poison: float | str, temperature: float, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case SP-05
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4, enforce_eager=enforce_eager)
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=1, ignore_eos=True)
    prompts = [[10 + i] * 9 for i in range(5)]
    clean = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert llm.reset_prefix_cache()

    num_calls = 0

    def poisoned(
        logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int], inputs: StepInputs, *rest: Any
    ) -> SampleResult:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            row = logits[2]
            if isinstance(poison, str):
                row.fill_(math.nan if poison == "all nan" else -math.inf)
            else:
                row[77] = poison
        return sample_rows(logits, draws, rows, inputs, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("rollout.worker.runner.sample_rows", poisoned)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]

    bad = outputs.pop(2)
    expected = clean.pop(2)
    assert bad.finish_reason == "error"
    assert bad.stop_reason == ("no token was left to draw" if poison == "all -inf" else "the logits are not numbers")
    assert bad.token_ids == expected.token_ids[:3] and len(bad.raw_logprobs) == 3
    for a, b in zip(outputs, clean, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == "length"
        assert np.array_equal(a.sampled_logprobs, b.sampled_logprobs)
    assert llm.get_metrics()["num_errors_total"] == 1
    assert llm.get_metrics()["kv_cache_usage"] == 0
    again = llm.generate([prompts[2]], params)[0]
    assert again.num_cached_tokens == 0  # nothing of the bad request was published
    assert again.outputs[0].token_ids == expected.token_ids


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_error_of_a_forward_pass_is_raised_and_loses_no_tokens(
    enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory="8MiB", enforce_eager=enforce_eager)
    params = SamplingParams(max_tokens=10, seed=1, ignore_eos=True, n=2)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs
    llm.enqueue([[5, 6, 7]], params)
    for _ in range(4):
        llm.step()

    def broken(*arguments: Any) -> SampleResult:
        raise MemoryError("injected")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="injected"):
        patch.setattr("rollout.worker.runner.sample_rows", broken)
        llm.step()
    outputs = llm.wait_for_completion()[0].outputs
    assert [c.token_ids for c in outputs] == [c.token_ids for c in expected]
    assert llm.get_metrics()["kv_cache_usage"] == 0
