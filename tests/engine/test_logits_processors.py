"""Custom logits processors: batched, in order, each request's errors its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from rollout import LLM, CompletionOutput, LogitsBatch, SamplingParams

ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> LLM:
    return LLM(tiny_model(), kv_cache_memory="8MiB")


def same(a: CompletionOutput, b: CompletionOutput) -> bool:
    return a.token_ids == b.token_ids and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


class Recorder:
    """Adds a bias of its own, and remembers what it was given."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = bias
        self.calls: list[tuple[torch.Tensor, LogitsBatch]] = []

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        self.calls.append((logits.clone(), batch))
        for token_id, value in self.bias.items():
            logits[:, token_id] += value  # in place: it has a copy
        return logits


def test_a_processor_that_adds_a_bias_is_a_logit_bias(llm: LLM) -> None:
    bias = {5: 3.0, 77: -2.0}
    common: dict[str, Any] = {"n": 3, "seed": 1, "max_tokens": 10, "ignore_eos": True, "frequency_penalty": 0.4}
    expected = llm.generate([4, 5, 6], SamplingParams(logit_bias=bias, **common))[0].outputs
    outputs = llm.generate([4, 5, 6], SamplingParams(logits_processors=Recorder(bias), **common))[0].outputs  # type: ignore[arg-type]
    assert all(same(a, b) for a, b in zip(outputs, expected, strict=True))


def test_a_processor_is_called_once_a_step_for_all_rows_that_name_it(llm: LLM) -> None:
    processor = Recorder({})
    prompts = [[4, 5, 6], [9], [10, 11]]
    params = [
        SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True, logits_processors=[processor]),
        SamplingParams(seed=2, max_tokens=5, ignore_eos=True),
        SamplingParams(seed=3, first_sample_index=7, max_tokens=5, ignore_eos=True, logits_processors=[processor]),
    ]
    plain = [replace(asked, logits_processors=None) for asked in params]
    expected = llm.generate(prompts, plain)
    outputs = llm.generate(prompts, params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert all(same(a, b) for a, b in zip(output.outputs, wanted.outputs, strict=True))
    assert len(processor.calls) == 5
    samples = {(1, 0): (prompts[0], 0, 0), (1, 1): (prompts[0], 0, 1), (3, 7): (prompts[2], 2, 0)}
    for step, (logits, batch) in enumerate(processor.calls):
        assert logits.shape == (3, 131) and logits.dtype == torch.float32
        assert {*zip(batch.seeds, batch.sample_indices, strict=True)} == samples.keys()
        for row, key in enumerate(zip(batch.seeds, batch.sample_indices, strict=True)):
            prompt, request, sample = samples[key]
            assert batch.prompt_token_ids[row] == prompt
            assert batch.output_token_ids[row] == outputs[request].outputs[sample].token_ids[:step]


def test_processors_run_in_the_order_of_the_list(llm: LLM) -> None:
    def double(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return logits * 2

    def lift(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        return torch.where(torch.arange(131) == 9, logits + 5, logits)

    def both(first: float) -> Any:
        return lambda logits, batch: torch.where(torch.arange(131) == 9, logits * 2 + first, logits * 2)

    for processors, value in (([double, lift], 5.0), ([lift, double], 10.0)):
        asked = SamplingParams(seed=1, max_tokens=8, ignore_eos=True, logits_processors=processors)
        joined = SamplingParams(seed=1, max_tokens=8, ignore_eos=True, logits_processors=[both(value)])
        a, b = llm.generate([[4, 5], [4, 5]], [asked, joined])
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        np.testing.assert_allclose(a.outputs[0].sampled_logprobs, b.outputs[0].sampled_logprobs, rtol=1e-5)


def test_processors_of_transformers_are_taken(llm: LLM) -> None:
    prompts = [[4, 5, 6, 6], [9], [4] * 20]
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    expected = llm.generate(prompts, SamplingParams(repetition_penalty=1.6, **common))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.6)])
    outputs = llm.generate(prompts, SamplingParams(logits_processors=processors, **common))
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        np.testing.assert_allclose(output.outputs[0].sampled_logprobs, wanted.outputs[0].sampled_logprobs, atol=1e-6)
    ngrams = SamplingParams(n=4, max_tokens=40, temperature=0.3, seed=1, ignore_eos=True)
    ngrams = replace(ngrams, logits_processors=[NoRepeatNGramLogitsProcessor(2)])
    for completion in llm.generate([4, 5], ngrams)[0].outputs:
        tokens = [4, 5, *completion.token_ids]
        assert len({*pairwise(tokens)}) == len(tokens) - 1


def raising(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
    if len(batch.output_token_ids[0]) == 2:
        raise KeyError("no such state")
    return logits


def with_nan(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
    logits[:, 3] = math.nan if len(batch.output_token_ids[0]) == 2 else 0
    return logits


@pytest.mark.parametrize(
    ("processor", "num_tokens", "reason"),
    [
        (raising, 2, "logits processor raising raised KeyError: 'no such state'"),
        (with_nan, 2, "the logits are not numbers"),
        (lambda logits, batch: logits[:, :7], 0, r"<lambda> returned torch.float32 \[2, 7\] on cpu instead of .*131"),
        (lambda logits, batch: logits.double(), 0, "<lambda> returned torch.float64"),
        (lambda logits, batch: logits.t_(), 0, r"returned torch.float32 \[131, 2\] on cpu instead of .*\[2, 131\]"),
        (lambda logits, batch: logits.resize_(0), 0, r"returned torch.float32 \[0\] on cpu"),
        (lambda logits, batch: logits.to_sparse(), 0, "torch.sparse_coo instead of"),
        (lambda logits, batch: logits.tolist(), 0, "returned list instead of a tensor"),
        (lambda logits, batch: logits.fill_(-math.inf), 0, "no token was left to draw"),
        (RepetitionPenaltyLogitsProcessor.__call__, 0, "raised "),
    ],
)
def test_a_processor_that_fails_ends_its_own_requests_with_the_reason(
    llm: LLM, processor: Any, num_tokens: int, reason: str
) -> None:
    plain = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, temperature=0.8)
    other = SamplingParams(seed=2, max_tokens=6, ignore_eos=True, logits_processors=Recorder({4: 1.0}))  # type: ignore[arg-type]
    bad = SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True, logits_processors=[processor])
    expected = [llm.generate([8, 8], params)[0].outputs[0] for params in (plain, other)]
    outputs = llm.generate([[8, 8], [8, 8], [8, 8]], [plain, bad, other])
    assert same(outputs[0].outputs[0], expected[0]) and same(outputs[2].outputs[0], expected[1])
    for completion in outputs[1].outputs:
        assert completion.finish_reason == "error" and len(completion.token_ids) == num_tokens
        with pytest.raises(ValueError, match=reason):
            raise ValueError(completion.stop_reason)
    assert llm.get_metrics()["num_errors_total"] == 2
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_what_is_no_callable_is_refused() -> None:
    with pytest.raises(ValueError, match="logits_processors=3 is not valid"):
        SamplingParams(logits_processors=[3])  # type: ignore[list-item]
    assert SamplingParams(logits_processors=[]).logits_processors is None
