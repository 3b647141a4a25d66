"""The search itself, without requests: ranking, finishing and stopping."""

from __future__ import annotations

import math
import zlib
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.beam import BeamOptions, BeamSearch, Hypothesis, num_candidates
from tests.support.beams import Found, brute_force, slow_beam_search

VOCAB = 6
EARLY: list[bool | Literal["never"]] = [True, False, "never"]


def distribution(seed: int, vocab: int = VOCAB):
    """A language model: log-probabilities that are a hash of the tokens before them."""

    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        raw = [zlib.crc32(repr((seed, tokens, i)).encode()) % 4001 / 1000 for i in range(vocab)]
        total = math.log(sum(map(math.exp, raw)))
        return [value - total for value in raw]

    return logprobs


def run(search: BeamSearch, logprobs, vocab: int = VOCAB) -> list[Hypothesis]:
    going_on = True
    while going_on:
        for beam in search.beams:
            row = logprobs(tuple(beam.token_ids))
            best = sorted(range(vocab), key=lambda i: (-row[i], i))
            best = best[: num_candidates(search.options.width, len(search.end_token_ids))]
            search.take(beam.place, best, [row[i] for i in best])
        going_on = search.advance()
        places = [beam.place for beam in search.beams]
        assert len(set(places)) == len(places)
        assert all(0 <= place < search.options.width for place in places)
    return search.finished


def check_equal(hypotheses: list[Hypothesis], found: list[Found]) -> None:
    assert [tuple(h.token_ids) for h in hypotheses] == [f.token_ids for f in found]
    assert [h.score for h in hypotheses] == pytest.approx([f.score for f in found], abs=1e-12)
    assert [h.cum_logprob for h in hypotheses] == pytest.approx([f.cum_logprob for f in found], abs=1e-12)


@settings(max_examples=120)
@given(
    width=st.integers(1, 7),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]),
    early_stopping=st.sampled_from(EARLY),
    ends=st.sampled_from([(), (0,), (0, 3), (1, 2, 5)]),
    seed=st.integers(0, 10_000),
)
def test_the_search_finds_what_a_slow_one_finds(width, max_tokens, length_penalty, early_stopping, ends, seed):
    # case BS-01
    logprobs, prompt = distribution(seed), [1, 2]
    search = BeamSearch(BeamOptions(width, length_penalty, early_stopping), prompt, max_tokens, frozenset(ends))
    found = slow_beam_search(logprobs, prompt, width, max_tokens, ends, length_penalty, early_stopping)
    hypotheses = run(search, logprobs)
    check_equal(hypotheses, found)
    for hypothesis in hypotheses:
        ended = hypothesis.token_ids[-1] in ends
        assert hypothesis.finish_reason == ("stop" if ended else "length")
        assert hypothesis.stop_token_id == (hypothesis.token_ids[-1] if ended else None)
        assert ended or len(hypothesis.token_ids) == max_tokens
        assert hypothesis.cum_logprob == pytest.approx(sum(hypothesis.logprobs), abs=1e-12)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("prompt_length", [2, 60])
def test_a_width_that_covers_everything_finds_the_best_of_all_sequences(length_penalty: float, prompt_length: int):
    # case BS-01
    vocab, max_tokens, prompt = 4, 4, [1] * prompt_length
    logprobs = distribution(prompt_length, vocab)
    every = brute_force(logprobs, prompt, vocab, max_tokens, {0}, length_penalty)
    width = len(every)
    search = BeamSearch(BeamOptions(width, length_penalty, "never"), prompt, max_tokens, frozenset({0}))
    check_equal(run(search, logprobs, vocab), every)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_the_score_does_not_know_the_length_of_the_prompt(length_penalty: float):
    # case BS-01
    # The logits are equal after prompts of 2 and 60 tokens.
    def search(prompt: list[int]) -> list[Hypothesis]:
        logprobs = distribution(7)
        options = BeamOptions(4, length_penalty)
        return run(BeamSearch(options, prompt, 6, frozenset({0})), lambda tokens: logprobs(tokens[len(prompt) :]))

    short, long = search([1, 2]), search([3] * 60)
    assert short == long
    for hypothesis in short:
        assert hypothesis.score == hypothesis.cum_logprob / len(hypothesis.token_ids) ** length_penalty


def test_tokens_without_probability_are_never_taken():
    logprobs = [0.0, -math.inf, -math.inf]
    search = BeamSearch(BeamOptions(3), [1], 4, frozenset())
    (only,) = run(search, lambda tokens: logprobs, 3)
    assert only.token_ids == [0, 0, 0, 0]
    assert only.score == 0.0


def test_giving_up_returns_the_best_so_far():
    search = BeamSearch(BeamOptions(2, length_penalty=1.0), [9], 8, frozenset({0}))
    search.give_up("abort")
    assert search.finished == []
    search.take(0, [1, 0, 2, 3], [-0.5, -1.0, -1.5, -2.0])
    assert search.advance()
    search.give_up("abort")
    assert [(h.token_ids, h.score, h.finish_reason) for h in search.finished] == [
        ([1], -0.5, "abort"),
        ([0], -1.0, "stop"),
    ]
