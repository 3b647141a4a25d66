"""The most likely tokens beside the drawn ones, and beside a prompt's tokens: for those who ask, in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

import rollout_kernels
from rollout.core.schedule import Draw, TopLogprobs
from rollout.sampling_checks import resolve_count
from rollout.worker.inputs import StepInputs, fetch

_ROWS = 256  # draws whose results are held on the device at once: 256 x 49,152 of them are 100 MB for whole rows


def top_logprobs_of_draws(
    logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int], token_ids: np.ndarray, inputs: StepInputs
) -> dict[int, TopLogprobs]:
    """By the draw's index, of the draws that ask and whose token `token_ids[i]` is one (-1 is none).

    Draw i was drawn from row `rows[i]` of `logits` (float32 [R, vocab]). All is of the raw distribution.
    """
    found: dict[int, TopLogprobs] = {}
    for num_top, num_chosen, part in _alike(draws, token_ids, logits.shape[1]):
        chosen = [token_id for index in part for token_id in draws[index].params.logprob_token_ids or ()]
        drawn, row_index, starts, chosen_ids = inputs.send(
            [
                token_ids[part],
                np.fromiter((rows[index] for index in part), np.int64, len(part)),
                np.arange(len(part) + 1, dtype=np.int32) * num_chosen,
                np.array(chosen, np.int32),
            ]
        )
        top = rollout_kernels.top_logprobs(logits, num_top, drawn, row_index, (starts, chosen_ids))
        ids, logprobs, ranks, of_chosen = fetch([top.top_ids, top.top_logprobs, top.ranks, top.chosen_logprobs])
        positions = TopLogprobs.of(ids, logprobs, ranks, of_chosen.reshape(len(part), num_chosen))
        found.update((index, positions[place : place + 1]) for place, index in enumerate(part))
    return found


def top_logprobs_of_targets(
    logits: torch.Tensor, target_ids: torch.Tensor, num_top: int
) -> tuple[TopLogprobs, np.ndarray]:
    """Of each row of `logits` (float32 [R, vocab]) with the token that follows it (int64 [R]); and that token's own
    raw logprob, float32 [R]. `num_top` of -1 is the whole vocabulary."""
    top = rollout_kernels.top_logprobs(logits, resolve_count(num_top, logits.shape[1]), target_ids, None, None)
    ids, top_logprobs, ranks, logprobs = fetch([top.top_ids, top.top_logprobs, top.ranks, top.logprobs])
    return TopLogprobs.of(ids, top_logprobs, ranks, np.empty((len(ranks), 0), np.float32)), logprobs


def _alike(draws: Sequence[Draw], token_ids: np.ndarray, vocab_size: int) -> Iterator[tuple[int, int, list[int]]]:
    """The draws that ask, as indices, in parts that ask for the same numbers of most likely and of named tokens."""
    by_numbers: dict[tuple[int, int], list[int]] = {}
    for index, draw in enumerate(draws):
        params = draw.params
        if params.logprobs is None and params.logprob_token_ids is None:
            continue
        if token_ids[index] >= 0:
            numbers = resolve_count(params.logprobs, vocab_size), len(params.logprob_token_ids or ())
            by_numbers.setdefault(numbers, []).append(index)
    for (num_top, num_chosen), indices in by_numbers.items():
        for start in range(0, len(indices), _ROWS):
            yield num_top, num_chosen, indices[start : start + _ROWS]
