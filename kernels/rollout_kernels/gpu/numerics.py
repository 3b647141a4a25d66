"""What every kernel does the same way: matrix products that accumulate in float32, and rounding to the model dtype.

Triton's interpreter multiplies bfloat16 tiles as if their bits were integers, and rounds to bfloat16 by cutting off
(its rounding to nearest loses the carry into the exponent). Both have a second form here that is right in the
interpreter; a compiled kernel holds the first form alone.

Triton compiles a kernel anew where an address or a stride becomes a multiple of 16, and how it then lays a row over the
threads decides in which order `tl.sum` adds. So kernels that sum along a row take it through `canonical_rows`.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.interpreter import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr = "ieee"):
    """total + a @ b in float32; PRECISION says how float32 operands are multiplied."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Float32 values in DTYPE (float16, bfloat16 or float32), rounded to the nearest, the even one of two."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


def canonical_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., H], or a copy, in the one form in which kernels see rows of H elements, whatever they are part of.

    The address is a multiple of 16 bytes, and the stride of a row a multiple of 16 elements just where H is one.
    """
    aligned = x.data_ptr() % 16 == 0
    like_contiguous = x.dim() < 2 or x.shape[0] == 1 or (x.stride(0) % 16 == 0) == (x.shape[-1] % 16 == 0)
    return x if aligned and like_contiguous else x.clone(memory_format=torch.contiguous_format)


def row_stride(x: torch.Tensor) -> int:
    """Elements from a row of x [T, H] to the next; torch gives a single row any stride, which here is that of many."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
