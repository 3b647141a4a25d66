"""silu(gate) * up for x = [gate, up], forward and backward, in float32 and rounded once."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.numerics import round_to
from rollout_kernels.gpu.sizes import ceil_div

_BLOCK = 1024  # columns of a program: 8 to a thread, 16 bytes of bfloat16
_NUM_WARPS = 4


@triton.jit
def _silu_and_mul_kernel(
    x,  # [T, 2I]
    out,  # [T, I], contiguous
    x_stride,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + columns, round_to(value, out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul_backward_kernel(
    grad,  # [T, I]
    x,  # [T, 2I]
    grad_x,  # [T, 2I], contiguous
    grad_stride,
    x_stride,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    g = tl.load(grad + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    grad_gate = g * up * s * (1.0 + gate * (1.0 - s))
    target = grad_x + row * 2 * size + columns
    tl.store(target, round_to(grad_gate, grad_x.dtype.element_ty), mask=mask)
    tl.store(target + size, round_to(g * gate * s, grad_x.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2I], rows possibly apart -> [T, I]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if out.numel():
        _silu_and_mul_kernel[(rows, ceil_div(size, _BLOCK))](
            *(x, out, x.stride(0), size),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **PINNED,
        )
    return out


def silu_and_mul_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the output [T, I] and x [T, 2I] -> gradient of x [T, 2I]."""
    rows, size = grad.shape
    grad_x = torch.empty((rows, 2 * size), dtype=x.dtype, device=x.device)
    if grad_x.numel():
        _silu_and_mul_backward_kernel[(rows, ceil_div(size, _BLOCK))](
            *(grad, x, grad_x, grad.stride(0), x.stride(0), size),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **PINNED,
        )
    return grad_x


def ahead_of_time_cases() -> list[KernelCase]:
    """bfloat16 and float16; the size of a layer changes nothing in the kernel."""
    forward = {"x_stride": "i32", "size": "i32", "BLOCK": "constexpr"}
    cases = []
    for dtype in ("bf16", "fp16"):
        shared: dict = {"constants": {"BLOCK": _BLOCK}, "num_warps": _NUM_WARPS, "num_stages": 3}
        cases.append(
            KernelCase(
                name=f"silu_and_mul {dtype}",
                kernel=_silu_and_mul_kernel,
                signature={"x": f"*{dtype}", "out": f"*{dtype}", **forward},
                divisible_by_16=("x", "out", "x_stride", "size"),
                **shared,
            )
        )
        cases.append(
            KernelCase(
                name=f"silu_and_mul backward {dtype}",
                kernel=_silu_and_mul_backward_kernel,
                signature={**dict.fromkeys(("grad", "x", "grad_x"), f"*{dtype}"), "grad_stride": "i32", **forward},
                divisible_by_16=("grad", "x", "grad_x", "grad_stride", "x_stride", "size"),
                **shared,
            )
        )
    return cases
