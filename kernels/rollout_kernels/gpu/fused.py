"""Projections followed by what is done with their columns: two kernels each, the second over what lies in the L2 cache.

On a GPU the second kernel moves a few MB at the bandwidth of the cache. Doing its work at the end of the product would
tie the product's tiles to the head size, or need two accumulators a thread, and cost more than it saves.
"""

from __future__ import annotations

import torch

from rollout_kernels.gpu.activation import silu_and_mul
from rollout_kernels.gpu.linear import linear
from rollout_kernels.gpu.rotary import rotate_


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu_and_mul(linear(x, weight, bias)), [T, I]."""
    return silu_and_mul(linear(x, weight, bias, x.dtype))


def linear_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rotated_columns: int,
) -> torch.Tensor:
    """linear(x, weight, bias) [T, N] whose first `rotated_columns` are heads that are rotated."""
    out = linear(x, weight, bias, x.dtype)
    heads = out[:, :rotated_columns].unflatten(-1, (-1, cos_sin.shape[1]))
    rotate_(heads, heads[:, :0], positions, cos_sin, 1.0)
    return out
