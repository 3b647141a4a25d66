"""Writing keys and values into the paged cache of layout "plain", quantised where the cache is."""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.quantised import as_elements, encode, quantisation_of
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2
from rollout_kernels.kv_cache import QUANTISED_MAXIMUM, TILE, KVCache

_TILE = tl.constexpr(TILE)
_NUM_WARPS = 4
_ELEMENTS = 2048  # heads x head_dim of a program: 16 values a thread


@triton.jit
def _quantise(rows, QUANTISATION: tl.constexpr, MAXIMUM: tl.constexpr):
    """Rows [heads, D] -> elements [heads, D] and scales [heads]. A row with NaN or infinity gets a scale like that."""
    wide = rows.to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=1)
    # The maximum may pass over a NaN, which must not be lost: by its scale the whole token becomes NaN.
    largest = tl.where(tl.max((wide != wide).to(tl.int32), axis=1) != 0, float("nan"), largest)
    scale = tl.div_rn(largest, tl.full(largest.shape, MAXIMUM, tl.float32))
    usable = (scale > 0.0) & (scale < float("inf"))
    divisor = tl.broadcast_to(tl.where(usable, scale, 1.0)[:, None], wide.shape)
    quotient = tl.where(usable[:, None], tl.div_rn(wide, divisor), 0.0)
    return encode(quotient, QUANTISATION), scale


@triton.jit
def _write_kv_kernel(
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    slot_mapping,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_slots,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTISATION: tl.constexpr,
    MAXIMUM: tl.constexpr,
):
    """Program (t, h) writes heads h * BLOCK_H … of token t; nothing where its slot lies outside the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = head < num_heads
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    k_rows = tl.load(k + token * k_row_stride + head[:, None] * k_head_stride + d[None, :], mask=mask, other=0.0)
    v_rows = tl.load(v + token * v_row_stride + head[:, None] * v_head_stride + d[None, :], mask=mask, other=0.0)
    address = (slot // _TILE * num_heads + head) * _TILE + slot % _TILE
    target = address[:, None] * HEAD_DIM + d[None, :]
    if QUANTISATION == 0:
        tl.store(keys + target, k_rows, mask=mask)
        tl.store(values + target, v_rows, mask=mask)
    else:
        elements, scale = _quantise(k_rows, QUANTISATION, MAXIMUM)
        tl.store(keys + target, elements, mask=mask)
        tl.store(key_scales + address, scale, mask=inside)
        elements, scale = _quantise(v_rows, QUANTISATION, MAXIMUM)
        tl.store(values + target, elements, mask=mask)
        tl.store(value_scales + address, scale, mask=inside)


def _blocks(num_heads: int, head_dim: int) -> tuple[int, int]:
    """(BLOCK_H, BLOCK_D)."""
    block_d = next_power_of_2(head_dim)
    return min(next_power_of_2(num_heads), max(1, _ELEMENTS // block_d)), block_d


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Writes token t's keys and values (k, v [T, Hkv, D], last stride 1) to slot slot_mapping[t] (int64) of the cache.

    A slot outside the cache (-1: a padding row of a captured batch) writes nothing. The elements of an int8 or e4m3
    cache are x / scale rounded to the nearest, ties to even, with scale = amax(|x|) / 127 or / 448 of the token's head.
    """
    num_tokens, num_heads, head_dim = k.shape
    if not num_tokens:
        return
    block_h, block_d = _blocks(num_heads, head_dim)
    quantisation = quantisation_of(cache.keys.dtype)
    _write_kv_kernel[(num_tokens, ceil_div(num_heads, block_h))](
        *(k, v, as_elements(cache.keys), as_elements(cache.values), cache.key_scales, cache.value_scales, slot_mapping),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.keys.shape[0] * TILE, num_heads),
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        QUANTISATION=quantisation,
        MAXIMUM=QUANTISED_MAXIMUM.get(cache.keys.dtype, 0.0),
        num_warps=_NUM_WARPS,
        **PINNED,
    )


def ahead_of_time_cases() -> list[KernelCase]:
    """SmolLM2-135M and Llamas of 1B and 8B; head size 256; quantised caches."""
    element = {"bf16": "bf16", "fp16": "fp16", "int8": "i8", "e4m3": "u8"}
    kinds = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
    cases = []
    for dtype, cache, num_heads, head_dim in (
        ("bf16", "bf16", 3, 64),
        ("bf16", "bf16", 8, 128),
        ("fp16", "fp16", 8, 128),
        ("bf16", "bf16", 4, 256),
        ("bf16", "int8", 3, 64),
        ("bf16", "int8", 8, 128),
        ("bf16", "e4m3", 8, 128),
        ("fp16", "e4m3", 8, 128),
    ):
        block_h, block_d = _blocks(num_heads, head_dim)
        scales = "*fp32" if cache in kinds else "constexpr"
        constants = {
            "HEAD_DIM": head_dim,
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
            "QUANTISATION": quantisation_of(kinds.get(cache, torch.bfloat16)),
            "MAXIMUM": QUANTISED_MAXIMUM[kinds[cache]] if cache in kinds else 0.0,
        }
        signature = {
            "k": f"*{dtype}",
            "v": f"*{dtype}",
            "keys": f"*{element[cache]}",
            "values": f"*{element[cache]}",
            "key_scales": scales,
            "value_scales": scales,
            "slot_mapping": "*i64",
            **dict.fromkeys(("k_row_stride", "k_head_stride", "v_row_stride", "v_head_stride"), "i32"),
            "num_slots": "i32",
            "num_heads": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }
        if cache not in kinds:
            constants |= {"key_scales": None, "value_scales": None}
        aligned = ["k", "v", "keys", "values", "k_row_stride", "k_head_stride", "v_row_stride", "v_head_stride"]
        cases.append(
            KernelCase(
                name=f"write_kv {dtype} cache={cache} Hkv={num_heads} D={head_dim}",
                kernel=_write_kv_kernel,
                signature=signature,
                constants=constants,
                num_warps=_NUM_WARPS,
                num_stages=3,
                divisible_by_16=tuple(aligned),
            )
        )
    return cases
