"""Ctrl-C while enqueued prompts run: nothing that was sampled is lost, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout import LLM, RequestOutput, SamplingParams
from tests.engine.test_resume import assert_same
from tests.support.tiny import make_tiny_llama

SHORT = SamplingParams(n=2, max_tokens=3, seed=5, ignore_eos=True)
LONG = replace(SHORT, max_tokens=40)
PROMPT = [40, 41, 42]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True, tokenizer=True)
    return LLM(folder, kv_cache_memory="4MiB")


def interrupting(step: int) -> Callable[[torch.Tensor, object], torch.Tensor]:
    """A logits processor in whose call number `step` Ctrl-C is pressed."""
    calls = iter(range(step))

    def process(logits: torch.Tensor, batch: object) -> torch.Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return logits

    return process


def run_out(llm: LLM, by_step: bool) -> list[RequestOutput]:
    if not by_step:
        return llm.wait_for_completion()
    outputs = llm.step()
    assert llm.wait_for_completion() == []
    return outputs


@pytest.mark.parametrize("by_step", [False, True], ids=["wait_for_completion", "step"])
def test_an_interruption_loses_no_output(llm: LLM, by_step: bool) -> None:
    whole = llm.generate([PROMPT, PROMPT], [SHORT, LONG])
    ids = llm.enqueue([PROMPT] * 3, [LONG, SHORT, replace(LONG, logits_processors=[interrupting(8)])])
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion()
    assert llm.num_unfinished == 0
    # What follows returns its own outputs only: case SC-04.
    (between,) = llm.generate(PROMPT, SHORT)
    assert_same(between.outputs[0], whole[0].outputs[0])
    later = llm.enqueue(PROMPT, SHORT) if not by_step else []
    outputs = run_out(llm, by_step)
    assert [output.request_id for output in outputs] == ids + later
    long, short, interrupted = outputs[:3]
    assert [sample.finish_reason for sample in short.outputs] == ["length"] * 2
    for sample, expected in zip(short.outputs, whole[0].outputs, strict=True):
        assert_same(sample, expected)
    for sample in long.outputs + interrupted.outputs:
        assert sample.finish_reason == "abort"
        assert 3 <= len(sample.token_ids) < 40
    (resumed,) = llm.resume(long, LONG)
    for sample, expected in zip(resumed.outputs, whole[1].outputs, strict=True):
        assert_same(sample, expected)
    assert llm.wait_for_completion() == [] and llm.num_unfinished == 0
    assert llm.reset_prefix_cache()


def test_a_step_for_some_requests_leaves_the_outputs_of_others_to_others(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPT], [SHORT])
    ours, theirs = llm.enqueue([PROMPT] * 2, [LONG, SHORT])
    for _ in range(5):
        assert llm.step([ours]) == []  # the other one ends meanwhile
    assert llm.num_unfinished == LONG.n
    llm.abort(ours)
    (aborted,) = llm.step([ours, "unknown"])  # it has ended already: no step is made
    assert aborted.request_id == ours and {sample.finish_reason for sample in aborted.outputs} == {"abort"}
    (left,) = llm.wait_for_completion()
    assert left.request_id == theirs
    assert [sample.token_ids for sample in left.outputs] == [sample.token_ids for sample in whole.outputs]
    assert llm.step([ours]) == []
