"""Low-rank adapters (Hu et al., 2021, "LoRA"), each token with its own, gathered on the device.

A program takes 16 tokens and walks over the adapters that are among them: for each it multiplies all 16, which is what
a matrix instruction takes, and keeps the rows of the tokens that have this adapter. So a row's bits are those of one
product over K (or R) in one order, whatever adapters its neighbours have. Where there are few tokens, the adapters of
a tile are shared out to up to 16 programs, so that a step of 16 sequences with 16 adapters reads them side by side.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.numerics import dot, round_to, row_stride
from rollout_kernels.gpu.sizes import ceil_div, next_power_of_2

_ROWS = 16
_MAX_RANKS = 64  # columns of a shrinking tile; more go to further tiles
_EXPAND_STEP = 16  # along R
_FEW_TILES = 16  # up to here, every token of a tile may have a program of its own
_NUM_WARPS = 4


@triton.jit
def _ranked_adapters(adapter_ids, num_tokens, num_adapters, ROWS: tl.constexpr):
    """(ids [ROWS], ranks [ROWS]): the first token of each adapter in the tile gets its number, other tokens ROWS.

    An id of no adapter, which only the device knows of, counts as -1.
    """
    lanes = tl.arange(0, ROWS)
    tokens = tl.program_id(0) * ROWS + lanes
    ids = tl.load(adapter_ids + tokens, mask=tokens < num_tokens, other=-1)
    ids = tl.where((ids >= 0) & (ids < num_adapters), ids, -1)
    earlier = (ids[:, None] == ids[None, :]) & (lanes[None, :] < lanes[:, None])
    first = (ids >= 0) & (tl.sum(earlier.to(tl.int32), axis=1) == 0)
    ranks = tl.cumsum(first.to(tl.int32), axis=0) - 1
    return ids, tl.where(first, ranks, ROWS)


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_shrink_kernel(
    x,  # [T, K]
    a,  # [A, R, K], contiguous
    adapter_ids,  # [T] int32
    out,  # [T, R] float32, contiguous, zeros where no adapter is
    x_stride,
    num_tokens,
    num_adapters,
    rank,
    depth,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Program (t, r, j) computes RANKS columns of a tile of tokens, for adapters j, j + the number of j, ... of it."""
    ids, numbers = _ranked_adapters(adapter_ids, num_tokens, num_adapters, ROWS)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)[None, :]
    steps = tl.arange(0, DEPTH)
    count = tl.sum((numbers < ROWS).to(tl.int32), axis=0)
    for number in tl.range(tl.program_id(2), count, tl.num_programs(2)):
        adapter = tl.sum(tl.where(numbers == number, ids, 0), axis=0)
        mine = (ids == adapter)[:, None]
        matrix = a + adapter.to(tl.int64) * rank * depth
        total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            left = depth - start
            x_tile = tl.load(
                x + rows * x_stride + start + steps[None, :], mask=mine & (steps < left)[None, :], other=0.0
            )
            a_tile = tl.load(
                matrix + ranks * depth + start + steps[:, None],
                mask=(ranks < rank) & (steps < left)[:, None],
                other=0.0,
            )
            total = dot(x_tile, a_tile, total)
        tl.store(out + rows * rank + ranks, total, mask=mine & (ranks < rank))
    if tl.program_id(2) == 0:
        none = (ids < 0)[:, None] & (rows < num_tokens)
        tl.store(out + rows * rank + ranks, tl.zeros((ROWS, RANKS), dtype=tl.float32), mask=none & (ranks < rank))


