"""Rows picked by index, where a row may be picked often."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _TakeRows(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        if grad.is_cpu:
            total.index_add_(0, index, grad.float())
        else:  # on CUDA `index_add_` adds in any order, this in the order of `index`
            total.index_put_((index,), grad.float(), accumulate=True)
        return total.to(grad.dtype), None


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x: [T, ...], index: int64 [E] -> [E, ...]. The gradients of a row's copies are summed in float32."""
    return _TakeRows.apply(x, index)  # type: ignore[return-value]  # torch does not say what `apply` returns
