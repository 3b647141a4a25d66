"""silu(gate) * up, forward and backward."""

from __future__ import annotations

import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return (gate / (1.0 + (-gate).exp()) * up).to(x.dtype)


def silu_and_mul_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    g, s = grad.double(), 1.0 / (1.0 + (-gate).exp())
    return torch.cat((g * up * s * (1.0 + gate * (1.0 - s)), g * gate * s), dim=-1).to(x.dtype)
