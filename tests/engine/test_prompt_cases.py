"""Prompts that cannot be used, and lengths at the exact limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import LLM, SamplingParams
from tests.support.tiny import make_tiny_llama

LIMIT = 32


def small(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="4MiB", max_model_len=LIMIT, max_num_batched_tokens=16)


def test_an_empty_prompt_is_refused_and_its_neighbours_run(tmp_path: Path) -> None:
    # case PR-01
    llm = small(make_tiny_llama(tmp_path, tokenizer=True))
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate([[5, 6]], good)[0].outputs[0].token_ids
    for empty in ("", [], {"prompt_token_ids": []}, {"prompt": ""}):
        with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
            llm.generate([[5, 6], empty], good)  # type: ignore[list-item]
        assert llm.num_unfinished == 0
        outputs = llm.generate([[5, 6], empty, [7]], good, on_invalid="return")  # type: ignore[list-item]
        assert outputs[0].outputs[0].token_ids == expected and len(outputs[2].outputs[0].token_ids) == 4
        assert outputs[1].outputs == [] and "the prompt is empty" in (outputs[1].error or "")
    assert len(llm.generate(" ", good)[0].outputs[0].token_ids) == 4  # white space is a prompt


@pytest.mark.parametrize("token_id", [-1, 131, 1131, 2**31])
def test_ids_outside_the_vocabulary_are_refused_by_field(token_id: int, tmp_path: Path) -> None:
    llm = small(make_tiny_llama(tmp_path))
    with pytest.raises(ValueError, match=f"prompt_token_ids holds {token_id}: ids must be from 0 to 130"):
        llm.generate([[5], [5, token_id]])
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate([[5]], SamplingParams(stop_token_ids=[token_id]))
    with pytest.raises(ValueError, match="prompt_token_ids holds"):
        llm.score([5, token_id])
    with pytest.raises(ValueError, match="integers"):
        llm.generate([[5], [5, 1.5]])  # type: ignore[list-item]
    assert llm.num_unfinished == 0


def test_prompt_and_output_never_exceed_the_limit(tmp_path: Path) -> None:
    # case PR-02
    llm = small(make_tiny_llama(tmp_path))
    for max_tokens in (None, 1, 5):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        completion = llm.generate([[3] * (LIMIT - 1)], params)[0].outputs[0]
        assert len(completion.token_ids) == 1 and completion.finish_reason == "length"
        completion = llm.generate([[3] * (LIMIT - 4)], params)[0].outputs[0]
        assert len(completion.token_ids) == min(max_tokens or 4, 4) and completion.finish_reason == "length"
        for length in (LIMIT, LIMIT + 1):
            with pytest.raises(ValueError, match=f"has {length} tokens and max_model_len is {LIMIT}"):
                llm.generate([[3] * length], params)
            outputs = llm.generate([[4, 5], [3] * length, [6]], params, on_invalid="return")
            assert [len(output.outputs) for output in outputs] == [1, 0, 1]
            assert f"{length} tokens" in (outputs[1].error or "")
    with pytest.raises(ValueError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_a_prompt_of_exactly_the_limit_can_be_scored(tmp_path: Path) -> None:
    # case PR-02
    llm = small(make_tiny_llama(tmp_path))
    assert len(llm.score([[3] * LIMIT])[0].logprobs) == LIMIT - 1
    with pytest.raises(ValueError, match=f"has {LIMIT + 1} tokens, max_model_len is {LIMIT}"):
        llm.score([[3] * (LIMIT + 1)])
    with pytest.raises(ValueError, match="empty"):
        llm.score([[]])


def test_a_request_that_the_pool_can_never_hold_is_refused_at_once(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory=16_500, block_size=16)  # two blocks of 8,192 bytes
    assert llm.get_metrics()["kv_cache_blocks"] == 2
    with pytest.raises(ValueError, match="need 3 KV blocks of 16 tokens, the pool has 2"):
        llm.generate([[3] * 20], SamplingParams(max_tokens=20))
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    assert len(llm.generate([[3] * 20], params)[0].outputs[0].token_ids) == 13
    outputs = llm.generate([[3] * 20, [4] * 40], params, on_invalid="return")
    assert outputs[0].error is None and "KV blocks" in (outputs[1].error or "")


def test_an_interrupted_generate_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # case SC-04
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    params = SamplingParams(n=4, max_tokens=200, seed=1, ignore_eos=True)
    step, num_steps = llm.engine.step, 0

    def interrupted() -> list:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7], [8, 9]], params)
    monkeypatch.undo()
    metrics = llm.get_metrics()
    assert llm.num_unfinished == metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage"] == 0
    outputs = llm.generate([[9, 9], [5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == [[9, 9], [5]]
    llm.abort(["unknown", outputs[0].request_id])  # not known, and finished: nothing happens
