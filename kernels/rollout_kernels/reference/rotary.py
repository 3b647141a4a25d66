"""Rotary position embedding, half-split ("neox") style, in place."""

from __future__ import annotations

import torch

from rollout_kernels.errors import position_error
from rollout_kernels.reference.reduce import accumulation_dtype


def rotate_(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, direction: float) -> None:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] by their positions; `direction` -1 rotates back."""
    outside = ((positions < 0) | (positions >= cos_sin.shape[0])).nonzero()
    if outside.numel():
        raise position_error(positions, int(outside[0]), cos_sin.shape[0])
    wide = accumulation_dtype(q.dtype)
    cosine, sine = cos_sin[positions].to(wide)[:, None, :].chunk(2, dim=-1)
    sine = sine * direction
    for x in (q, k):
        low, high = x.to(wide).chunk(2, dim=-1)
        x.copy_(torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1))
