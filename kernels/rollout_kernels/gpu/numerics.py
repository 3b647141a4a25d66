"""What every kernel does the same way: matrix products that accumulate in float32, and rounding to the model dtype.

Triton's interpreter multiplies bfloat16 tiles as if their bits were integers, and rounds to bfloat16 by cutting off (its
rounding to nearest loses the carry into the exponent). Both have a second form here that is right in the interpreter;
a compiled kernel holds the first form alone.
"""

from __future__ import annotations

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
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, nearest).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
