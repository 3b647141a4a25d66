"""RMS norm with a residual, forward and backward (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization").

A row fits into one block, and its sums are taken in one tree that depends on the row's length alone. The weight's
gradient is a sum over rows: over strips of 128 rows, then over the strips, in an order that depends on
their number alone.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.numerics import canonical_rows, round_to, row_stride
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2

_MAX_SIZE = 16384  # of a row; more would not stay in the registers of one block
# The weight's gradient: a program adds up 128 rows, 16 at a time.
_STRIP, _STRIP_ROWS, _STRIP_COLUMNS = 128, 16, 128
_SUM_ROWS, _SUM_COLUMNS = 16, 64


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,  # [T, H]
    weight,  # [H]
    residual,  # [T, H] float32, read where HAS_RESIDUAL
    out,  # [T, H], contiguous
    total,  # [T, H] float32, contiguous, written where HAS_TOTAL
    x_stride,
    residual_stride,
    num_rows,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < size)
    h = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + rows * residual_stride + columns, mask=mask, other=0.0)
    if HAS_TOTAL:
        tl.store(total + rows * size + columns, h, mask=mask)
    w = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(h * h, axis=1, keep_dims=True) / size + eps)
    tl.store(out + rows * size + columns, round_to(h * inverse_rms * w, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    grad,  # [T, H]; this and all below contiguous
    grad_total,  # [T, H] float32, read where HAS_GRAD_TOTAL
    total,  # [T, H] float32
    weight,  # [H]
    grad_x,  # [T, H], written where HAS_GRAD_X
    grad_residual,  # [T, H] float32, written where HAS_GRAD_RESIDUAL
    inverse_rms,  # [T] float32
    num_rows,
    size,
    eps,
    HAS_GRAD_TOTAL: tl.constexpr,
    HAS_GRAD_X: tl.constexpr,
    HAS_GRAD_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_h = grad_total + r w g - h r^3 mean(h w g), with r = 1 / rms."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < size)
    offsets = rows * size + columns
    h = tl.load(total + offsets, mask=mask, other=0.0)
    scaled = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
    scaled *= tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(h * h, axis=1, keep_dims=True) / size + eps)
    slope = tl.sum(h * scaled, axis=1, keep_dims=True) * r * r * r / size
    grad_h = scaled * r - h * slope
    if HAS_GRAD_TOTAL:
        grad_h += tl.load(grad_total + offsets, mask=mask, other=0.0)
    if HAS_GRAD_X:
        tl.store(grad_x + offsets, round_to(grad_h, grad_x.dtype.element_ty), mask=mask)
    if HAS_GRAD_RESIDUAL:
        tl.store(grad_residual + offsets, grad_h, mask=mask)
    tl.store(inverse_rms + rows, r, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _weight_grad_strips_kernel(
    grad,  # [T, H]
    total,  # [T, H] float32
    inverse_rms,  # [T] float32
    strip_sums,  # [strips, H] float32
    num_rows,
    size,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    first = tl.program_id(0) * STRIP + tl.arange(0, ROWS)[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, STRIP, ROWS):
        rows = first + start
        mask = (rows < num_rows) & (columns < size)
        offsets = rows.to(tl.int64) * size + columns
        g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(total + offsets, mask=mask, other=0.0)
        sums += g * h * tl.load(inverse_rms + rows, mask=rows < num_rows, other=0.0)
    tl.store(
        strip_sums + tl.program_id(0).to(tl.int64) * size + columns,
        tl.sum(sums, axis=0, keep_dims=True),
        mask=columns < size,
    )


@triton.jit(do_not_specialize=["num_strips"])
def _weight_grad_sum_kernel(
    strip_sums,  # [strips, H] float32
    grad_weight,  # [H] float32
    num_strips,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    first = tl.arange(0, ROWS)[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num_strips, ROWS):
        strips = first + start
        mask = (strips < num_strips) & (columns < size)
        sums += tl.load(strip_sums + strips.to(tl.int64) * size + columns, mask=mask, other=0.0)
    tl.store(grad_weight + columns, tl.sum(sums, axis=0, keep_dims=True), mask=columns < size)


def _blocks(size: int) -> tuple[int, int, int]:
    """(rows of a program, columns of its block, warps) for rows of this size: short rows go several to a program."""
    if size > _MAX_SIZE:
        raise ValueError(f"x has rows of {size} elements: on GPUs a norm takes 1 to {_MAX_SIZE}")
    block = next_power_of_2(size)
    return max(1, 1024 // block), block, min(32, max(4, block // 512))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed [T, H] in `out_dtype`, total = x + residual [T, H] float32: x itself where there is nothing to add).

    Raises `ValueError` for rows of more than 16,384 elements.
    """
    num_rows, size = x.shape
    rows, block, num_warps = _blocks(size)
    out = torch.empty((num_rows, size), dtype=out_dtype, device=x.device)
    total_is_x = residual is None and x.dtype is torch.float32
    total = x if total_is_x else torch.empty((num_rows, size), dtype=torch.float32, device=x.device)
    if out.numel():
        rows_of_x, weight = canonical_rows(x), canonical_rows(weight)
        added = rows_of_x if residual is None else canonical_rows(residual)
        _rms_norm_kernel[(ceil_div(num_rows, rows),)](
            *(rows_of_x, weight, added, out, out if total_is_x else total),
            *(row_stride(rows_of_x), row_stride(added), num_rows, size, eps),
            HAS_RESIDUAL=residual is not None,
            HAS_TOTAL=not total_is_x,
            ROWS=rows,
            BLOCK=block,
            num_warps=num_warps,
            **PINNED,
        )
    return out, total


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
    """Gradients of x (in `x_dtype`; None: not wanted), of the residual and of the weight (float32); see `rms_norm`."""
    num_rows, size = total.shape
    rows, block, num_warps = _blocks(size)
    device = total.device
    grad_x = None if x_dtype is None else torch.empty((num_rows, size), dtype=x_dtype, device=device)
    grad_residual = torch.empty((num_rows, size), dtype=torch.float32, device=device) if with_residual else None
    if total.numel() == 0:
        return grad_x, grad_residual, torch.zeros(size, device=device) if with_weight else None
    grad, total, weight = canonical_rows(grad), canonical_rows(total), canonical_rows(weight)
    grad_total = None if grad_total is None else canonical_rows(grad_total)
    inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=device)
    _rms_norm_backward_kernel[(ceil_div(num_rows, rows),)](
        *(grad, total if grad_total is None else grad_total, total, weight),
        *(total if grad_x is None else grad_x, total if grad_residual is None else grad_residual, inverse_rms),
        *(num_rows, size, eps),
        HAS_GRAD_TOTAL=grad_total is not None,
        HAS_GRAD_X=grad_x is not None,
        HAS_GRAD_RESIDUAL=grad_residual is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
        **PINNED,
    )
    return grad_x, grad_residual, _weight_grad(grad, total, inverse_rms) if with_weight else None


