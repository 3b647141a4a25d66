"""Elements of a quantised KV cache: float8 e4m3 by integer arithmetic, and int8.

GPUs before compute capability 8.9 have no instruction for e4m3, so its bytes (sign, 4 bits of exponent with bias 7, 3
bits of mantissa) are taken apart and put together as integers, on every GPU and in the interpreter alike. No code for
NaN is ever written: a token that holds one gets the scale NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.numerics import round_to
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM

INT8 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
_TWO_TO_120 = tl.constexpr(2.0**120)  # moves the exponent's bias from 7 to bfloat16's 127


def quantisation_of(dtype: torch.dtype) -> int:
    """What kernels call the element type of a cache: 0 for plain values, `INT8` or `E4M3`."""
    if dtype not in QUANTISED_MAXIMUM:
        return 0
    return int(INT8.value if dtype is torch.int8 else E4M3.value)


def as_elements(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels take it: e4m3 as bytes, since Triton refuses the type on sm_80."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


@triton.jit
def round_to_integer(x):
    """The nearest integer to a float32 below 2^22 in magnitude, the even one of two: what adding 1.5 * 2^23 does."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode(x, KIND: tl.constexpr):
    """Float32 values within the range of the element type -> elements (int8, or uint8 for e4m3)."""
    if KIND == INT8:
        elements = tl.maximum(tl.minimum(round_to_integer(x), 127.0), -127.0).to(tl.int8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        nearest = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # exponent and 3 bits of mantissa
        normal = tl.minimum(nearest - ((127 - 7) << 3), 0x7E)
        subnormal = round_to_integer(tl.abs(x) * 512.0).to(tl.int32)  # steps of 2^-9; 8 of them are the first normal
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # below 2^-6
        elements = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return elements


@triton.jit
def decode(elements, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Elements -> their values in DTYPE (float16, bfloat16 or float32), all of which are exact."""
    if KIND == INT8:
        decoded = round_to(elements.to(tl.float32), DTYPE)
    else:
        code = elements.to(tl.int16)
        sign = (code & 0x80) << 8
        if tl.bfloat16 == DTYPE:
            scaled_down = (sign | ((code & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
            decoded = round_to(scaled_down.to(tl.float32) * _TWO_TO_120, DTYPE)
        else:
            scaled_down = (sign | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)
            decoded = (scaled_down * 256.0).to(DTYPE)  # the bias 7 becomes 15
    return decoded
