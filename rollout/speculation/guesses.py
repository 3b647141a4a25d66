"""From a drafter's logits to guesses, with the noise that the model itself will draw with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.core.schedule import DraftSequence, Draw
from rollout.core.stop import NOT_A_TOKEN
from rollout.sampling.sampler import sample_rows
from rollout.worker.inputs import StepInputs, fetch


def draw_guesses(
    logits: torch.Tensor,
    sequences: Sequence[DraftSequence],
    positions: Sequence[int],
    inputs: StepInputs,
    rows: Sequence[int] | None = None,
) -> list[int]:
    """A guess for position `positions[i]` of `sequences[i]` from row `rows[i]`, or i, of `logits` (float32 [R, vocab]).

    Drawn with the request's temperature, filters, and its own noise of that position: where the logits are like the
    model's, so is the token. -1 where a row's values are not numbers.
    """
    draws = [
        Draw(sequence.request_id, index, sequence.params, sequence.seed, sequence.sample_index, position)
        for index, (sequence, position) in enumerate(zip(sequences, positions, strict=True))
    ]
    (token_ids,) = fetch([sample_rows(logits, draws, range(len(draws)) if rows is None else rows, inputs).token_ids])
    return token_ids.tolist()


def before_failure(token_ids: list[int]) -> list[int]:
    """The guesses before the first that is none."""
    return token_ids[: token_ids.index(NOT_A_TOKEN)] if NOT_A_TOKEN in token_ids else token_ids
