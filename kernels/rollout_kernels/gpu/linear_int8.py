"""Weights in int8, and out = x @ weight^T + bias with int8 products on the tensor cores.

Weights have one scale a row, activations one for 32 neighbours of a row (`rollout_kernels.int8`), which a kernel of its
own rounds first. The products of such a group are summed as integers, which are exact in any order; the groups follow
one another in ascending order, in one float32 accumulator, with explicit multiply-adds. So a number has the same bits
in any company, as in `linear`, whose persistent loop over tiles this is.

The packed weight has 4 neighbours along K of 16 columns side by side: 32 threads read 128 bytes in a row, 4 each.
"""

# Triton's compiler gives launch options (num_warps, ...) and values in kernels types that its annotations do not tell.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout_kernels.gpu.aot import PINNED, KernelCase
from rollout_kernels.gpu.interpreter import is_interpreted
from rollout_kernels.gpu.linear import POINTERS, ROWS_IN_CACHE, num_multiprocessors
from rollout_kernels.gpu.numerics import round_to, row_stride
from rollout_kernels.gpu.quantised import round_to_integer
from rollout_kernels.gpu.sizes import ceil_div
from rollout_kernels.int8 import GROUP, PANEL, Int8Weight

_GROUP = tl.constexpr(GROUP)
_PANEL = tl.constexpr(PANEL)
_SMALLEST = tl.constexpr(2.0**-100)  # what is below counts as zero
_DEPTH = 128  # of a weight's row, rounded at a time
_GROUPS = 16  # of a row of activations, rounded by a program
_ROWS = 64  # of a tile, and its columns: as `linear` has them
_COLUMNS = 64
_NUM_WARPS = 4
_NUM_STAGES = 4
_BLOCKS = 4  # on a multiprocessor at a time


@triton.jit
def _scale(largest, finite):
    """(what multiplies values to whole numbers within +-127, what multiplies these back) for largest magnitudes."""
    used = largest >= _SMALLEST
    whole = tl.full(largest.shape, 127.0, tl.float32)
    inverse = tl.where(used & finite, tl.div_rn(whole, tl.where(used, largest, 1.0)), 0.0)
    scale = tl.where(used, tl.div_rn(largest, whole), 0.0)
    return inverse, tl.where(finite, scale, float("nan"))


@triton.jit
def _whole(x, inverse):
    """x * inverse, rounded to whole numbers; zeros where the inverse is. The multiplication is rounded by itself: fused
    with the rounding's addition it could go the other way."""
    inverse = tl.broadcast_to(inverse, x.shape)
    scaled = tl.fma(x, inverse, tl.zeros(x.shape, tl.float32))
    return tl.where(inverse == 0.0, 0.0, round_to_integer(scaled))


@triton.jit
def _largest(x, axis: tl.constexpr):
    """(largest magnitude, whether all are finite): a NaN, which the maximum may pass over, is not."""
    return tl.max(tl.abs(x), axis=axis), tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, axis=axis) == 0


