"""From a drafter's logits to guesses, with the noise that the model itself will draw with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.core.schedule import DraftSequence, Draw
from rollout.core.stop import NOT_A_TOKEN
from rollout.sampling.sampler import sample_rows
from rollout.speculation.rejection import distribution_of
from rollout.worker.inputs import StepInputs, fetch

DrawnFrom = dict[str, list[torch.Tensor]]  # request id -> the distribution, float32 [vocab], of each of its guesses


def draw_guesses(
    logits: torch.Tensor,
    sequences: Sequence[DraftSequence],
    positions: Sequence[int],
    inputs: StepInputs,
    rows: Sequence[int] | None = None,
    drawn_from: DrawnFrom | None = None,
) -> list[int]:
    """A guess for position `positions[i]` of `sequences[i]` from row `rows[i]`, or i, of `logits` (float32 [R, vocab]).

    Drawn with the request's temperature, filters, and its own noise of that position: where the logits are like the
    model's, so is the token. -1 where a row's values are not numbers. What they were drawn from is added to
    `drawn_from`.
    """
    row_index = range(len(sequences)) if rows is None else rows
    draws = [
        Draw(sequence.request_id, index, sequence.params, sequence.seed, sequence.sample_index, position)
        for index, (sequence, position) in enumerate(zip(sequences, positions, strict=True))
    ]
    sampled = sample_rows(logits, draws, row_index, inputs)
    if drawn_from is not None:
        temperatures = np.array([sequence.params.temperature for sequence in sequences], np.float32)
        index, temperature = inputs.send([np.array(row_index, np.int64), temperatures])
        # A row that nothing was drawn from has no distribution, and its guess is dropped: any number will do.
        distributions = distribution_of(logits[index], temperature, sampled.num_kept.clamp(min=1))
        for sequence, distribution in zip(sequences, distributions, strict=True):
            drawn_from.setdefault(sequence.request_id, []).append(distribution)
    (token_ids,) = fetch([sampled.token_ids])
    return token_ids.tolist()


def before_failure(token_ids: list[int]) -> list[int]:
    """The guesses before the first that is none."""
    return token_ids[: token_ids.index(NOT_A_TOKEN)] if NOT_A_TOKEN in token_ids else token_ids


def stacked(drawn_from: DrawnFrom | None) -> dict[str, torch.Tensor] | None:
    """Request id -> float32 [k, vocab]."""
    return None if drawn_from is None else {request_id: torch.stack(rows) for request_id, rows in drawn_from.items()}
