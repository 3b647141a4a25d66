"""Matrix products with what follows them, as the two operations that they stand for."""

from __future__ import annotations

import torch

from rollout_kernels.reference.activation import silu_and_mul
from rollout_kernels.reference.linear import linear
from rollout_kernels.reference.rotary import rotate_


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return silu_and_mul(linear(x, weight, bias, x.dtype))


def linear_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rotated_columns: int,
) -> torch.Tensor:
    out = linear(x, weight, bias, x.dtype)
    heads = out[:, :rotated_columns].unflatten(1, (-1, cos_sin.shape[1]))
    rotate_(heads, heads[:, :0], positions, cos_sin, 1.0)
    return out