@triton.jit
def _quantize_weight_kernel(
    weight,  # [N, K]
    values,  # uint8 [panels, steps, 16, 4]
    scales,  # float32 [N]
    num_rows,
    depth,
    steps,
    weight_stride,
    DEPTH: tl.constexpr,
):
    """Program p rounds the rows of panel p: two walks over them, the first for the scales."""
    panel = tl.program_id(0)
    row = panel * _PANEL + tl.arange(0, _PANEL)
    inside = row < num_rows
    line = weight + row.to(tl.int64)[:, None] * weight_stride
    k = tl.arange(0, DEPTH)
    largest = tl.zeros([_PANEL], tl.float32)
    finite = tl.full([_PANEL], 1, tl.int1)
    for start in range(0, depth, DEPTH):
        mask = inside[:, None] & (start + k < depth)[None, :]
        part, part_is_finite = _largest(tl.load(line + start + k[None, :], mask=mask, other=0.0).to(tl.float32), 1)
        largest = tl.maximum(largest, part)
        finite = finite & part_is_finite
    inverse, scale = _scale(largest, finite)
    tl.store(scales + row, scale, mask=inside)
    for start in range(0, steps * 4, DEPTH):
        place = start + k
        mask = inside[:, None] & (place < depth)[None, :]
        x = tl.load(line + place[None, :], mask=mask, other=0.0).to(tl.float32)
        packed = (_whole(x, inverse[:, None]) + 128.0).to(tl.uint8)
        step = panel.to(tl.int64) * steps + place // 4
        offset = (step[None, :] * _PANEL + tl.arange(0, _PANEL)[:, None]) * 4 + (place % 4)[None, :]
        tl.store(values + offset, packed, mask=tl.broadcast_to((place < steps * 4)[None, :], offset.shape))


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_rows_kernel(
    x,  # [T, K]
    values,  # int8 [T, groups * 32]
    scales,  # float32 [T, groups]
    num_rows,
    depth,
    groups,
    x_stride,
    GROUPS: tl.constexpr,
):
    """Program (t, p) rounds groups p * GROUPS … of row t."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    part = tl.load(x + row * x_stride + place, mask=place < depth, other=0.0).to(tl.float32)
    largest, finite = _largest(part, 1)
    inverse, scale = _scale(largest, finite)
    inside = group < groups
    whole = _whole(part, inverse[:, None]).to(tl.int8)
    tl.store(values + row * groups * _GROUP + place, whole, mask=tl.broadcast_to(inside[:, None], place.shape))
    tl.store(scales + row * groups + group, scale, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_int8_kernel(
    x,  # int8 [T, groups * 32]
    x_scales,  # float32 [T, groups]
    weight,  # uint8 [panels, groups * 8, 16, 4]
    scales,  # float32 [N]
    bias,  # [N], read where HAS_BIAS
    out,  # [T, N], contiguous
    num_rows,
    num_columns,
    groups,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IN_CACHE: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    tiles_in_group = IN_CACHE * column_tiles
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        first_row_tile = tile // tiles_in_group * IN_CACHE
        group_rows = tl.minimum(row_tiles - first_row_tile, IN_CACHE)
        row_tile = first_row_tile + tile % tiles_in_group % group_rows
        column_tile = tile % tiles_in_group // group_rows

        rows = row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        steps = tl.arange(0, _GROUP)
        row_there, column_there = rows < num_rows, columns < num_columns
        x_tile = x + rows.to(tl.int64)[:, None] * (groups * _GROUP) + steps[None, :]
        scale_tile = x_scales + rows.to(tl.int64) * groups
        panel = (columns // _PANEL).to(tl.int64) * (groups * (_GROUP // 4) * _PANEL * 4)
        weight_tile = (
            weight + (panel + columns % _PANEL * 4)[None, :] + (steps // 4 * (_PANEL * 4) + steps % 4)[:, None]
        )
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for group in range(groups):
            a = tl.load(x_tile + group * _GROUP, mask=row_there[:, None], other=0)
            packed = tl.load(weight_tile + group * (_GROUP * _PANEL), mask=column_there[None, :], other=128)
            b = (packed ^ 128).to(tl.int8, bitcast=True)  # value + 128 as a byte: the highest bit turned over
            sums = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
            scale = tl.load(scale_tile + group, mask=row_there, other=0.0)
            total = tl.fma(sums, tl.broadcast_to(scale[:, None], sums.shape), total)
        total *= tl.load(scales + columns, mask=column_there, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=column_there, other=0.0).to(tl.float32)[None, :]
        out_tile = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(out_tile, round_to(total, out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def quantize_weight(weight: torch.Tensor, into: Int8Weight) -> None:
    """weight [N, K], its rows possibly apart, into the packed form."""
    rows, depth = weight.shape
    panels, steps = into.values.shape[:2]
    if not panels:
        return
    _quantize_weight_kernel[(panels,)](
        *(weight, into.values, into.scales, rows, depth, steps, row_stride(weight)),
        DEPTH=_DEPTH,
        num_warps=_NUM_WARPS,
        **PINNED,
    )


def linear_int8(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] (rows possibly apart) times the packed weight [N, K], (+ bias [N]) -> [T, N] in `out_dtype`."""
    (rows, depth), columns = x.shape, weight.scales.shape[0]
    groups = weight.values.shape[1] * 4 // GROUP
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    values = torch.empty((rows, groups * GROUP), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    _quantise_rows_kernel[(rows, ceil_div(groups, _GROUPS))](
        *(x, values, scales, rows, depth, groups, row_stride(x)),
        GROUPS=_GROUPS,
        num_warps=_NUM_WARPS,
        **PINNED,
    )
    count = ceil_div(rows, _ROWS) * ceil_div(columns, _COLUMNS)
    resident = 2 if is_interpreted() else _BLOCKS * num_multiprocessors(x.device)
    _linear_int8_kernel[(min(count, resident),)](
        *(values, scales, weight.values, weight.scales, scales if bias is None else bias, out, rows, columns, groups),
        HAS_BIAS=bias is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        IN_CACHE=ROWS_IN_CACHE,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        **PINNED,
    )
    return out


def _product_case(columns: int, depth: int, out: str, name: str, with_bias: bool = False) -> KernelCase:
    return KernelCase(
        name=f"linear_int8 -> {out} N={columns} K={depth}{' bias' if with_bias else ''} ({name})",
        kernel=_linear_int8_kernel,
        signature={
            "x": "*i8",
            "x_scales": "*fp32",
            "weight": "*u8",
            "scales": "*fp32",
            "bias": f"*{out}" if with_bias else "*fp32",
            "out": f"*{out}",
            **dict.fromkeys(("num_rows", "num_columns", "groups"), "i32"),
            **dict.fromkeys(("HAS_BIAS", "ROWS", "COLUMNS", "IN_CACHE"), "constexpr"),
        },
        constants={"HAS_BIAS": with_bias, "ROWS": _ROWS, "COLUMNS": _COLUMNS, "IN_CACHE": ROWS_IN_CACHE},
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        tensor_cores=True,
        divisible_by_16=("x", "x_scales", "weight", "scales", "bias", "out", "num_columns"),
    )


def _rounding_cases(dtype: torch.dtype) -> list[KernelCase]:
    pointer = POINTERS[dtype]
    weight = KernelCase(
        name=f"quantize_weight {pointer[1:]}",
        kernel=_quantize_weight_kernel,
        signature={
            "weight": pointer,
            "values": "*u8",
            "scales": "*fp32",
            **dict.fromkeys(("num_rows", "depth", "steps", "weight_stride"), "i32"),
            "DEPTH": "constexpr",
        },
        constants={"DEPTH": _DEPTH},
        num_warps=_NUM_WARPS,
        num_stages=3,
        divisible_by_16=("weight", "values", "scales", "num_rows", "depth", "steps", "weight_stride"),
    )
    rows = KernelCase(
        name=f"linear_int8, rows of {pointer[1:]} rounded",
        kernel=_quantise_rows_kernel,
        signature={
            "x": pointer,
            "values": "*i8",
            "scales": "*fp32",
            **dict.fromkeys(("num_rows", "depth", "groups", "x_stride"), "i32"),
            "GROUPS": "constexpr",
        },
        constants={"GROUPS": _GROUPS},
        num_warps=_NUM_WARPS,
        num_stages=3,
        divisible_by_16=("x", "values", "scales", "depth", "x_stride"),
    )
    return [weight, rows]


def ahead_of_time_cases() -> list[KernelCase]:
    """SmolLM2-135M and Llama 8B; what is rounded in every dtype of a model."""
    return [
        _product_case(960, 576, "bf16", "SmolLM2-135M qkv"),
        _product_case(49152, 576, "fp32", "SmolLM2-135M logits"),
        _product_case(6144, 4096, "bf16", "Llama-8B qkv", with_bias=True),
        _product_case(28672, 4096, "fp16", "Llama-8B gate and up"),
        *(case for dtype in POINTERS for case in _rounding_cases(dtype)),
    ]
