"""One fused pass from logits to tokens and to the arrays that say what their logprobs mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import rollout_kernels
from rollout.core.schedule import Draw
from rollout.sampling.adjust import Adjustment
from rollout.worker.inputs import StepInputs


def sample_rows(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
    inputs: StepInputs,
    adjustment: Adjustment | None = None,
) -> rollout_kernels.SampleResult:
    """Draws one token for each of `draws`, from row `rows[i]` of `logits` (float32 [R, vocab]), as it was adjusted."""
    params = [draw.params for draw in draws]
    # Few arrays of several rows each: a step of one sequence has just streamed all weights through the processor's
    # caches, and every call begins with what is no longer there.
    tempered, top_p, min_p = [p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]
    floats = np.array([tempered, top_p, min_p], np.float32)
    top_k = np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32)
    seeds, indices = [draw.seed for draw in draws], [draw.sample_index for draw in draws]
    integers = np.array([seeds, indices, [draw.position for draw in draws], rows], np.int64)
    forced, banned = _forced(draws), _banned(draws)
    changed = Adjustment() if adjustment is None else adjustment
    rows_of = [] if changed.row_index is None else [changed.row_index]
    masks = [] if changed.masks is None or changed.mask_index is None else [changed.masks, changed.mask_index]
    sent = inputs.send([floats, top_k, integers, *forced, *banned, *rows_of, *masks])
    (temperature, top_p_sent, min_p_sent), top_k_sent = sent[0].unbind(), sent[1]
    seed, sample_index, position, row_index = sent[2].unbind()
    optional = iter(sent[3:])
    return rollout_kernels.sample(
        logits,
        temperature=temperature,
        top_k=top_k_sent,
        top_p=top_p_sent,
        min_p=min_p_sent,
        seed=seed,
        sample_index=sample_index,
        position=position,
        row_index=row_index,
        forced=next(optional) if forced else None,
        banned=(next(optional), next(optional)) if banned else None,
        adjusted=None if changed.rows is None else (changed.rows, next(optional)),
        allowed=(next(optional), next(optional)) if masks else None,
    )


def _forced(draws: Sequence[Draw]) -> list[np.ndarray]:
    """The token that each draw has to report on, -1 for none; nothing where no draw has one."""
    token_ids = [draw.forced_token_id for draw in draws]
    return [np.array(token_ids, np.int64)] if max(token_ids) >= 0 else []


def _banned(draws: Sequence[Draw]) -> list[np.ndarray]:
    """Offsets and token ids of what must not be drawn, or nothing where everything may."""
    if not any(draw.banned_token_ids for draw in draws):
        return []
    counts = [len(draw.banned_token_ids) for draw in draws]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = np.fromiter((token_id for draw in draws for token_id in draw.banned_token_ids), np.int32, int(starts[-1]))
    return [starts, ids]
