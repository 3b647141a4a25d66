"""Stop strings, EOS and stop ids, minimum and maximum lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout import LLM, LogitsBatch, RepetitionDetectionParams, SamplingParams
from rollout.engine.detokenize import WindowText
from rollout.engine.sample_text import SampleText
from tests.support.tiny import make_tiny_llama


class WordTokenizer:
    """Each id is a fixed piece of text: lets a test say where the edges of tokens fall."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(self.pieces[token_id] for token_id in token_ids)


def run(pieces: list[str], **params: object) -> tuple[str, int, str] | None:
    """Feeds the pieces one by one, as a stream. Returns (stop string, number of tokens read, final text)."""
    asked = SamplingParams(max_tokens=None, **params)  # type: ignore[arg-type]
    growing = WindowText(WordTokenizer(pieces), asked)  # type: ignore[arg-type]
    text, taken = SampleText(growing, asked), ""
    for token_id in range(len(pieces)):
        stop = text.append([token_id])
        taken += text.take()
        assert text.text.startswith(taken)  # nothing that was shown is taken back
        if stop is not None:
            assert taken == text.text
            return stop, token_id + 1, taken
    text.finish()
    assert taken + text.take() == text.text == "".join(pieces)
    return None


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["a ", "E", "ND", "z"], "END", ("END", 3, "a ")),
        (["a ", "EN", "D", "z"], "END", ("END", 3, "a ")),
        (["a ", "xENDy", "z"], "END", ("END", 2, "a x")),
        (["a ", "xENDyEND", "z"], "END", ("END", 2, "a x")),
        (["EN", "x", "D", "END"], "END", ("END", 4, "ENxD")),
        (["ab", "cd", "ef"], ["de", "bc"], ("bc", 2, "a")),
        (["a", "bcd", "e"], ["cd", "bc"], ("bc", 2, "a")),
        (["a", "bcd", "e"], ["bcd", "bc"], ("bcd", 2, "a")),
        (["a", "b"], "ab", ("ab", 2, "")),
        (["aab", "aab", "aac"], "aabaac", ("aabaac", 3, "aab")),
        (["a", "bc", "d"], ["abcd", "bc"], ("bc", 2, "a")),
        (["ab", "c"], ["abd", "bc"], ("bc", 2, "a")),
        (["x", "", "END"], "END", ("END", 3, "x")),
        (["xEND"], ["END", "xE"], ("xE", 1, "")),
        (["a", "b"], "c", None),
    ],
)
def test_text_ends_before_the_leftmost_stop_string(
    pieces: list[str], stop: str | list[str], expected: tuple[str, int, str] | None
) -> None:
    # case ST-01
    assert run(pieces, stop=stop) == expected
    included = run(pieces, stop=stop, include_stop_str_in_output=True)
    assert included == (None if expected is None else (*expected[:2], expected[2] + expected[0]))


def test_a_stop_string_that_the_first_min_tokens_tokens_complete_does_not_count() -> None:
    # case ST-03
    assert run(["END", "a", "END", "b"], stop="END", min_tokens=3) is None
    assert run(["END", "a", "END", "b"], stop="END", min_tokens=2) == ("END", 3, "ENDa")
    assert run(["END", "a", "b", "EN", "D"], stop="END", min_tokens=4) == ("END", 5, "ENDab")
    assert run(["END", "END"], stop="END", min_tokens=1) == ("END", 2, "END")
    assert run(["a", "END"], stop="END", min_tokens=2) is None


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.booleans(),
)
def test_the_text_ends_as_a_search_of_the_whole_text_says(
    pieces: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    # case ST-01
    expected = None
    for num_tokens in range(min_tokens + 1, len(pieces) + 1):  # the slow obvious search, after each token
        text, before = "".join(pieces[:num_tokens]), len("".join(pieces[: num_tokens - 1]))
        hits = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if hits:
            start, _, stop = min(hits)
            expected = (stop, num_tokens, text[: start + (len(stop) if include else 0)])
            break
    assert run(pieces, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include) == expected


def test_a_stop_string_ends_a_sample_and_the_prompt_never_matches(tmp_path: Path) -> None:
    # case ST-01
    folder = make_tiny_llama(tmp_path, tokenizer=True)
    llm = LLM(folder, kv_cache_memory="8MiB")
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer("stop here").input_ids
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    free = llm.generate(prompt, params)[0].outputs[0]
    start = next(i for i in range(10, len(free.text) - 3) if free.text.find(free.text[i : i + 3]) == i)
    stop = free.text[start : start + 3]  # three characters, so at least two tokens of this tokenizer
    for include in (False, True):
        asked = SamplingParams(
            max_tokens=60, seed=3, ignore_eos=True, stop=["here", stop], include_stop_str_in_output=include
        )
        stopped = llm.generate(prompt, asked)[0].outputs[0]
        assert stopped.text == free.text[: start + (3 if include else 0)]
        assert stopped.finish_reason == "stop" and stopped.stop_reason == stop
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
        decoded = tokenizer.decode(stopped.token_ids)
        assert isinstance(decoded, str)
        assert decoded.endswith(stop) and not tokenizer.decode(stopped.token_ids[:-1]).endswith(stop)  # type: ignore[union-attr]
        assert len(stopped.raw_logprobs) == len(stopped.token_ids)
        assert np.array_equal(stopped.raw_logprobs, free.raw_logprobs[: len(stopped.token_ids)])


def test_a_stop_string_that_is_complete_at_the_last_allowed_token_wins_over_the_length(tmp_path: Path) -> None:
    # case ST-01
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="8MiB")
    samples = llm.generate([40, 41], SamplingParams(n=20, max_tokens=12, seed=3, ignore_eos=True))[0].outputs
    free = next(c for c in samples if c.text[-2:].isascii() and c.text.find(c.text[-2:]) == len(c.text) - 2)
    stop = free.text[-2:]
    asked = SamplingParams(max_tokens=12, seed=3, first_sample_index=free.sample_index, ignore_eos=True, stop=stop)
    stopped = llm.generate([40, 41], asked)[0].outputs[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids
    assert stopped.text == free.text[:-2]


@pytest.mark.parametrize("stop", [None, ["never"]], ids=["at the end", "while it grows"])
@pytest.mark.parametrize(("ender", "special"), [(33, False), (2, True)], ids=["stop id", "EOS"])
def test_the_token_that_ends_a_sample_writes_only_what_is_asked_for(
    ender: int, special: bool, stop: list[str] | None, tmp_path: Path
) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="8MiB")
    tokenizer = llm.get_tokenizer()
    assert special == (ender in tokenizer.all_special_ids) and tokenizer.decode([ender])
    for includes in (False, True):
        params = SamplingParams(
            max_tokens=4,
            logits_processors=[_after_two(ender)],
            stop_token_ids=None if special else [ender],
            include_stop_str_in_output=includes,
            skip_special_tokens=False,
            stop=stop,
        )
        (completion,) = llm.generate([5, 6], params)[0].outputs
        assert completion.token_ids == [50, 51, ender] and completion.finish_reason == "stop"
        assert completion.text == tokenizer.decode([50, 51, ender] if includes else [50, 51])


