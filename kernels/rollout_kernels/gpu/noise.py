"""The noise of sampling on the device: the bits of `reference/noise.py`, and the race that they decide."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.sizes import ceil_div

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _mix64(h):
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit
def noise_key(seed, sample_index, position):
    """The 64-bit key (uint64) of one draw, from three int64 numbers of which every bit counts."""
    h = _mix64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    h = _mix64((h ^ sample_index.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)
    return _mix64((h ^ position.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)


@triton.jit
def noise_of_ids(key, ids):
    """The 32 noise bits (uint32) of token ids (int32) under a key."""
    h = ids.to(tl.uint32, bitcast=True) * 0x9E3779B1 + (key & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = (h ^ (h >> 16)) + (key >> 32).to(tl.uint32)
    h = (h ^ (h >> 17)) * 0xED5AD4BB
    h = (h ^ (h >> 11)) * 0xAC4C1B51
    return h ^ (h >> 15)


@triton.jit
def exponential(bits):
    """E = -log(1 - u) in float32 for u = (bits + 0.5) / 2^32, within 1e-6 of its value.

    Below 1/4 it is the series u + u^2/2 + u^3/3 + ... with eleven terms, whose rest is smaller than 2^-24 of the sum;
    above, the logarithm of 1 - u, which is as exact a multiple of 2^-32 as u.
    """
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = tl.full(u.shape, 1.0 / 11.0, tl.float32)
    for term in tl.static_range(10):
        series = tl.fma(series, u, 1.0 / (10.0 - term))
    return tl.where(u < 0.25, u * series, -tl.log(rest))


@triton.jit
def race_scores(weights, key, ids):
    """weights / E (float32): the largest one wins. A weight of 0 never beats a positive one."""
    return weights / exponential(noise_of_ids(key, ids))


@triton.jit
def _noise_bits_kernel(numbers, token_ids, bits, count, BLOCK: tl.constexpr):
    """`numbers` is int64 [3]: seed, sample index, position."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    key = noise_key(tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2))
    ids = tl.load(token_ids + offsets, mask=mask, other=0).to(tl.int32)
    tl.store(bits + offsets, noise_of_ids(key, ids).to(tl.int64), mask=mask)


def noise_bits(seed: int, sample_index: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """The 32 noise bits (int64) of each token id (int64, contiguous) in the draw that the three numbers name."""
    bits, count = torch.empty_like(token_ids), token_ids.numel()
    if count:
        numbers = torch.tensor([seed, sample_index, position], dtype=torch.int64, device=token_ids.device)
        _noise_bits_kernel[(ceil_div(count, _BLOCK),)](
            *(numbers, token_ids, bits, count),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **PINNED,
        )
    return bits


def ahead_of_time_cases() -> list[KernelCase]:
    pointers = {"numbers": "*i64", "token_ids": "*i64", "bits": "*i64"}
    return [
        KernelCase(
            name="noise_bits",
            kernel=_noise_bits_kernel,
            signature=pointers | {"count": "i32", "BLOCK": "constexpr"},
            constants={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=3,
            divisible_by_16=tuple(pointers),
        )
    ]
