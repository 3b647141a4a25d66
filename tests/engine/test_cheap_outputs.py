"""Outputs cost little: the garbage collector has nothing to do, and no object is kept for each token."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rollout import LLM, RequestOutput, SamplingParams
from rollout.engine.garbage import collection_paused
from tests.support.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=1, tokenizer=True)
    return LLM(folder, kv_cache_memory="32MiB", max_num_seqs=256)


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Appends the generation of every collection that runs."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


@pytest.mark.parametrize("logprobs", [None, 3])
def test_the_collector_does_not_run_while_samples_grow(logprobs: int | None, llm: LLM, collections: list[int]) -> None:
    """200 samples in flight: objects of a step alone would have it run in every one."""
    params = SamplingParams(n=8, max_tokens=40, seed=1, ignore_eos=True, logprobs=logprobs)
    llm.enqueue([[5 + index] for index in range(25)], params)
    llm.step()
    gc.collect()
    collections.clear()
    num_steps = 0
    while llm.num_unfinished > 0 and num_steps < 38:
        assert not llm.step()
        num_steps += 1
    assert num_steps == 38 and len(collections) <= 1
    collections.clear()
    assert len(llm.wait_for_completion()) == 25
    assert 2 not in collections


def tracked_after(llm: LLM, num_tokens: int, logprobs: int | None) -> tuple[int, list[RequestOutput]]:
    """Objects that the collector knows, once outputs of so many tokens are there."""
    params = SamplingParams(
        n=4, max_tokens=num_tokens, seed=1, ignore_eos=True, logprobs=logprobs, prompt_logprobs=logprobs
    )
    outputs = llm.generate([[5, 6], [7, 8]], params)
    gc.collect()
    return len(gc.get_objects()), outputs


@pytest.mark.parametrize("logprobs", [None, 3])
def test_outputs_hold_no_object_for_each_token(logprobs: int | None, llm: LLM) -> None:
    tracked_after(llm, 200, logprobs)  # what is made once
    few, short = tracked_after(llm, 10, logprobs)
    del short
    many, long = tracked_after(llm, 200, logprobs)
    assert len(long[0].outputs[0].token_ids) == 200
    assert many - few < 100  # there are 1,520 tokens more


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