def _after_two(ender: int) -> Callable[[torch.Tensor, LogitsBatch], torch.Tensor]:
    """Makes the tokens 50, 51 and then `ender` certain."""

    def favour(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for row, output in zip(logits, batch.output_token_ids, strict=True):
            row[[50, 51, ender][len(output)]] = 1e4
        return logits

    return favour


def test_min_tokens_bans_every_id_that_would_end_the_sample_and_nothing_else(tmp_path: Path) -> None:
    # case ST-03
    folder = make_tiny_llama(tmp_path, eos_token_id=[2, 90], near_uniform=True)
    llm = LLM(folder, kv_cache_memory="16MiB", max_num_seqs=512)
    prompt = [5] * 50
    params = SamplingParams(n=400, seed=2, min_tokens=10, max_tokens=40, stop_token_ids=[33])
    completions = llm.generate(prompt, params)[0].outputs
    enders = {2, 90, 33}
    assert all(not enders & set(c.token_ids[:10]) and len(c.token_ids) >= 10 for c in completions)
    assert any(len(c.token_ids) == 11 and c.finish_reason == "stop" for c in completions)
    assert {t for c in completions for t in c.token_ids[:10]} == set(range(131)) - enders
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {(c.token_ids[-1], c.stop_reason) for c in stopped} == {(2, None), (90, None), (33, 33)}

    ignoring = SamplingParams(n=400, seed=2, min_tokens=10, max_tokens=12, stop_token_ids=[33], ignore_eos=True)
    tokens = {t for c in llm.generate(prompt, ignoring)[0].outputs for t in c.token_ids[:10]}
    assert {2, 90} <= tokens and 33 not in tokens


def test_banned_ids_are_left_out_of_the_sampled_distribution_only(tmp_path: Path) -> None:
    # case ST-03
    llm = LLM(make_tiny_llama(tmp_path, near_uniform=True), kv_cache_memory="8MiB")
    free = SamplingParams(seed=1, max_tokens=1)
    banned = SamplingParams(seed=1, max_tokens=1, min_tokens=1)
    a, b = (llm.generate([9, 9], params)[0].outputs[0] for params in (free, banned))
    assert a.token_ids == b.token_ids  # the same noise, and the ban did not hit the token
    assert a.raw_logprobs[0] == b.raw_logprobs[0]
    assert b.sampled_logprobs[0] > a.sampled_logprobs[0]


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_a_sample_ends_with_the_token_that_completes_a_repetition(min_tokens: int, tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, near_uniform=True), kv_cache_memory="8MiB")
    params = SamplingParams(
        n=40, seed=1, max_tokens=40, min_tokens=min_tokens, ignore_eos=True, allowed_token_ids=[50, 51, 52]
    )
    detection = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)

    def repeats(output: list[int]) -> bool:
        patterns = [output[-size:] * 3 for size in (2, 3) if len(output) >= 3 * size]
        return len(output) > min_tokens and any(output[-len(pattern) :] == pattern for pattern in patterns)

    prompt = [50, 51] * 6  # its own repetition does not count
    free = llm.generate(prompt, params)[0].outputs
    ended = llm.generate(prompt, replace(params, repetition_detection=detection))[0].outputs
    lengths = [next((i for i in range(1, 41) if repeats(c.token_ids[:i])), None) for c in free]
    assert {*map(bool, lengths)} == {True, False}
    for whole, part, length in zip(free, ended, lengths, strict=True):
        assert part.token_ids == whole.token_ids[:length]
        at_limit = length is None or length == 40
        assert (part.finish_reason, part.stop_reason) == (
            ("length", None) if at_limit else ("repetition", "repetition_detected")
        )