@triton.jit(do_not_specialize=["num_tokens"])
def _lora_expand_kernel(
    y,  # [T, R] float32, contiguous
    b,  # [A, N, R], contiguous
    adapter_ids,  # [T] int32
    out,  # [T, N], added to
    scales,  # [A] float32
    out_stride,
    num_tokens,
    num_adapters,
    rank,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (t, n, j) adds to COLUMNS columns of a tile of tokens, for adapters j, j + the number of j, ... of it."""
    ids, numbers = _ranked_adapters(adapter_ids, num_tokens, num_adapters, ROWS)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    ranks = tl.arange(0, RANKS)
    count = tl.sum((numbers < ROWS).to(tl.int32), axis=0)
    for number in tl.range(tl.program_id(2), count, tl.num_programs(2)):
        adapter = tl.sum(tl.where(numbers == number, ids, 0), axis=0)
        mine = (ids == adapter)[:, None]
        matrix = b + adapter.to(tl.int64) * num_columns * rank
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, rank, RANKS):
            left = rank - start
            y_tile = tl.load(y + rows * rank + start + ranks[None, :], mask=mine & (ranks < left)[None, :], other=0.0)
            b_tile = tl.load(
                matrix + columns * rank + start + ranks[:, None],
                mask=(columns < num_columns) & (ranks < left)[:, None],
                other=0.0,
            )
            total = dot(y_tile, b_tile.to(tl.float32), total, PRECISION)
        at = out + rows * out_stride + columns
        mask = mine & (columns < num_columns)
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32) + total * tl.load(scales + adapter)
        tl.store(at, round_to(value, out.dtype.element_ty), mask=mask)


def _shrink_tile(rank: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(columns of a tile, step along K, stages): far ahead, since it may be that one program alone reads an adapter."""
    columns = min(max(next_power_of_2(rank), 16), _MAX_RANKS)
    if dtype is torch.float32:
        return columns, 64, 3
    return columns, 256 if columns == 16 else 128, 4


def _expand_columns(dtype: torch.dtype) -> int:
    return 64 if dtype is torch.float32 else 128


def _precision(dtype: torch.dtype) -> str:
    """How an expansion multiplies its float32 y: bfloat16 and float16 are exact in tf32, and y in three parts of it."""
    return "ieee" if dtype is torch.float32 else "tf32x3"


def _sharers(tiles: int) -> int:
    """Programs that share out the adapters of a tile of tokens. It changes who computes a row, never how."""
    return _ROWS if tiles <= _FEW_TILES else 1


def lora_shrink(x: torch.Tensor, a: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
    """x [T, K] @ a[adapter_ids[t]]^T for a [A, R, K] -> float32 [T, R]; zeros where `adapter_ids` int32 [T] has -1.

    The device alone knows the ids: one of no adapter counts as -1.
    """
    num_tokens, depth = x.shape
    num_adapters, rank = a.shape[:2]
    out = torch.empty((num_tokens, rank), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    ranks, step, num_stages = _shrink_tile(rank, x.dtype)
    tiles = ceil_div(num_tokens, _ROWS)
    _lora_shrink_kernel[(tiles, ceil_div(rank, ranks), _sharers(tiles))](
        *(x, a, adapter_ids, out, row_stride(x), num_tokens, num_adapters, rank, depth),
        ROWS=_ROWS,
        RANKS=ranks,
        DEPTH=step,
        num_warps=_NUM_WARPS,
        num_stages=num_stages,
        **PINNED,
    )
    return out


def lora_expand(
    y: torch.Tensor, b: torch.Tensor, adapter_ids: torch.Tensor, out: torch.Tensor, scales: torch.Tensor
) -> None:
    """out [T, N] += scales[adapter_ids[t]] * y [T, R] @ b[adapter_ids[t]]^T for b [A, N, R], in place; ids as above."""
    num_tokens, rank = y.shape
    num_adapters, num_columns = b.shape[:2]
    if out.numel() == 0 or rank == 0:
        return
    tiles, columns = ceil_div(num_tokens, _ROWS), _expand_columns(b.dtype)
    _lora_expand_kernel[(tiles, ceil_div(num_columns, columns), _sharers(tiles))](
        *(y, b, adapter_ids, out, scales, row_stride(out), num_tokens, num_adapters, rank, num_columns),
        ROWS=_ROWS,
        COLUMNS=columns,
        RANKS=_EXPAND_STEP,
        PRECISION=_precision(b.dtype),
        num_warps=_NUM_WARPS,
        num_stages=2,
        **PINNED,
    )


_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def _cases(dtype: torch.dtype, rank: int) -> list[KernelCase]:
    pointer, (ranks, step, num_stages) = _POINTERS[dtype], _shrink_tile(rank, dtype)
    aligned = ("rank",) if rank % 16 == 0 else ()
    shrink = KernelCase(
        name=f"lora_shrink {pointer[1:]} R={rank}",
        kernel=_lora_shrink_kernel,
        signature={
            **dict.fromkeys(("x", "a"), pointer),
            "adapter_ids": "*i32",
            "out": "*fp32",
            **dict.fromkeys(("x_stride", "num_tokens", "num_adapters", "rank", "depth"), "i32"),
            **dict.fromkeys(("ROWS", "RANKS", "DEPTH"), "constexpr"),
        },
        constants={"ROWS": _ROWS, "RANKS": ranks, "DEPTH": step},
        num_warps=_NUM_WARPS,
        num_stages=num_stages,
        tensor_cores=dtype is not torch.float32,
        divisible_by_16=("x", "a", "adapter_ids", "out", "x_stride", "depth", *aligned),
    )
    expand = KernelCase(
        name=f"lora_expand {pointer[1:]} R={rank}",
        kernel=_lora_expand_kernel,
        signature={
            "y": "*fp32",
            "b": pointer,
            "adapter_ids": "*i32",
            "out": pointer,
            "scales": "*fp32",
            **dict.fromkeys(("out_stride", "num_tokens", "num_adapters", "rank", "num_columns"), "i32"),
            **dict.fromkeys(("ROWS", "COLUMNS", "RANKS", "PRECISION"), "constexpr"),
        },
        constants={
            "ROWS": _ROWS,
            "COLUMNS": _expand_columns(dtype),
            "RANKS": _EXPAND_STEP,
            "PRECISION": _precision(dtype),
        },
        num_warps=_NUM_WARPS,
        num_stages=2,
        tensor_cores=dtype is not torch.float32,
        divisible_by_16=("y", "b", "adapter_ids", "out", "scales", "out_stride", "num_columns", *aligned),
    )
    return [shrink, expand]


def ahead_of_time_cases() -> list[KernelCase]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [*_cases(bf16, 8), *_cases(bf16, 64), *_cases(bf16, 256), *_cases(fp16, 16), *_cases(fp32, 16)]
