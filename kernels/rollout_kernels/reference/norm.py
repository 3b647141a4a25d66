"""RMS norm with a residual, forward and backward."""

from __future__ import annotations

import torch

from rollout_kernels.reference.reduce import accumulation_dtype, row_sum


def _inverse_rms(total: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(h^2) + eps) of each row, float64 [T, 1]."""
    h = total.double()
    return 1.0 / (row_sum(h * h) / h.shape[-1] + eps).sqrt()[:, None]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.to(accumulation_dtype(x.dtype))
    if residual is not None:
        total = total + residual
    return (total.double() * _inverse_rms(total, eps) * weight.double()).to(out_dtype), total


def rms_norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_dtype: torch.dtype | None,
    with_residual: bool,
    with_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x (in `x_dtype`; None: not wanted), of the residual and of the weight (accumulation dtype)."""
    r, h, g = _inverse_rms(total, eps), total.double(), grad.double()
    slope = row_sum(h * weight.double() * g)[:, None] * r**3 / h.shape[-1]
    grad_h = g * weight.double() * r - h * slope
    if grad_total is not None:
        grad_h = grad_h + grad_total.double()
    grad_x = None if x_dtype is None else grad_h.to(x_dtype)
    grad_weight = row_sum((g * h * r).T).to(total.dtype) if with_weight else None
    return grad_x, grad_h.to(total.dtype) if with_residual else None, grad_weight
