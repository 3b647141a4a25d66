"""Token counts, grown step by step, against counting anew."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from rollout import SamplingParams
from rollout.sampling.penalties import TokenCounts, penalty_arrays

ids = st.lists(st.integers(0, 200), max_size=90)


@given(ids, ids, st.booleans(), st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_counts_are_those_of_the_tokens_before_the_position(
    prompt: list[int], output: list[int], with_prompt: bool, positions: list[int]
) -> None:
    # case SP-03
    counts = TokenCounts(len(prompt), with_prompt)
    for position in positions:  # forward and, as after a preemption, back
        written = output[:position]
        ids, times = counts.before([*prompt, *output], len(prompt) + len(written))
        found = dict(zip(ids.tolist(), times.tolist(), strict=True))
        expected = Counter(written) + Counter()
        known = {*written, *(prompt if with_prompt else [])}
        assert found == {token_id: expected[token_id] for token_id in known}
        assert len(ids) == len(known)


@given(ids, ids, st.booleans(), st.lists(st.lists(st.integers(0, 200), max_size=6), min_size=1, max_size=4))
def test_guesses_count_as_tokens_until_the_next_draw(
    prompt: list[int], output: list[int], with_prompt: bool, steps: list[list[int]]
) -> None:
    # case SD-02
    counts = TokenCounts(len(prompt), with_prompt)
    token_ids = [*prompt, *output]
    for drafts in steps:  # some of which came so
        for row in range(len(drafts) + 1):
            found = counts.before(token_ids, len(token_ids), drafts[:row])
            fresh = TokenCounts(len(prompt), with_prompt).before([*token_ids, *drafts], len(token_ids) + row)
            for mine, wanted in zip(found, fresh, strict=True):
                assert mine.dtype == wanted.dtype and mine.tolist() == wanted.tolist()
        token_ids += drafts[: len(drafts) // 2]


@given(st.lists(st.integers(0, 19), min_size=1, max_size=12), st.floats(0.2, 5), st.integers(0, 2**20))
def test_the_repetition_penalty_is_that_of_transformers(tokens: list[int], penalty: float, seed: int) -> None:
    # case SP-03
    row = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    counts = TokenCounts(len(tokens), with_prompt=True)
    counted = (0, *counts.before(tokens, len(tokens)), SamplingParams(repetition_penalty=penalty))
    places, factors, less = penalty_arrays([counted], 20)
    ours = row.numpy().copy()
    ours[places] = np.where(ours[places] > 0, ours[places] / factors, ours[places] * factors) - less
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), row[None])[0]  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
