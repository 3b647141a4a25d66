"""What is guessed from tokens alone."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import SamplingParams, SpeculativeConfig
from rollout.request import Request
from rollout.speculation.ngram import NgramDrafter
from rollout.speculation.suffix import Corpora, SuffixDrafter


def slow_lookup(tokens: list[int], least: int, longest: int, most: int) -> list[int]:
    """The longest n-gram at the end that stands somewhere before, the last such place, one token at a time."""
    for length in range(min(longest, len(tokens) - 1), least - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                grown = list(tokens)
                for step in range(most):
                    grown.append(grown[place + step])
                return grown[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.lists(st.integers(0, 39)),
)
def test_ngrams_are_those_that_a_search_finds(
    tokens: list[int], least: int, more: int, most: int, asked_at: list[int]
) -> None:
    drafter = NgramDrafter(least, least + more)
    for count in sorted({*asked_at, len(tokens)}):
        known = tokens[:count]
        if known:
            assert drafter.propose(known, most) == slow_lookup(known, least, least + more, most)


def test_a_text_that_is_copied_is_guessed() -> None:
    text = list(range(100, 130))
    drafter = NgramDrafter(2, 5)
    assert drafter.propose([*text, 7], 4) == []
    assert drafter.propose([*text, 7, 100, 101], 4) == [102, 103, 104, 105]
    assert drafter.propose([*text, 7, 100, 101, 102], 2) == [103, 104]


def test_a_loop_is_guessed_beyond_its_end() -> None:
    assert NgramDrafter(2, 4).propose([5, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def request(prompt: list[int], salt: str | None = None, temperature: float = 0.0, seed: int = 0) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=100)
    return Request("a", "a", prompt, params, seed, 0, 100, cache_salt=salt)


def suffix(prompt: list[int], corpora: Corpora | None = None, salt: str | None = None) -> SuffixDrafter:
    return (corpora or Corpora(10_000)).drafter(request(prompt, salt))


def test_suffixes_find_what_the_prompt_and_the_sample_say() -> None:
    prompt = [*range(100, 130), 7]
    drafter = suffix(prompt)
    assert drafter.propose(prompt, 4) == []
    assert drafter.propose([*prompt, 100, 101], 4) == [102, 103, 104, 105]
    assert suffix([9]).propose([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_suffixes_find_siblings_that_run_and_earlier_samples() -> None:
    corpora = Corpora(10_000)
    first, second = suffix([1, 2, 3], corpora), suffix([1, 2, 3], corpora)
    assert first.propose([1, 2, 3, 50, 51, 52, 53], 4) == []
    assert second.propose([1, 2, 3, 50], 3) == [51, 52, 53]
    first.close([1, 2, 3, 50, 51, 52, 53, 54])
    second.close([1, 2, 3, 50])
    assert suffix([1, 2, 3], corpora).propose([1, 2, 3, 50, 51], 2) == [52, 53]
    assert suffix([1, 2, 3], corpora, "salt").propose([1, 2, 3, 50, 51], 2) == []  # what others may not see


def test_a_prompt_of_its_own_samples_says_more_than_all_others_and_these_more_than_nothing() -> None:
    corpora = Corpora(10_000)
    for _ in range(3):
        suffix([1, 2], corpora).close([1, 2, 50, 51, 60])
    suffix([1, 3], corpora).close([1, 3, 50, 51, 70])
    assert suffix([1, 3], corpora).propose([1, 3, 50, 51], 1) == [70]
    assert suffix([1, 4], corpora).propose([1, 4, 50, 51], 1) == [60]
    assert suffix([1, 4], corpora).propose([1, 4, 9, 51], 1) == [60]  # after the last token alone


def test_suffixes_that_agree_further_back_count_more_and_guesses_follow_the_majority() -> None:
    corpora = Corpora(10_000)
    for tail in ([10, 11, 12, 13], [20, 11, 12, 14], [20, 11, 12, 14]):
        suffix([1, 2], corpora).close([1, 2, *tail])
    assert suffix([1, 2], corpora).propose([1, 2, 30, 11, 12], 1) == [14]  # two of three
    assert suffix([1, 2], corpora).propose([1, 2, 10, 11, 12], 1) == [13]  # the whole beginning in common


def test_a_guess_that_is_hardly_ever_right_is_not_made() -> None:
    corpora = Corpora(10_000)
    for other in range(6):
        suffix([1, 2], corpora).close([1, 2, 30 + other, 8, 9, 50, 51, 60 + other])
    drafter = suffix([1, 2], corpora)
    guesses, _ = drafter.guess([1, 2, 90, 8, 9], 4, 0.3)
    assert [guess.token_id for guess in guesses] == [50, 51]
    chances = [guess.chance for guess in guesses]
    assert 1.0 > chances[0] > chances[1] >= 0.3
    assert drafter.propose([1, 2, 90, 8, 9], 4)[:2] == [50, 51] and len(drafter.propose([1, 2, 90, 8, 9], 4)) == 3


def test_prompts_that_were_not_asked_lately_are_forgotten() -> None:
    corpora = Corpora(120)
    for prompt in range(20):
        suffix([prompt, 1], corpora).close([prompt, 1, *range(10, 30)])
    assert corpora.num_tokens <= 120
    assert suffix([19, 1], corpora).propose([19, 1, 10], 2) == [11, 12]
    key = next(iter(corpora._corpora))
    assert all(prompt != array("q", [2, 1]).tobytes() for _, prompt in corpora._corpora) and key[0] is None
    none = Corpora(0)
    running = suffix([1, 2], none)
    suffix([1, 2], none).close([1, 2, 3, 4, 5])
    assert running.propose([1, 2, 3], 1) == [4]  # as long as the prompt's samples run
    running.close([1, 2, 3])
    assert none.num_tokens == 0


def test_of_too_many_samples_of_a_prompt_the_oldest_go() -> None:
    corpora = Corpora(10**6)
    for number in range(1000):
        suffix([1, 2], corpora).close([1, 2, *range(1000 + number, 1010 + number)])
    (corpus,) = corpora._corpora.values()
    assert len(corpus.samples) <= 260
    assert corpora.num_tokens == corpus.num_tokens == sum(map(len, corpus.samples.values()))
    assert all(place >> 32 in corpus.samples for places in corpus.places.values() for place in places)
    assert suffix([1, 2], corpora).propose([1, 2, 1995], 2) == [1996, 1997]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.7]),
)
def test_guesses_are_tokens_that_came_before_and_no_more_than_asked(
    outputs: list[list[int]], most: int, capacity: int, temperature: float
) -> None:
    corpora = Corpora(capacity)
    for output in outputs:
        drafter = corpora.drafter(request([0, 1], temperature=temperature))
        for count in range(len(output) + 1):
            drafts = drafter.propose([0, 1, *output[:count]], most)
            assert len(drafts) <= most and set(drafts) <= {0, 1, 2}
        drafter.close([0, 1, *output])
    assert corpora.num_tokens <= capacity


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"method": "eagle3"}, "method='eagle3' is not supported yet: use one of 'ngram', 'suffix', 'draft_model'"),
        ({"method": "draft_model"}, "model=None is not valid with method='draft_model'"),
        ({"method": "medusa", "model": ""}, "model='' is not valid with method='medusa'"),
        ({"method": "medusa", "model": "a", "draft_kv_cache_memory": 8}, "draft_kv_cache_memory=8 is not used"),
        ({"method": "draft_model", "model": "a", "prompt_lookup_max": 4}, "prompt_lookup_max=4 is not used"),
        ({"method": "magic"}, "method='magic'"),
        ({"method": "ngram", "verification": "no"}, "verification='no'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "num_speculative_tokens=17"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min=6"),
        ({"method": "ngram", "prompt_lookup_max": 1.5}, "prompt_lookup_max=1.5"),
        ({"method": "ngram", "max_batch_for_speculation": 0}, "max_batch_for_speculation=0"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max=4"),
        ({"method": "ngram", "suffix_decoding_max_cached_tokens": 4}, "suffix_decoding_max_cached_tokens=4"),
        ({"method": "ngram", "model": "a/folder"}, "model='a/folder' is not used with method='ngram'"),
        ({"method": "suffix", "draft_kv_cache_memory": "1MiB"}, "draft_kv_cache_memory=1048576 is not used"),
        ({"method": "ngram", "draft_kv_cache_memory": "1 mouse"}, "draft_kv_cache_memory='1 mouse'"),
        ({"method": "ngram", "draft_kv_cache_memory": 0}, "draft_kv_cache_memory=0"),
    ],
)
def test_what_is_not_valid_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpeculativeConfig(**fields)


def test_what_else_could_have_come_counts_as_much_as_what_came() -> None:
    corpora = Corpora(10_000)
    first = suffix([1, 2], corpora)
    first.saw(4, 13, [14, 13], [0.7, 0.2])  # drawn behind 11, 12, though it was not the likeliest
    first.close([1, 2, 11, 12, 13])
    assert suffix([1, 2], corpora).propose([1, 2, 11, 12], 1) == [14]
    assert suffix([1, 3], corpora).propose([1, 3, 11, 12], 1) == [14]  # after another prompt, too
    rare = suffix([7, 8], corpora)
    rare.saw(4, 40, [41, 42], [0.3, 0.2])
    rare.close([7, 8, 31, 32, 40])
    assert suffix([7, 8], corpora).propose([7, 8, 31, 32], 1) == [40]  # it stands for all others: a half
    wrong = suffix([5, 6], corpora)
    wrong.saw(4, 33, [34, 33], [0.7, 0.2])  # behind a draft that was wrong: something else came there
    wrong.close([5, 6, 21, 22, 23])
    assert suffix([5, 6], corpora).propose([5, 6, 21, 22], 1) == [23]


def test_what_could_have_come_is_forgotten_with_its_sample() -> None:
    corpora = Corpora(10**6)
    for number in range(300):
        drafter = suffix([1, 2], corpora)
        drafter.saw(3, 5, [5, 6], [0.5, 0.4])
        drafter.close([1, 2, number, 5, 7])
    (corpus,) = corpora._corpora.values()
    assert len(corpus.likely_at) == len(corpus.samples) - 1
    assert all(place >> 32 in corpus.samples for place in corpus.likely_at)


def test_guesses_follow_the_noise_unless_it_is_not_what_draws() -> None:
    coupled, other = Corpora(10_000), Corpora(10_000, uses_noise=False)
    for corpora in (coupled, other):
        for token_id in (20, 20, 20, 21, 21, 22):
            corpora.drafter(request([1, 2])).close([1, 2, 5, 6, token_id])
    guesses = {
        corpora: [
            corpora.drafter(request([1, 2], temperature=1.0, seed=seed)).propose([1, 2, 5, 6], 1)[0]
            for seed in range(60)
        ]
        for corpora in (coupled, other)
    }
    assert set(guesses[coupled]) == {20, 21, 22}
    assert 15 < guesses[coupled].count(20) < 50
    assert set(guesses[other]) == {20}
