"""Budgets of reasoning, against reading the whole text anew at every token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sampling.thinking import ReasoningMarks, ThinkingBudget

TOKENS = [b"a", b"<", b"t>", b"</", b"t", b">", b"<t>", b"</t>", b"x<t>y", b"</t>z", b"</t><t>", b""]
MARKS = ReasoningMarks(b"<t>", b"</t>", (3, 2), TOKENS)
ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=10)


def is_open(token_ids: list[int]) -> bool:
    """Whether the text has an opening mark that no closing mark follows; marks do not overlap."""
    text, opened = b"".join(TOKENS[i] for i in token_ids), False
    while True:
        _, found, text = text.partition(b"</t>" if opened else b"<t>")
        if not found:
            return opened
        opened = not opened


def spent(prompt: list[int], output: list[int]) -> int:
    """Output tokens that began inside a section."""
    return sum(is_open([*prompt, *output[:i]]) for i in range(len(output)))


@settings(max_examples=400, deadline=None)
@given(ids, ids, st.integers(0, 6))
def test_a_section_is_closed_once_the_budget_of_the_sample_is_used_up(
    prompt: list[int], output: list[int], budget: int
) -> None:
    thinking = ThinkingBudget(MARKS, len(prompt))
    for count in range(len(output) + 1):
        forced = thinking.token_to_force([*prompt, *output], len(prompt) + count, budget)
        written = output[:count]
        if not is_open([*prompt, *written]) or spent(prompt, written) < budget:
            assert forced is None
        else:
            assert forced == (2 if written[-1:] == [3] else 3)
    fresh = ThinkingBudget(MARKS, len(prompt))
    middle = len(prompt) + len(output) // 2
    again = thinking.token_to_force([*prompt, *output], middle, budget)  # a position before the last one
    assert again == fresh.token_to_force([*prompt, *output], middle, budget)


@given(ids, ids, st.integers(0, 5))
def test_forced_tokens_do_close_the_section(prompt: list[int], drawn: list[int], budget: int) -> None:
    thinking = ThinkingBudget(MARKS, len(prompt))
    token_ids, drawn = list(prompt), list(reversed(drawn))
    num_forced = 0
    while True:
        forced = thinking.token_to_force(token_ids, len(token_ids), budget)
        num_forced = 0 if forced is None else num_forced + 1
        assert num_forced <= 2
        if forced is None and not drawn:
            break
        token_ids.append(drawn.pop() if forced is None else forced)
    assert not is_open(token_ids) or spent(prompt, token_ids[len(prompt) :]) < budget


@settings(max_examples=200, deadline=None)
@given(ids, ids, st.lists(ids, min_size=1, max_size=3), st.integers(0, 6))
def test_guesses_use_up_the_budget_until_the_next_draw(
    prompt: list[int], output: list[int], steps: list[list[int]], budget: int
) -> None:
    # case SD-02
    thinking = ThinkingBudget(MARKS, len(prompt))
    token_ids = [*prompt, *output]
    for drafts in steps:
        for row in range(len(drafts) + 1):
            fresh = ThinkingBudget(MARKS, len(prompt))
            wanted = fresh.token_to_force([*token_ids, *drafts], len(token_ids) + row, budget)
            assert thinking.token_to_force(token_ids, len(token_ids), budget, drafts[:row]) == wanted
        token_ids += drafts[: len(drafts) // 2]
