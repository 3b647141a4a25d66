"""The Triton `linear` against float64, and its row invariance."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels.gpu.linear import linear, tiles_for
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart
from tests.support.triton_kernels import DTYPES, TOLERANCE, poisoned_memory

# Odd everything, several tiles of rows and columns, and each width of tile.
SHAPES = [(1, 1, 1), (3, 7, 13), (65, 33, 63), (2, 64, 576), (130, 70, 257), (0, 4, 8), (3, 6150, 9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_linear_equals_float64_product(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    x, weight = randn(rows, depth, dtype=dtype, seed=1), randn(columns, depth, dtype=dtype, seed=2)
    bias = randn(columns, dtype=dtype, seed=3)
    for out_dtype in {dtype, torch.float32}:
        for added in (None, bias):
            expected = x.double() @ weight.double().T + (0 if added is None else added.double())
            with poisoned_memory():
                out = linear(x, weight, added, out_dtype)
            assert out.dtype == out_dtype
            assert_close(out, expected, TOLERANCE[out_dtype] + 4e-6)


def test_wide_tiles_serve_a_vocabulary() -> None:
    x, weight = randn(66, 9, dtype=torch.bfloat16, seed=1), randn(6500, 9, dtype=torch.bfloat16, seed=2)
    assert tiles_for(6500, torch.bfloat16).columns == 128
    with poisoned_memory():
        out = linear(x, weight, None, torch.float32)
    assert_close(out, x.double() @ weight.double().T, 4e-6)
    assert_same_bits(linear(x[65:], weight, None, torch.float32), out[65:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_does_not_depend_on_the_columns_beside_it(dtype: torch.dtype) -> None:
    """So that q, k and v have the same bits as one product or as three."""
    x, weight = randn(7, 100, dtype=dtype, seed=6), randn(150, 100, dtype=dtype, seed=7)
    whole = linear(x, weight, None, torch.float32)
    for first, end in [(0, 1), (3, 70), (64, 128), (149, 150)]:
        assert_same_bits(linear(x, weight[first:end], None, torch.float32), whole[:, first:end].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_rows_apart(dtype: torch.dtype) -> None:
    x, weight = randn(6, 45, dtype=dtype, seed=1), randn(10, 45, dtype=dtype, seed=2)
    assert_same_bits(linear(rows_apart(x), rows_apart(weight, 3), None, dtype), linear(x, weight, None, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(33, 63), (64, 320)])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype, columns: int, depth: int) -> None:
    rows = 140
    x, weight = randn(rows, depth, dtype=dtype, seed=4), randn(columns, depth, dtype=dtype, seed=5)
    whole = linear(x, weight, None, torch.float32)
    for row in (0, 17, 63, 64, 139):
        assert_same_bits(linear(x[row : row + 1], weight, None, torch.float32), whole[row : row + 1])
    for size in (2, 63, 64, 65, 129):
        assert_same_bits(linear(x[-size:], weight, None, torch.float32), whole[-size:])


def test_a_row_does_not_see_bad_numbers_beside_it() -> None:
    x, weight = randn(70, 50, dtype=torch.bfloat16, seed=6), randn(40, 50, dtype=torch.bfloat16, seed=7)
    expected = linear(x, weight, None, torch.float32)
    x[3], x[66] = torch.nan, torch.nan
    out = linear(x, weight, None, torch.float32)
    kept = [row for row in range(70) if row not in (3, 66)]
    assert_same_bits(out[kept], expected[kept])
    assert out[[3, 66]].isnan().all()
