"""The most likely tokens that drafters are told of, and the probabilities with which they were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from rollout.core.schedule import Draw
from rollout.sampling.likely import likely_tokens
from rollout.sampling.sampler import sample_rows
from rollout.sampling.state import SampleState
from rollout.sampling_params import SamplingParams
from rollout.worker.inputs import DirectInputs, fetch

Noted = dict[int, tuple[list[int], list[float]]]


def noted(logits: torch.Tensor, draws: Sequence[Draw]) -> Noted:
    """What is noted of these draws, draw i from row i."""
    inputs, rows = DirectInputs(), list(range(len(draws)))
    result = sample_rows(logits, draws, rows, inputs)
    token_ids, raw, sampled = fetch([result.token_ids, result.raw_logprobs, result.sampled_logprobs])
    return likely_tokens(logits, draws, rows, token_ids, raw, sampled, inputs)


def make_draw(position: int = 6, state: SampleState | None = None, **fields: Any) -> Draw:
    return Draw("a", position, SamplingParams(max_tokens=9, **fields), 5, 0, position, state=state)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_probabilities_are_those_of_the_tempered_row(temperature: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    found = noted(logits, [make_draw(position, temperature=temperature) for position in range(4)])
    assert list(found) == [0, 1, 2, 3]
    for row, (token_ids, shares) in found.items():
        wanted = softmax(logits[row].numpy().astype(np.float64) / temperature)
        assert token_ids == np.argsort(-wanted)[:6].tolist()
        assert shares == pytest.approx(wanted[token_ids], rel=1e-4)


def test_probabilities_are_those_that_filters_leave() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    found = noted(logits, [make_draw(position, temperature=0.7, top_k=20) for position in range(3)])
    for row, (token_ids, shares) in found.items():
        values = np.sort(logits[row].numpy().astype(np.float64))[::-1][:20] / 0.7
        assert shares == pytest.approx(softmax(values)[: len(token_ids)], rel=1e-4)


def test_a_vocabulary_may_be_small_and_sure_greedy_and_changed_draws_are_left_out() -> None:
    logits = torch.tensor([[1.0, 1.1, 0.9], [30.0, 0.0, 0.0], [1.0, 1.1, 0.9], [1.0, 1.1, 0.9]])
    draws = [make_draw(), make_draw(), make_draw(temperature=0.0), make_draw(state=SampleState([1], 1))]
    found = noted(logits, draws)
    assert list(found) == [0] and sorted(found[0][0]) == [0, 1, 2]


def test_of_many_draws_every_third_is_noted() -> None:
    logits = torch.zeros(30, 40)
    found = noted(logits, [make_draw(position) for position in range(30)])
    assert list(found) == list(range(0, 30, 3))
    assert list(noted(logits[:8], [make_draw(position) for position in range(8)])) == list(range(8))
