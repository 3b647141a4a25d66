"""A pool so small that every sample is preempted again and again changes nothing that anybody sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from tests.support.tiny import make_tiny_llama

ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
PROMPTS = [[40 + number] * (5 + number) + list(range(60, 66)) for number in range(3)]
FORCED = list(range(60, 78))
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(n=4, seed=3, max_tokens=60, frequency_penalty=0.5, stop=["q", "th"], min_tokens=9),
    SamplingParams(n=3, seed=4, max_tokens=60, ignore_eos=True, forced_token_ids=FORCED, presence_penalty=0.5),
]
SLOT_BYTES = 2 * 2 * 2 * 16 * 4  # layers, k and v, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True, tokenizer=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[RequestOutput]:
    return LLM(folder, kv_cache_memory="8MiB", block_size=4).generate(PROMPTS, PARAMS)


def small(folder: Path, caching: bool, mode: str) -> LLM:
    """Room for the longest sample and a little more."""
    block = 16 * SLOT_BYTES
    swap = "1MiB" if mode == "swap" else 0
    return LLM(
        folder,
        kv_cache_memory=22 * block,
        block_size=4,
        max_num_batched_tokens=9,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        swap_space=swap,
    )


def assert_same(a: CompletionOutput, b: CompletionOutput) -> None:
    assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
        b.token_ids,
        b.text,
        b.finish_reason,
        b.stop_reason,
    )
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_what_comes_out_is_what_a_large_pool_gives(
    folder: Path, expected: list[RequestOutput], caching: bool, mode: str
) -> None:
    # case SC-01
    llm = small(folder, caching, mode)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert llm.get_metrics()["num_preemptions_total"] >= 8  # as many as there are samples
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == wanted.prompt_token_ids
        for a, b in zip(output.outputs, wanted.outputs, strict=True):
            assert_same(a, b)
    llm.engine.scheduler.check_integrity()
    stats = llm.engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert llm.engine.scheduler.kv.host_pool.num_free == llm.engine.scheduler.config.num_host_blocks


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_streamed_pieces_are_never_repeated(folder: Path, expected: list[RequestOutput], mode: str) -> None:
    # case SC-01
    llm = small(folder, True, mode)
    tokens: dict[tuple[str, int], list[int]] = {}
    texts: dict[tuple[str, int], str] = {}
    for piece in llm.stream(PROMPTS, [replace(params, output_kind=RequestOutputKind.DELTA) for params in PARAMS]):
        for sample in piece.outputs:
            name = (piece.request_id, sample.index)
            tokens[name] = tokens.get(name, []) + list(sample.token_ids)
            texts[name] = texts.get(name, "") + sample.text
            assert all(len(getattr(sample, array)) == len(sample.token_ids) for array in ARRAYS)
    assert llm.get_metrics()["num_preemptions_total"] >= 8
    wanted = {(output.request_id, sample.index): sample for output in expected for sample in output.outputs}
    assert tokens == {name: sample.token_ids for name, sample in wanted.items()}
    assert texts == {name: sample.text for name, sample in wanted.items()}


def test_samples_resumed_and_forked_in_a_small_pool(folder: Path, expected: list[RequestOutput]) -> None:
    # case SC-01
    llm = small(folder, True, "recompute")
    ids = llm.enqueue(PROMPTS, PARAMS)
    for _ in range(25):
        llm.step()
    begun = llm._delivery.groups[ids[0]].samples[0].output_token_ids
    fork = llm.fork(ids[0], at=5, n=3, sampling_params=replace(PARAMS[0], temperature=1.0, seed=9))
    llm.abort(ids)
    parts = {output.request_id: output for output in llm.wait_for_completion()}
    assert [sample.token_ids[:5] for sample in parts[fork].outputs] == [begun[:5]] * 3
    for output, wanted in zip(llm.resume([parts[name] for name in ids], PARAMS), expected, strict=True):
        for a, b in zip(output.outputs, wanted.outputs, strict=True):
            assert_same(a, b)
    stats = llm.engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
