"""Gradients of causal attention over packed sequences, without atomics: every sum has one fixed order.

Three passes. The first computes delta = sum(grad * out) of each query. The second takes a block of queries of one head
and walks the keys that they see, upwards from the sequence's first, to sum the gradient of the queries. The third takes
a block of keys of one key-value head and walks the query heads of its group, and for each the queries from the block's
own to the sequence's last, to sum the gradients of keys and values. Blocks begin at fixed positions of the sequence,
so that no gradient hangs on what else is packed. Weights come from the forward's log-sum-exp, as in Dao et al.,
"FlashAttention-2" (arXiv:2307.08691). Under a window the walks begin and end with what it shows, on the same blocks.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.attention import NO_WINDOW, cap
from rollout_kernels.gpu.numerics import dot, round_to
from rollout_kernels.gpu.sequences import block_range, num_query_blocks, sequence_of_block
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2

_LOG2_E = tl.constexpr(1.4426950408889634)
_DELTA_WARPS = 4
_DELTA_ROWS = 16
_SIZES = ("num_tokens", "num_sequences", "num_heads")
_NOT_SPECIALISED = (*_SIZES, "window")


@triton.jit
def _rows_of(tensor, token, row_stride, column_offset, mask, d):
    """Rows [tokens, D] of one head of a tensor whose rows are row_stride elements apart."""
    offset = token.to(tl.int64)[:, None] * row_stride + column_offset + d[None, :]
    return tl.load(tensor + offset, mask=mask, other=0.0)


@triton.jit
def _slope(scores, soft_cap):
    """The derivative of `cap` where it gave these scores: 1 - tanh^2."""
    tangent = scores / (soft_cap * _LOG2_E)
    return 1.0 - tangent * tangent


@triton.jit(do_not_specialize=("num_rows",))
def _delta_kernel(
    grad,  # [T, Hq, D] contiguous
    out,  # [T, Hq, D] contiguous
    delta,  # float32 [T, Hq]
    num_rows,  # T * Hq
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program r sums grad * out of the rows r * ROWS …"""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (d < HEAD_DIM)[None, :]
    offset = row[:, None] * HEAD_DIM + d[None, :]
    product = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
    product *= tl.load(out + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(product, axis=1), mask=row < num_rows)


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def _query_gradient_kernel(
    grad,  # [T, Hq, D] contiguous
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    lse,  # float32 [T, Hq]
    delta,  # float32 [T, Hq]
    query_start,  # [S + 1]
    grad_q,  # [T, Hq, D] contiguous
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    num_sequences,
    num_heads,
    scale,
    window,
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Program (b, h): the queries of block b, head h."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = sequence_of_block(query_start, num_sequences, block, BLOCK_M)
    begin, end = block_range(query_start, num_sequences, num_tokens, sequence, block, BLOCK_M)
    if begin >= end:
        return
    token = begin + tl.arange(0, BLOCK_M)
    inside = token < end
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    grad_offset = (token.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sequence < num_sequences:
        first = tl.load(query_start + sequence)
        q_tile = _rows_of(q, token, q_row_stride, head * q_head_stride, mask, d)
        grad_tile = tl.load(grad + grad_offset, mask=mask, other=0.0)
        row = token * num_heads + head
        row_lse = tl.load(lse + row, mask=inside, other=0.0) * _LOG2_E
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        kv_head = head // GROUP
        skipped = tl.maximum(begin - window + 1 - first, 0) // BLOCK_N * BLOCK_N
        for start in range(first + skipped, tl.minimum(begin + BLOCK_M, end), BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            key_mask = (key < end)[:, None] & (d < HEAD_DIM)[None, :]
            k_tile = _rows_of(k, key, k_row_stride, kv_head * k_head_stride, key_mask, d)
            v_tile = _rows_of(v, key, v_row_stride, kv_head * v_head_stride, key_mask, d)
            zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = dot(q_tile, tl.trans(k_tile), zeros) * (scale * _LOG2_E)
            if HAS_SOFT_CAP:
                scores = cap(scores, soft_cap)
            visible = (key[None, :] <= token[:, None]) & (key[None, :] > token[:, None] - window) & inside[:, None]
            weights = tl.exp2(tl.where(visible, scores, -float("inf")) - row_lse[:, None])
            grad_weights = dot(grad_tile, tl.trans(v_tile), zeros)
            grad_scores = weights * (grad_weights - row_delta[:, None])
            if HAS_SOFT_CAP:
                grad_scores *= _slope(scores, soft_cap)
            total = dot(round_to(grad_scores, k_tile.dtype), k_tile, total)
    tl.store(grad_q + grad_offset, round_to(total * scale, grad_q.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def _key_value_gradient_kernel(
    grad,  # [T, Hq, D] contiguous
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    lse,  # float32 [T, Hq]
    delta,  # float32 [T, Hq]
    query_start,  # [S + 1]
    grad_k,  # [T, Hkv, D] contiguous
    grad_v,  # [T, Hkv, D] contiguous
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_tokens,
    num_sequences,
    num_heads,
    scale,
    window,
    soft_cap,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Program (b, h): the keys of block b, key-value head h. Tiles are keys by queries: no weights are transposed."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = sequence_of_block(query_start, num_sequences, block, BLOCK_N)
    begin, end = block_range(query_start, num_sequences, num_tokens, sequence, block, BLOCK_N)
    if begin >= end:
        return
    key = begin + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (key < end)[:, None] & (d < HEAD_DIM)[None, :]
    total_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if sequence < num_sequences:
        k_tile = _rows_of(k, key, k_row_stride, kv_head * k_head_stride, mask, d)
        v_tile = _rows_of(v, key, v_row_stride, kv_head * v_head_stride, mask, d)
        # One loop over all heads and their queries, so that loads run ahead from one head to the next.
        blocks_per_head = tl.cdiv(tl.minimum(end - begin, window + BLOCK_N - 1), BLOCK_M)
        for step in range(blocks_per_head * GROUP):
            head = kv_head * GROUP + step // blocks_per_head
            token = begin + (step % blocks_per_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            inside = token < end
            row_mask = inside[:, None] & (d < HEAD_DIM)[None, :]
            q_tile = _rows_of(q, token, q_row_stride, head * q_head_stride, row_mask, d)
            grad_tile = _rows_of(grad, token, num_heads * HEAD_DIM, head * HEAD_DIM, row_mask, d)
            row = token * num_heads + head
            row_lse = tl.load(lse + row, mask=inside, other=0.0) * _LOG2_E
            row_delta = tl.load(delta + row, mask=inside, other=0.0)
            zeros = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            scores = dot(k_tile, tl.trans(q_tile), zeros) * (scale * _LOG2_E)
            if HAS_SOFT_CAP:
                scores = cap(scores, soft_cap)
            visible = (key[:, None] <= token[None, :]) & (key[:, None] > token[None, :] - window) & inside[None, :]
            weights = tl.exp2(tl.where(visible, scores, -float("inf")) - row_lse[None, :])
            total_v = dot(round_to(weights, grad_tile.dtype), grad_tile, total_v)
            grad_weights = dot(v_tile, tl.trans(grad_tile), zeros)
            grad_scores = weights * (grad_weights - row_delta[None, :])
            if HAS_SOFT_CAP:
                grad_scores *= _slope(scores, soft_cap)
            total_k = dot(round_to(grad_scores, q_tile.dtype), q_tile, total_k)
    offset = (key.to(tl.int64) * tl.num_programs(1) + kv_head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(grad_k + offset, round_to(total_k * scale, grad_k.dtype.element_ty), mask=mask)
    tl.store(grad_v + offset, round_to(total_v, grad_v.dtype.element_ty), mask=mask)


def _blocks(head_dim: int, dtype: torch.dtype, capped: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) of the pass over queries and of the pass over keys."""
    block_d = max(16, next_power_of_2(head_dim))
    if dtype is torch.float32:
        small = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
        return small | {"num_warps": 4}, small
    if block_d <= 64:
        return (
            {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
            {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
        )
    if block_d == 128:
        return (
            {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
            {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
        )
    small = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    return small | {"num_warps": 4 if capped else 8}, small  # with a soft cap, 8 warps spill on sm_90


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [T, Hq, D], k and v [T, Hkv, D] (last stride 1) in their dtypes, contiguous.

    grad and out are contiguous [T, Hq, D], lse is float32 [T, Hq], query_start int32 [S + 1]. Tokens after the last
    sequence get zeros. Raises `ValueError` for a head_dim above 256.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_sequences = k.shape[1], query_start.shape[0] - 1
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim={head_dim} is not valid: the Triton attention takes 1 to 256")
    grads = [torch.empty(x.shape, dtype=x.dtype, device=q.device) for x in (q, k, v)]
    if not num_tokens:
        return grads[0], grads[1], grads[2]
    block_d = max(16, next_power_of_2(head_dim))
    delta = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    _delta_kernel[(ceil_div(num_tokens * num_heads, _DELTA_ROWS),)](
        *(grad, out, delta, num_tokens * num_heads),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        ROWS=_DELTA_ROWS,
        num_warps=_DELTA_WARPS,
        **PINNED,
    )
    by_query, by_key = _blocks(head_dim, q.dtype, soft_cap is not None)
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    sizes = (num_tokens, num_sequences, num_heads, scale)
    options = (NO_WINDOW if window is None else window, 0.0 if soft_cap is None else soft_cap)
    shared: dict[str, Any] = {"GROUP": num_heads // num_kv_heads, "HEAD_DIM": head_dim, "BLOCK_D": block_d}
    shared["HAS_SOFT_CAP"] = soft_cap is not None
    _query_gradient_kernel[(num_query_blocks(num_tokens, num_sequences, by_query["BLOCK_M"]), num_heads)](
        *(grad, q, k, v, lse, delta, query_start, grads[0], *strides, *sizes, *options),
        **shared,
        **by_query,
        **PINNED,
    )
    _key_value_gradient_kernel[(num_query_blocks(num_tokens, num_sequences, by_key["BLOCK_N"]), num_kv_heads)](
        *(grad, q, k, v, lse, delta, query_start, grads[1], grads[2], *strides, *sizes, *options),
        **shared,
        **by_key,
        **PINNED,
    )
    return grads[0], grads[1], grads[2]


def _cases_of(dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, capped: bool) -> list[KernelCase]:
    torch_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    by_query, by_key = _blocks(head_dim, torch_type, capped)
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim))}
    pointer = f"*{dtype}"
    label = f"{dtype} heads={num_heads}/{num_kv_heads} D={head_dim}{' soft cap' if capped else ''}"
    strides = [f"{name}_{part}_stride" for name in "qkv" for part in ("row", "head")]
    cases = []
    for name, kernel, outputs, blocks in (
        ("attention_backward dq", _query_gradient_kernel, ("grad_q",), by_query),
        ("attention_backward dk dv", _key_value_gradient_kernel, ("grad_k", "grad_v"), by_key),
    ):
        constants = {**shape, "GROUP": num_heads // num_kv_heads, "HAS_SOFT_CAP": capped}
        constants |= {size: blocks[size] for size in ("BLOCK_M", "BLOCK_N")}
        signature = {
            "grad": pointer,
            "q": pointer,
            "k": pointer,
            "v": pointer,
            "lse": "*fp32",
            "delta": "*fp32",
            "query_start": "*i32",
            **dict.fromkeys(outputs, pointer),
            **dict.fromkeys((*strides, *_SIZES), "i32"),
            "scale": "fp32",
            "window": "i32",
            "soft_cap": "fp32",
            **dict.fromkeys(("GROUP", "HEAD_DIM", "BLOCK_D", "BLOCK_M", "BLOCK_N", "HAS_SOFT_CAP"), "constexpr"),
        }
        cases.append(
            KernelCase(
                name=f"{name} {label}",
                kernel=kernel,
                signature=signature,
                constants=constants,
                num_warps=blocks["num_warps"],
                num_stages=blocks["num_stages"],
                tensor_cores=dtype != "fp32",
                divisible_by_16=("grad", "q", "k", "v", *outputs, *strides),
            )
        )
    return cases


def ahead_of_time_cases() -> list[KernelCase]:
    """SmolLM2-135M (9/3 heads, D 64), Llamas of 1B and 8B (32/8, D 64 and 128), other head sizes, soft caps."""
    delta_constants = {"HEAD_DIM": 64, "BLOCK_D": 64, "ROWS": _DELTA_ROWS}
    delta = KernelCase(
        name="attention_backward delta bf16 D=64",
        kernel=_delta_kernel,
        signature={
            "grad": "*bf16",
            "out": "*bf16",
            "delta": "*fp32",
            "num_rows": "i32",
            **dict.fromkeys(delta_constants, "constexpr"),
        },
        constants=delta_constants,
        num_warps=_DELTA_WARPS,
        num_stages=3,
        divisible_by_16=("grad", "out", "delta"),
    )
    sizes = [("bf16", 9, 3, 64, False), ("bf16", 32, 8, 64, False), ("bf16", 32, 8, 128, False)]
    sizes += [("fp16", 32, 8, 128, False), ("bf16", 32, 32, 80, False), ("bf16", 32, 16, 128, True)]
    sizes += [("bf16", 8, 4, 256, False), ("bf16", 8, 4, 256, True), ("fp32", 9, 3, 64, False)]
    return [delta, *(case for size in sizes for case in _cases_of(*size))]
