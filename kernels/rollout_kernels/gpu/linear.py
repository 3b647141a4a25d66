"""out = x @ weight^T + bias: a persistent matrix product in which every number has the same bits in any company.

A dot product runs over K in steps of one depth, in order, in one float32 accumulator; K is never split over blocks.
Which matrix instruction the compiler takes follows from the shape of a tile, and nobody promises that two instructions
add up in the same order. So all tiles of a dtype are made of one: `wgmma` of 64 x 64 on sm_90, `mma.sync` of 16 x 8 on
sm_80 (`test_linear_instructions.py` looks at the compiled kernels). The tile is 64 rows high whatever the number of
rows, and 64 or 128 columns wide, with one group of four warps for each 64. Hence a row does not depend on the batch,
nor a column on the weights that were merged beside it.

One height serves decode and prefill. With few rows the product is bound by reading the weight: an H100 moves 3.35 TB/s,
and 64 rows ask of it 64 multiply-adds for each weight of two bytes, 214 TFLOP/s of its 989; an A100 at 2.0 TB/s, 131 of
its 312. So a step of 1 to 64 sequences should take the time of reading the weight, as with tiles of 16 rows; rows that
are not there cost no traffic, since their loads are masked. The price is paid with many rows: 64 x 128 tiles do 43
operations for each byte from the L2 cache, where 128 x 128 would do 64.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.interpreter import is_interpreted
from rollout_kernels.gpu.numerics import dot, round_to, row_stride
from rollout_kernels.gpu.sizes import ceil_div

ROWS_IN_CACHE = 8  # tiles of rows that share the weights of a tile of columns while these are in the L2 cache


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the product of a weight [N, K] is cut up: tiles of `rows` x `columns`, `depth` of K at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    blocks: int  # on a multiprocessor at a time, as their shared memory allows


@functools.cache
def tiles_for(columns: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a weight [columns, K]: narrow ones where wide ones would leave most of the device idle.

    An H100 has 132 multiprocessors; a weight of 4,096 rows makes 64 narrow tiles for a batch of up to 64.
    """
    if dtype is torch.float32:  # no tensor cores: these round to 10 bits
        return Tiles(rows=64, columns=64, depth=16, num_warps=8, num_stages=3, blocks=2)
    if columns >= 6144:
        return Tiles(rows=64, columns=128, depth=64, num_warps=8, num_stages=3, blocks=2)
    return Tiles(rows=64, columns=64, depth=64, num_warps=4, num_stages=5, blocks=2)


# Nothing is compiled for a certain number of rows, so that every number of rows runs the same instructions.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N], read where HAS_BIAS
    out,  # [T, N], contiguous
    num_rows,
    num_columns,
    depth,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    tiles_in_group = GROUP * column_tiles
    # Flattened with the loop over K, so that a tile's first loads run while the tile before it is stored.
    num_tiles = row_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        first_row_tile = tile // tiles_in_group * GROUP
        group_rows = tl.minimum(row_tiles - first_row_tile, GROUP)
        row_tile = first_row_tile + tile % tiles_in_group % group_rows
        column_tile = tile % tiles_in_group // group_rows

        rows = row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        steps = tl.arange(0, DEPTH)
        x_tile = x + rows.to(tl.int64)[:, None] * x_stride + steps[None, :]
        weight_tile = weight + columns.to(tl.int64)[None, :] * weight_stride + steps[:, None]
        row_there = (rows < num_rows)[:, None]
        column_there = (columns < num_columns)[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            left = depth - start
            a = tl.load(x_tile + start, mask=row_there & (steps < left)[None, :], other=0.0)
            b = tl.load(weight_tile + start, mask=column_there & (steps < left)[:, None], other=0.0)
            total = dot(a, b, total)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
        out_tile = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(out_tile, round_to(total, out.dtype.element_ty), mask=row_there & column_there)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] @ weight [N, K]^T (+ bias [N]) -> [T, N] in `out_dtype`; rows of x and of the weight may be apart."""
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles = tiles_for(num_columns, x.dtype)
    count = ceil_div(num_rows, tiles.rows) * ceil_div(num_columns, tiles.columns)
    resident = 2 if is_interpreted() else tiles.blocks * num_multiprocessors(x.device)
    _linear_kernel[(min(count, resident),)](
        *(x, weight, x if bias is None else bias, out, num_rows, num_columns, depth),
        *(row_stride(x), row_stride(weight)),
        HAS_BIAS=bias is not None,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        GROUP=ROWS_IN_CACHE,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **PINNED,
    )
    return out


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def _case(
    columns: int, depth: int, dtype: torch.dtype, out_dtype: torch.dtype, name: str, with_bias: bool = False
) -> KernelCase:
    tiles = tiles_for(columns, dtype)
    pointer, out = POINTERS[dtype], POINTERS[out_dtype]
    return KernelCase(
        name=f"linear {pointer[1:]} -> {out[1:]} N={columns} K={depth}{' bias' if with_bias else ''} ({name})",
        kernel=_linear_kernel,
        signature={
            **dict.fromkeys(("x", "weight", "bias"), pointer),
            "out": out,
            **dict.fromkeys(("num_rows", "num_columns", "depth", "x_stride", "weight_stride"), "i32"),
            **dict.fromkeys(("HAS_BIAS", "ROWS", "COLUMNS", "DEPTH", "GROUP"), "constexpr"),
        },
        constants={
            "HAS_BIAS": with_bias,
            "ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
            "DEPTH": tiles.depth,
            "GROUP": ROWS_IN_CACHE,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        tensor_cores=dtype is not torch.float32,
        divisible_by_16=("x", "weight", "bias", "out", "num_columns", "depth", "x_stride", "weight_stride"),
    )


def ahead_of_time_cases() -> list[KernelCase]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return [
        _case(960, 576, bf16, bf16, "SmolLM2-135M qkv"),
        _case(3072, 576, bf16, bf16, "SmolLM2-135M gate and up"),
        _case(49152, 576, bf16, fp32, "SmolLM2-135M logits"),
        _case(576, 1536, fp16, fp16, "SmolLM2-135M down"),
        _case(2048, 8192, bf16, bf16, "Llama-1B down"),
        _case(4096, 4096, bf16, bf16, "Llama-8B output"),
        _case(6144, 4096, bf16, bf16, "Llama-8B qkv", with_bias=True),
        _case(28672, 4096, bf16, bf16, "Llama-8B gate and up"),
        _case(28672, 4096, fp16, fp16, "Llama-8B gate and up"),
        _case(128256, 4096, bf16, fp32, "Llama-8B logits"),
        _case(960, 576, fp32, fp32, "SmolLM2-135M qkv"),
    ]
