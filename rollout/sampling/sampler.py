"""One fused pass from logits to tokens and to the arrays that say what their logprobs mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import rollout_kernels
from rollout.core.schedule import Draw


def sample_rows(logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> rollout_kernels.SampleResult:
    """Draws one token for each of `draws`, from row `rows[i]` of `logits` (float32 [R, vocab])."""
    count = len(draws)
    params = [draw.params for draw in draws]
    return rollout_kernels.sample(
        logits,
        temperature=_tensor(np.fromiter((p.temperature for p in params), np.float32, count)),
        top_k=_tensor(np.fromiter((min(p.top_k, 2**31 - 1) for p in params), np.int32, count)),
        top_p=_tensor(np.fromiter((p.top_p for p in params), np.float32, count)),
        min_p=_tensor(np.fromiter((p.min_p for p in params), np.float32, count)),
        seed=_tensor(np.fromiter((draw.seed for draw in draws), np.int64, count)),
        sample_index=_tensor(np.fromiter((draw.sample_index for draw in draws), np.int64, count)),
        position=_tensor(np.fromiter((draw.position for draw in draws), np.int64, count)),
        row_index=_tensor(np.fromiter(rows, np.int64, count)),
        banned=_banned(draws),
    )


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def _banned(draws: Sequence[Draw]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not any(draw.banned_token_ids for draw in draws):
        return None
    counts = [len(draw.banned_token_ids) for draw in draws]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = np.fromiter((token_id for draw in draws for token_id in draw.banned_token_ids), np.int32, int(starts[-1]))
    return _tensor(starts), _tensor(ids)
