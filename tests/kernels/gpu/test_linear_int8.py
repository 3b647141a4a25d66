"""The Triton `quantize_weight` and `linear_int8`: the reference's packed bits, float64 products, row invariance."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels import Int8Weight, int8_weight_shapes, reference
from rollout_kernels.gpu.linear_int8 import linear_int8, quantize_weight
from tests.kernels.test_linear_int8 import oracle, outlying
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart
from tests.support.triton_kernels import DTYPES, TOLERANCE, poisoned_memory


def packed_by(quantize, weight: torch.Tensor) -> Int8Weight:
    values, scales = int8_weight_shapes(*weight.shape)
    dirty = Int8Weight(torch.full(values, 77, dtype=torch.uint8), torch.full(scales, torch.nan), weight.shape[1])
    quantize(rows_apart(weight), dirty)
    return dirty


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (7, 13), (33, 257)])
def test_packed_weights_have_the_references_bits(dtype: torch.dtype, columns: int, depth: int) -> None:
    weight = outlying(columns, depth, dtype, 6)
    if columns > 8:
        weight[3, 5], weight[4, 200], weight[5] = torch.nan, torch.inf, 0.0
        weight[6] = 1e-38 if dtype is torch.float32 else 0.0  # too small to count
    expected = packed_by(reference.quantize_weight, weight)
    actual = packed_by(quantize_weight, weight)
    assert_same_bits(actual.values, expected.values)
    assert torch.equal(actual.scales.isnan(), expected.scales.isnan())
    assert_same_bits(actual.scales.nan_to_num(), expected.scales.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (3, 7, 13), (65, 67, 63), (2, 17, 576), (0, 4, 8)])
def test_product_equals_float64_product_of_the_rounded_numbers(
    dtype: torch.dtype, rows: int, columns: int, depth: int
) -> None:
    x, weight = outlying(rows, depth, dtype, 1), outlying(columns, depth, dtype, 2)
    bias = randn(columns, dtype=dtype, seed=3)
    packed = packed_by(quantize_weight, weight)
    for out_dtype, added in ((dtype, bias), (torch.float32, None)):
        with poisoned_memory():
            out = linear_int8(rows_apart(x) if rows else x, packed, added, out_dtype)
        assert out.dtype == out_dtype
        expected = oracle(x, weight) + (0 if added is None else added.double())
        assert_close(out, expected, TOLERANCE[out_dtype] + 4e-6)


def test_a_row_depends_on_nothing_beside_it() -> None:
    x, weight = outlying(70, 100, torch.bfloat16, 4), outlying(40, 100, torch.bfloat16, 5)
    packed = packed_by(quantize_weight, weight)
    whole = linear_int8(x, packed, None, torch.float32)
    for row in (0, 17, 63, 64, 69):
        assert_same_bits(linear_int8(x[row : row + 1], packed, None, torch.float32), whole[row : row + 1])
    assert_same_bits(linear_int8(x[-66:], packed, None, torch.float32), whole[-66:])
    x[3, 99], x[66, 0] = torch.nan, torch.inf
    out = linear_int8(x, packed, None, torch.float32)
    kept = [row for row in range(70) if row not in (3, 66)]
    assert_same_bits(out[kept], whole[kept])
    assert out[[3, 66]].isnan().all()
