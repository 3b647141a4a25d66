"""The most likely tokens beside the drawn ones, for drafters: what came says little of what else could have come."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

import rollout_kernels
from rollout.core.schedule import Draw
from rollout.worker.inputs import StepInputs, fetch

_NUM_TOKENS = 6
_SURE = math.log(0.9)  # a token that is likelier says itself what is likely
_FEW = 8  # draws, of which all are noted; of more, every third: it takes a hundredth of a step's time


def likely_tokens(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
    token_ids: np.ndarray,
    raw_logprobs: np.ndarray,
    sampled_logprobs: np.ndarray,
    inputs: StepInputs,
) -> dict[int, tuple[list[int], list[float]]]:
    """By the draw's index, of some draws: ids, and the probabilities with which they were drawn.

    Draw i is from row `rows[i]` of `logits` (float32 [R, vocab]) and has given `token_ids[i]`, with these logprobs at
    temperature 1 and as it was drawn. The latter tells the constant between the two. None of draws at temperature 0,
    nor of those whose logits were changed, nor of those behind guesses that were wrong.
    """
    unsure = (token_ids >= 0) & (raw_logprobs < _SURE) & np.isfinite(sampled_logprobs)
    kept = _kept(draws, token_ids)
    is_noted_at = 1 if len(kept) <= _FEW else 3
    noted = [
        index
        for index in kept
        if unsure[index]
        and (draws[index].position + draws[index].sample_index) % is_noted_at == 0
        and draws[index].state is None
        and not draws[index].params.is_greedy
    ]
    if not noted:
        return {}
    sources = np.array([rows[index] for index in noted], np.int64)
    drawn, row_index = inputs.send([token_ids[noted], sources])
    top = rollout_kernels.top_logprobs(logits, min(_NUM_TOKENS, logits.shape[1]), drawn, row_index)
    ids, logprobs = fetch([top.top_ids, top.top_logprobs])
    temperatures = np.array([draws[index].params.temperature for index in noted], np.float32)
    beyond_drawn = (logprobs - raw_logprobs[noted][:, None]) / temperatures[:, None]
    probabilities = np.exp(np.minimum(beyond_drawn + sampled_logprobs[noted][:, None], 0.0))
    return {
        index: (some, shares) for index, some, shares in zip(noted, ids.tolist(), probabilities.tolist(), strict=True)
    }


def _kept(draws: Sequence[Draw], token_ids: np.ndarray) -> list[int]:
    """The draws before which no guess was wrong, by their indices."""
    if not any(draw.draft_token_ids for draw in draws):
        return list(range(len(draws)))
    kept: list[int] = []
    drawn: dict[str, list[int]] = {}  # of each request, in this step, up to the first wrong guess
    for index, (draw, token_id) in enumerate(zip(draws, token_ids.tolist(), strict=True)):
        path = drawn.setdefault(draw.request_id, [])
        if not draw.draft_token_ids or list(draw.draft_token_ids) == path:
            kept.append(index)
            path.append(token_id)
    return kept