def _weight_grad(grad: torch.Tensor, total: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Sum over rows of grad * total * inverse_rms, float32 [H]."""
    num_rows, size = total.shape
    num_strips = ceil_div(num_rows, _STRIP)
    strip_sums = torch.empty((num_strips, size), dtype=torch.float32, device=total.device)
    _weight_grad_strips_kernel[(num_strips, ceil_div(size, _STRIP_COLUMNS))](
        *(grad, total, inverse_rms, strip_sums, num_rows, size),
        STRIP=_STRIP,
        ROWS=_STRIP_ROWS,
        COLUMNS=_STRIP_COLUMNS,
        num_warps=4,
        **PINNED,
    )
    grad_weight = torch.empty(size, dtype=torch.float32, device=total.device)
    _weight_grad_sum_kernel[(ceil_div(size, _SUM_COLUMNS),)](
        *(strip_sums, grad_weight, num_strips, size),
        ROWS=_SUM_ROWS,
        COLUMNS=_SUM_COLUMNS,
        num_warps=4,
        **PINNED,
    )
    return grad_weight


_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def _cases(size: int, dtype: torch.dtype, heads: bool = False) -> list[KernelCase]:
    """The norms of rows of a layer (x with a residual; heads: norms of queries and keys), and their backward."""
    rows, block, num_warps = _blocks(size)
    pointer, wide = _POINTERS[dtype], "*fp32"
    label = f"{pointer[1:]} H={size}"
    forward_flags = {"HAS_RESIDUAL": not heads, "HAS_TOTAL": True}
    backward_flags = {"HAS_GRAD_TOTAL": not heads, "HAS_GRAD_X": True, "HAS_GRAD_RESIDUAL": not heads}
    shape = {"ROWS": rows, "BLOCK": block}
    forward = KernelCase(
        name=f"rms_norm {label}",
        kernel=_rms_norm_kernel,
        signature={
            "x": pointer,
            "weight": pointer,
            "residual": pointer if heads else wide,
            "out": pointer,
            "total": wide,
            **dict.fromkeys(("x_stride", "residual_stride", "num_rows", "size"), "i32"),
            "eps": "fp32",
            **dict.fromkeys((*forward_flags, *shape), "constexpr"),
        },
        constants=forward_flags | shape,
        num_warps=num_warps,
        num_stages=3,
        divisible_by_16=("x", "weight", "residual", "out", "total", "x_stride", "residual_stride", "size"),
    )
    tensors = {"grad": pointer, "grad_total": wide, "total": wide, "weight": pointer, "grad_x": pointer}
    backward = KernelCase(
        name=f"rms_norm backward {label}",
        kernel=_rms_norm_backward_kernel,
        signature={
            **tensors,
            "grad_residual": wide,
            "inverse_rms": wide,
            "num_rows": "i32",
            "size": "i32",
            "eps": "fp32",
            **dict.fromkeys((*backward_flags, *shape), "constexpr"),
        },
        constants=backward_flags | shape,
        num_warps=num_warps,
        num_stages=3,
        divisible_by_16=(*tensors, "grad_residual", "inverse_rms", "size"),
    )
    return [forward, backward]


def _weight_grad_cases(dtype: torch.dtype) -> list[KernelCase]:
    strip_shape = {"STRIP": _STRIP, "ROWS": _STRIP_ROWS, "COLUMNS": _STRIP_COLUMNS}
    sum_shape = {"ROWS": _SUM_ROWS, "COLUMNS": _SUM_COLUMNS}
    tensors = {"grad": _POINTERS[dtype], "total": "*fp32", "inverse_rms": "*fp32", "strip_sums": "*fp32"}
    strips = KernelCase(
        name=f"rms_norm weight's gradient, strips, {_POINTERS[dtype][1:]}",
        kernel=_weight_grad_strips_kernel,
        signature={**tensors, "num_rows": "i32", "size": "i32", **dict.fromkeys(strip_shape, "constexpr")},
        constants=strip_shape,
        num_warps=4,
        num_stages=3,
        divisible_by_16=(*tensors, "size"),
    )
    sums = {"strip_sums": "*fp32", "grad_weight": "*fp32", "num_strips": "i32", "size": "i32"}
    return [
        strips,
        KernelCase(
            name="rms_norm weight's gradient, sum",
            kernel=_weight_grad_sum_kernel,
            signature={**sums, **dict.fromkeys(sum_shape, "constexpr")},
            constants=sum_shape,
            num_warps=4,
            num_stages=3,
            divisible_by_16=("strip_sums", "grad_weight", "size"),
        ),
    ]


def ahead_of_time_cases() -> list[KernelCase]:
    bf16, fp16 = torch.bfloat16, torch.float16
    return [
        *_cases(576, bf16),
        *_cases(2048, bf16),
        *_cases(4096, bf16),
        *_cases(4096, fp16),
        *_cases(_MAX_SIZE, bf16),
        *_cases(128, bf16, heads=True),
        *_weight_grad_cases(bf16),
    ]
