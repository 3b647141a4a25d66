"""Root mean square normalisation (Zhang and Sennrich, 2019) fused with the residual addition."""

from __future__ import annotations

import torch
from torch import nn

import rollout_kernels


class RMSNorm(nn.Module):
    """`residual = x + residual` in float32, and its normalisation rounded once to the dtype of the weight."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: float32 [T, hidden]. Returns (normed [T, hidden] in the weight's dtype, residual float32)."""
        return rollout_kernels.rms_norm(x, self.weight, self.eps, residual, self.weight.dtype)
