"""Which tokens bad words leave, against looking for the words in the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sampling.bad_words import BadWords, Tail
from rollout.sampling.masks import allows
from rollout.sampling.vocabulary import TokenSearch

TOKENS = [b"", b"a", b"b", b"c", b" ", b"ab", b"bc", b" a", b" ab", b"abc", b"c ", b"\xc3", b"\xa9", b"\xa9b", b"cab"]
words = st.text("ab c\u00e9", min_size=1, max_size=4)
ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.lists(words, min_size=1, max_size=4), ids, ids)
def test_a_token_is_banned_exactly_where_it_would_complete_a_word(
    bad: list[str], prompt: list[int], steps: list[int]
) -> None:
    # case SP-04
    search = BadWords(bad, TokenSearch(TOKENS))
    tail = Tail(len(prompt))
    token_ids = list(prompt)
    text = b""
    for step in [*steps, 0]:
        mask = search.mask(search.beginnings(tail.catch_up(token_ids, len(token_ids), search)))
        left = [i for i in range(len(TOKENS)) if allows(mask, i)]
        assert left == [i for i, token in enumerate(TOKENS) if not any(w.encode() in text + token for w in bad)]
        if not left:
            return
        token_ids.append(left[step % len(left)])
        text += TOKENS[token_ids[-1]]


@given(ids, ids, st.integers(0, 12))
def test_the_tail_goes_back_with_the_position(prompt: list[int], output: list[int], position: int) -> None:
    search = BadWords(["abca"], TokenSearch(TOKENS))
    token_ids = [*prompt, *output]
    position = len(prompt) + min(position, len(output))
    tail = Tail(len(prompt))
    tail.catch_up(token_ids, len(token_ids), search)
    fresh = Tail(len(prompt))
    assert tail.catch_up(token_ids, position, search) == fresh.catch_up(token_ids, position, search)


@given(ids, ids, st.lists(ids, min_size=1, max_size=3))
def test_guesses_stand_at_the_end_of_the_tail_until_the_next_draw(
    prompt: list[int], output: list[int], steps: list[list[int]]
) -> None:
    # case SD-02
    search = BadWords(["abca"], TokenSearch(TOKENS))
    token_ids = [*prompt, *output]
    tail = Tail(len(prompt))
    for drafts in steps:
        for row in range(len(drafts) + 1):
            wanted = Tail(len(prompt)).catch_up([*token_ids, *drafts], len(token_ids) + row, search)
            assert tail.catch_up(token_ids, len(token_ids), search, drafts[:row]) == wanted
        token_ids += drafts[: len(drafts) // 2]
