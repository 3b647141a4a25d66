"""Sums whose order depends on the length of the summed dimension alone."""

from __future__ import annotations

import torch

_CHUNK = 256


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of the residual stream: float64 stays float64, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension. torch alone would split a long sum over threads when it is the only one."""
    total = x[..., :_CHUNK].sum(-1)
    for start in range(_CHUNK, x.shape[-1], _CHUNK):
        total = total + x[..., start : start + _CHUNK].sum(-1)
    return total
