"""Looking at samples on their way, and letting them go on elsewhere, changes no bit of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout import LLM, RequestOutput, SamplingParams
from tests.support.tiny import make_tiny_llama

ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
PROMPTS = [[40, 41, 42, 43], [50, 51, 52, 53, 54, 55]]
PARAMS = [SamplingParams(n=2, max_tokens=count, seed=5, ignore_eos=True) for count in (10, 14)]


def assert_same(ours: RequestOutput, theirs: RequestOutput) -> None:
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.policy_versions == b.policy_versions
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True, tokenizer=True)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[RequestOutput]:
    return LLM(folder, kv_cache_memory="2MiB").generate(PROMPTS, PARAMS)


def test_what_is_seen_on_the_way_is_the_beginning_of_what_comes(folder: Path, whole: list[RequestOutput]):
    llm = LLM(folder, kv_cache_memory="2MiB")
    ids = llm.enqueue(PROMPTS, PARAMS)
    for _ in range(6):
        llm.step()
    seen = llm.peek(ids)
    assert [output.request_id for output in seen] == ids
    assert llm.num_output_tokens(ids) == [[len(sample.token_ids) for sample in output.outputs] for output in seen]
    for output, end in zip(seen, whole, strict=True):
        for sample, last in zip(output.outputs, end.outputs, strict=True):
            assert sample.finish_reason is None
            assert 0 < len(sample.token_ids) < 10
            assert sample.token_ids == last.token_ids[: len(sample.token_ids)]
    for output, end in zip(llm.wait_for_completion(), whole, strict=True):
        assert_same(output, end)
    with pytest.raises(ValueError, match="no prompt that is enqueued"):
        llm.peek(ids)


def test_what_was_seen_goes_on_in_another_engine_under_ids_of_the_callers_own(folder: Path, whole: list[RequestOutput]):
    llm, other = LLM(folder, kv_cache_memory="2MiB"), LLM(folder, kv_cache_memory="2MiB")
    ids = llm.enqueue(PROMPTS, PARAMS)
    for _ in range(6):
        llm.step()
    seen = [replace(output, request_id=f"mine-{index}") for index, output in enumerate(llm.peek(ids))]
    busy = other.enqueue(PROMPTS[0], PARAMS[0])  # has the ids that the first engine gave
    again = other.enqueue_resume(seen, PARAMS)
    assert len({*again, *busy}) == 3
    assert [output.request_id for output in other.peek(again)] == ["mine-0", "mine-1"]
    assert other.num_output_tokens(again) == llm.num_output_tokens(ids)
    ended: dict[str, RequestOutput] = {}
    while len(ended) < 2:
        ended |= {output.request_id: output for output in other.step(again)}
    for index, end in enumerate(whole):
        assert_same(ended[f"mine-{index}"], end)
    with pytest.raises(ValueError, match=r"outputs\[1\] has no sample that is unfinished"):
        other.enqueue_resume([seen[0], whole[1]], PARAMS)
