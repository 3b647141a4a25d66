"""Causal attention over the paged KV cache, for prefill chunks and decodes alike.

One compiled program serves both, so that a query has the same bits in a decode step, in a prefill chunk, and alone:

- A program takes one key-value head and BLOCK_M rows: consecutive tokens of a sequence times the query heads of the
  group. A decode fills few of the rows; it waits for memory anyway. The matrix instructions have one shape therefore,
  and each row of a tensor-core product hangs on its own row of the left operand alone, wherever it lies in the tile.
- Keys are walked in tiles that begin at fixed positions of the sequence, with an online softmax. A tile that a row does
  not see multiplies its state by exactly 1 and adds exactly 0.
- The walk starts afresh at every multiple of SPLIT keys; the results of the splits are folded in ascending order, by
  one function with explicit fused multiply-adds. Where there are few rows, the splits of a row are computed by several
  programs and folded by a second kernel; otherwise by the one program, which folds as it goes: the same numbers in the
  same order. Which of the two happens is decided by shapes, never by values, and changes no bit.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao et al., "FlashAttention"
(arXiv:2205.14135), and "Flash-Decoding" (2023), whose number of splits hangs on the batch, as it does not here.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.numerics import dot, round_to
from rollout_kernels.gpu.quantised import as_elements, decode, quantisation_of
from rollout_kernels.gpu.sequences import block_range, num_query_blocks, sequence_of_block, sequence_of_token
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2
from rollout_kernels.kv_cache import TILE, KVCache

SPLIT = 256  # keys; contexts of this length at most need no second pass
_ENOUGH_PROGRAMS = 512  # about four for each multiprocessor of an A100 or H100
_WORKSPACE_LIMIT = 256 << 20  # bytes of partial results
NO_WINDOW = 1 << 30  # as wide as no sequence is long
_FOLD_STAGES = 4
_FOLD_WARPS = 2
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_TILE = tl.constexpr(TILE)
_NOT_SPECIALISED = ("num_tokens", "num_sequences", "num_kv_heads", "window", "merge", "table_stride")


@triton.jit
def _fold(total_max, total_sum, total_out, split_max, split_sum, split_out):
    """Adds a split (maximum and sum [rows], output [rows, D], in units of its maximum) to those before it.

    The multiply-adds are explicit, so that no compiler chooses differently in the two kernels that call this.
    """
    maximum = tl.maximum(total_max, split_max)
    unit = tl.where(maximum == -float("inf"), 0.0, maximum)
    before, now = tl.exp2(total_max - unit), tl.exp2(split_max - unit)
    total_sum = tl.fma(split_sum, now, total_sum * before)
    total_out = tl.fma(split_out, tl.broadcast_to(now[:, None], split_out.shape), total_out * before[:, None])
    return maximum, total_sum, total_out


@triton.jit
def _finish(total_max, total_sum, total_out):
    """Output and log-sum-exp (natural) of rows; zeros and -inf where a row saw no key."""
    seen = total_sum != 0.0  # true for NaN
    out = total_out / tl.where(seen, total_sum, 1.0)[:, None]
    out = tl.where(out == 0.0, 0.0, out)  # no negative zero, whose sign could hang on unseen splits
    lse = tl.where(seen, (total_max + tl.log2(total_sum)) * _LN_2, -float("inf"))
    return out, lse


@triton.jit
def cap(scores, soft_cap):
    """soft_cap * tanh(x / soft_cap) for scores x, which come and go as x * log2(e): tanh(y) = 1 - 2 / (e^2y + 1)."""
    return soft_cap * _LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap)) + 1.0))


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def _attention_kernel(
    q,  # [T, Hq, D]
    keys,  # [tiles, Hkv, 16, D]
    values,  # [tiles, Hkv, 16, D]
    key_scales,  # [tiles, Hkv, 16], or None
    value_scales,
    block_tables,  # [S, max_blocks]
    query_start,  # [S + 1]
    seq_lens,  # [S]
    out,  # [T, Hq, D]
    lse,  # [T, Hq]
    split_out,  # float32 [max_splits, Hkv, T, Hq / Hkv, D] where merge is 0
    split_max,  # float32 [max_splits, Hkv, T, Hq / Hkv]
    split_sum,  # float32 [max_splits, Hkv, T, Hq / Hkv]
    q_row_stride,
    q_head_stride,
    table_stride,
    num_tokens,
    num_sequences,
    num_kv_heads,
    window,
    merge,  # 1: this program folds all splits and writes `out`; 0: it writes each of its splits
    score_scale,  # scale * log2(e)
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTISATION: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Program (b, h, c): rows of query block b and key-value head h; splits c, c + C, … of C = grid[2]."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    TILES_PER_SPLIT: tl.constexpr = SPLIT // BLOCK_N
    TILES_PER_BLOCK: tl.constexpr = (BLOCK_SIZE + 15) // 16
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the end of a long prompt has most keys: it goes first
    kv_head = tl.program_id(1)
    part, parts = tl.program_id(2), tl.num_programs(2)

    sequence = sequence_of_block(query_start, num_sequences, block, QUERIES)
    begin, end = block_range(query_start, num_sequences, num_tokens, sequence, block, QUERIES)
    if begin >= end:
        return
    length = tl.load(seq_lens + sequence, mask=sequence < num_sequences, other=0)
    history = length - end  # position of token t is t + history; negative for padding, which sees nothing
    key_end = tl.minimum(begin + QUERIES, end) + history
    key_begin = tl.maximum(begin + history - window + 1, 0)
    first_split = key_begin // SPLIT
    num_splits = tl.maximum(tl.cdiv(key_end, SPLIT) - first_split, 0)
    own_splits = (tl.maximum(num_splits - part, 0) + parts - 1) // parts
    if (own_splits == 0) & (merge == 0):
        return

    row = tl.arange(0, BLOCK_M)
    token = begin + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_inside = (token < end) & (row < QUERIES * GROUP)
    position = tl.where(row_inside, token + history, -1)
    d = tl.arange(0, BLOCK_D)
    row_mask = row_inside[:, None] & (d < HEAD_DIM)[None, :]
    q_offset = token.to(tl.int64)[:, None] * q_row_stride + head[:, None] * q_head_stride + d[None, :]
    q_tile = tl.load(q + q_offset, mask=row_mask, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride

    total_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total_sum = tl.zeros([BLOCK_M], tl.float32)
    total_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # One loop over the tiles of all own splits, so that loads run ahead across the boundaries of splits.
    skipped = tl.where(part == 0, (key_begin // BLOCK_N) % TILES_PER_SPLIT, 0)
    last_split = first_split + part + (own_splits - 1) * parts
    last_tiles = tl.minimum(tl.cdiv(key_end, BLOCK_N) - last_split * TILES_PER_SPLIT, TILES_PER_SPLIT)
    steps = (own_splits - 1) * TILES_PER_SPLIT + last_tiles
    for step in range(skipped, steps):
        split = first_split + part + (step // TILES_PER_SPLIT) * parts
        tile_of_split = step % TILES_PER_SPLIT
        key = split * SPLIT + tile_of_split * BLOCK_N + tl.arange(0, BLOCK_N)
        key_inside = (key >= key_begin) & (key < key_end)
        block_id = tl.load(table + key // BLOCK_SIZE, mask=key_inside, other=0)
        in_block = key % BLOCK_SIZE
        tile = block_id.to(tl.int64) * TILES_PER_BLOCK + in_block // _TILE
        address = (tile * num_kv_heads + kv_head) * _TILE + in_block % _TILE
        offset = address[:, None] * HEAD_DIM + d[None, :]
        if HEAD_DIM == BLOCK_D:
            mask = key_inside[:, None]
        else:
            mask = key_inside[:, None] & (d < HEAD_DIM)[None, :]
        k_tile = tl.load(keys + offset, mask=mask, other=0)
        v_tile = tl.load(values + offset, mask=mask, other=0)
        if QUANTISATION != 0:
            k_tile = decode(k_tile, QUANTISATION, q_tile.dtype)
            # Weights are multiplied by the scales of values, which could leave the range of float16.
            weight_type: tl.constexpr = tl.float32 if q_tile.dtype == tl.float32 else tl.bfloat16
            v_tile = decode(v_tile, QUANTISATION, weight_type)

        scores = dot(q_tile, tl.trans(k_tile), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * score_scale
        if QUANTISATION != 0:
            scores *= tl.load(key_scales + address, mask=key_inside, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            scores = cap(scores, soft_cap)
        visible = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
        maximum = tl.maximum(row_max, tl.max(scores, axis=1))
        unit = tl.where(maximum == -float("inf"), 0.0, maximum)
        weights = tl.exp2(scores - unit[:, None])
        shrink = tl.exp2(row_max - unit)
        row_sum = tl.fma(row_sum, shrink, tl.sum(weights, axis=1))
        row_max = maximum
        if QUANTISATION != 0:
            weights *= tl.load(value_scales + address, mask=key_inside, other=0.0)[None, :]
        row_out = dot(round_to(weights, v_tile.dtype), v_tile, row_out * shrink[:, None])

        if (tile_of_split == TILES_PER_SPLIT - 1) | (step == steps - 1):
            if merge != 0:
                total_max, total_sum, total_out = _fold(total_max, total_sum, total_out, row_max, row_sum, row_out)
            else:
                split_row = ((split * num_kv_heads + kv_head).to(tl.int64) * num_tokens + begin) * GROUP
                tl.store(split_max + split_row + row, row_max, mask=row_inside)
                tl.store(split_sum + split_row + row, row_sum, mask=row_inside)
                tl.store(
                    split_out + split_row * HEAD_DIM + row[:, None] * HEAD_DIM + d[None, :], row_out, mask=row_mask
                )
            row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            row_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    if merge != 0:
        result, log_total = _finish(total_max, total_sum, total_out)
        out_row = token.to(tl.int64) * (num_kv_heads * GROUP) + head
        tl.store(out + out_row[:, None] * HEAD_DIM + d[None, :], round_to(result, out.dtype.element_ty), mask=row_mask)
        tl.store(lse + out_row, log_total, mask=row_inside)


@triton.jit(do_not_specialize=("num_tokens", "num_sequences", "window"))
def _fold_splits_kernel(
    split_out,  # float32 [max_splits, Hkv, T, Hq / Hkv, D]
    split_max,  # float32 [max_splits, Hkv, T, Hq / Hkv]
    split_sum,  # float32 [max_splits, Hkv, T, Hq / Hkv]
    query_start,  # [S + 1]
    seq_lens,  # [S]
    out,  # [T, Hq, D]
    lse,  # [T, Hq]
    num_tokens,
    num_sequences,
    window,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (t, h) folds the splits that token t sees, in ascending order, for key-value head h's query heads."""
    token = tl.program_id(0)
    sequence = sequence_of_token(query_start, num_sequences, token)
    end = tl.load(query_start + sequence + 1, mask=sequence < num_sequences, other=num_tokens)
    length = tl.load(seq_lens + sequence, mask=sequence < num_sequences, other=0)
    position = token + length - end

    member = tl.arange(0, BLOCK_G)
    inside = member < GROUP
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    out_row = token.to(tl.int64) * (num_kv_heads * GROUP) + kv_head * GROUP + member
    total_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total_sum = tl.zeros([BLOCK_G], tl.float32)
    total_out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    first = tl.maximum(position - window + 1, 0) // SPLIT
    for split in tl.range(first, tl.cdiv(position + 1, SPLIT), num_stages=STAGES):
        row = (((split + tl.zeros([BLOCK_G], tl.int64)) * num_kv_heads + kv_head) * num_tokens + token) * GROUP + member
        row_max = tl.load(split_max + row, mask=inside, other=-float("inf"))
        row_sum = tl.load(split_sum + row, mask=inside, other=0.0)
        row_out = tl.load(split_out + row[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        total_max, total_sum, total_out = _fold(total_max, total_sum, total_out, row_max, row_sum, row_out)
    result, log_total = _finish(total_max, total_sum, total_out)
    tl.store(out + out_row[:, None] * HEAD_DIM + d[None, :], round_to(result, out.dtype.element_ty), mask=mask)
    tl.store(lse + out_row, log_total, mask=inside)


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """How `_attention_kernel` is compiled; a function of head size, group, and dtypes."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


def attention_blocks(head_dim: int, group: int, dtype: torch.dtype) -> AttentionBlocks:
    """The one configuration for that head size. Raises `ValueError` for sizes that no configuration serves."""
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim={head_dim} is not valid: the Triton attention takes 1 to 256")
    if group > 128:
        raise ValueError(f"{group} query heads share a key-value head: the Triton attention takes at most 128")
    block_d = max(16, next_power_of_2(head_dim))
    rows = 64 if group <= 64 else 128
    few_rows = 32 if group <= 32 else rows  # where two float32 outputs of 64 rows do not fit into the registers
    if dtype is torch.float32 or block_d == 256:
        return AttentionBlocks(few_rows, 32, block_d, 8, 2)
    if block_d == 128 or rows == 128:
        return AttentionBlocks(rows, 32, block_d, 8, 2)
    return AttentionBlocks(rows, 64, block_d, 8, 3)  # with 4 warps the scores do not fit into the registers (sm_80)


def _num_parts(num_blocks: int, num_kv_heads: int, max_splits: int, workspace: int) -> int:
    """Programs among which the splits of a row are dealt; 1 where rows alone keep the device busy."""
    programs = num_blocks * num_kv_heads
    if max_splits == 1 or programs >= _ENOUGH_PROGRAMS or workspace > _WORKSPACE_LIMIT:
        return 1
    return min(max_splits, ceil_div(_ENOUGH_PROGRAMS, programs))


def paged_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    scale: float,
    return_lse: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    last_places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the last tokens of sequences to all of their keys in the cache: out [T, Hq, D], lse [T, Hq] or None.

    q is [T, Hq, D] (last stride 1) in float16, bfloat16 or float32; sequence s has rows query_start[s] to
    query_start[s + 1], the last of its seq_lens[s] positions. Grids hang on shapes alone: nothing waits for the device.
    Rows that see no key (an empty slot of a captured batch, rows after the last sequence) come out as zeros with lse
    -inf. Keys of an int8 or e4m3 cache enter the product exactly and scores are multiplied by the key's scale; a
    value's scale multiplies the weights before they are rounded for the second product (to bfloat16, also for float16
    queries, whose range is too small for it).
    """
    if last_places is not None:
        raise ValueError("last_places is not None: the Triton kernels find every key in its own place")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = cache.keys.shape[1]
    group = num_heads // num_kv_heads
    num_sequences = seq_lens.shape[0]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    if not num_tokens:
        return out, lse if return_lse else None
    blocks = attention_blocks(head_dim, group, q.dtype)
    num_blocks = num_query_blocks(num_tokens, num_sequences, blocks.block_m // group)
    max_splits = max(1, ceil_div(block_tables.shape[1] * block_size, SPLIT))
    partial_rows = num_tokens * num_heads * max_splits
    parts = _num_parts(num_blocks, num_kv_heads, max_splits, 4 * partial_rows * (head_dim + 2))
    split_out, split_max, split_sum = (
        torch.empty(partial_rows * width if parts > 1 else 0, dtype=torch.float32, device=q.device)
        for width in (head_dim, 1, 1)
    )
    visible = NO_WINDOW if window is None else window
    _attention_kernel[(num_blocks, num_kv_heads, parts)](
        *(q, as_elements(cache.keys), as_elements(cache.values), cache.key_scales, cache.value_scales),
        *(block_tables, query_start, seq_lens, out, lse, split_out, split_max, split_sum),
        *(q.stride(0), q.stride(1), block_tables.stride(0), num_tokens, num_sequences, num_kv_heads),
        *(visible, int(parts == 1), scale * _LOG2_E.value, 0.0 if soft_cap is None else soft_cap),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=blocks.block_d,
        BLOCK_M=blocks.block_m,
        BLOCK_N=blocks.block_n,
        SPLIT=SPLIT,
        BLOCK_SIZE=block_size,
        QUANTISATION=quantisation_of(cache.keys.dtype),
        HAS_SOFT_CAP=soft_cap is not None,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **PINNED,
    )
    if parts > 1:
        _fold_splits_kernel[(num_tokens, num_kv_heads)](
            *(split_out, split_max, split_sum, query_start, seq_lens, out, lse),
            *(num_tokens, num_sequences, visible),
            SPLIT=SPLIT,
            GROUP=group,
            BLOCK_G=next_power_of_2(group),
            HEAD_DIM=head_dim,
            BLOCK_D=blocks.block_d,
            STAGES=_FOLD_STAGES,
            num_warps=_FOLD_WARPS,
            **PINNED,
        )
    return out, lse if return_lse else None


def _attention_case(dtype: str, cache: str, num_heads: int, num_kv_heads: int, head_dim: int, cap: bool) -> KernelCase:
    torch_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    element = {"int8": "i8", "e4m3": "u8"}.get(cache, cache)
    quantisation = quantisation_of({"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(cache, torch_type))
    blocks = attention_blocks(head_dim, num_heads // num_kv_heads, torch_type)
    constants: dict[str, Any] = {
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": blocks.block_d,
        "BLOCK_M": blocks.block_m,
        "BLOCK_N": blocks.block_n,
        "SPLIT": SPLIT,
        "BLOCK_SIZE": 16,
        "QUANTISATION": quantisation,
        "HAS_SOFT_CAP": cap,
    }
    scales = "*fp32" if quantisation else "constexpr"
    signature = {
        "q": f"*{dtype}",
        "keys": f"*{element}",
        "values": f"*{element}",
        "key_scales": scales,
        "value_scales": scales,
        "block_tables": "*i32",
        "query_start": "*i32",
        "seq_lens": "*i32",
        "out": f"*{dtype}",
        "lse": "*fp32",
        "split_out": "*fp32",
        "split_max": "*fp32",
        "split_sum": "*fp32",
        **dict.fromkeys(("q_row_stride", "q_head_stride", "table_stride", "num_tokens", "num_sequences"), "i32"),
        **dict.fromkeys(("num_kv_heads", "window", "merge"), "i32"),
        "score_scale": "fp32",
        "soft_cap": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    if not quantisation:
        constants |= {"key_scales": None, "value_scales": None}
    aligned = ["q", "keys", "values", "out", "lse", "split_out", "q_row_stride"]
    if head_dim % 16 == 0:
        aligned.append("q_head_stride")
    heads = f"{num_heads}/{num_kv_heads}"
    return KernelCase(
        name=f"paged_attention {dtype} cache={cache} heads={heads} D={head_dim}{' soft cap' if cap else ''}",
        kernel=_attention_kernel,
        signature=signature,
        constants=constants,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        tensor_cores=dtype != "fp32",
        divisible_by_16=tuple(aligned),
    )


def _fold_case(dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> KernelCase:
    group = num_heads // num_kv_heads
    constants = {
        "SPLIT": SPLIT,
        "GROUP": group,
        "BLOCK_G": next_power_of_2(group),
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "STAGES": _FOLD_STAGES,
    }
    signature = {
        "split_out": "*fp32",
        "split_max": "*fp32",
        "split_sum": "*fp32",
        "query_start": "*i32",
        "seq_lens": "*i32",
        "out": f"*{dtype}",
        "lse": "*fp32",
        **dict.fromkeys(("num_tokens", "num_sequences", "window"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return KernelCase(
        name=f"fold_splits {dtype} heads={num_heads}/{num_kv_heads} D={head_dim}",
        kernel=_fold_splits_kernel,
        signature=signature,
        constants=constants,
        num_warps=_FOLD_WARPS,
        num_stages=3,
        divisible_by_16=("split_out", "out"),
    )


def ahead_of_time_cases() -> list[KernelCase]:
    """SmolLM2-135M (9/3 heads, D 64), Llamas of 1B and 8B (32/8, D 64 and 128), other heads, caches, soft cap."""
    heads = [
        *[("bf16", "bf16", 9, 3, 64, False), ("bf16", "bf16", 32, 8, 64, False), ("bf16", "bf16", 32, 8, 128, False)],
        *[("fp16", "fp16", 32, 8, 128, False), ("fp32", "fp32", 9, 3, 64, False), ("fp32", "fp32", 32, 8, 128, False)],
        *[("bf16", "bf16", 28, 4, 128, False), ("bf16", "bf16", 32, 32, 80, False), ("bf16", "bf16", 8, 4, 256, True)],
        *[("bf16", "int8", 9, 3, 64, False), ("bf16", "int8", 32, 8, 128, False)],
        *[("bf16", "e4m3", 32, 8, 128, False), ("fp16", "e4m3", 32, 8, 128, False), ("bf16", "e4m3", 8, 4, 256, True)],
    ]
    attention = [_attention_case(*case) for case in heads]
    return [*attention, *(_fold_case("bf16", *sizes) for sizes in ((9, 3, 64), (32, 8, 128), (8, 4, 256)))]
