"""`linear` against float64, and its row invariance."""

import pytest
import torch

import rollout_kernels as rk
from tests.support.kernels import (
    BACKENDS,
    DTYPES,
    TOLERANCE,
    assert_close,
    assert_same_bits,
    num_threads,
    randn,
    rows_apart,
)

SHAPES = [(1, 1, 1), (3, 7, 13), (5, 131, 63), (17, 33, 80), (2, 64, 576), (9, 17, 257), (0, 4, 8), (70, 19, 96)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_linear_equals_float64_product(backend: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    x = randn(rows, depth, dtype=dtype, seed=1)
    weight = randn(columns, depth, dtype=dtype, seed=2)
    bias = randn(columns, dtype=dtype, seed=3)
    for out_dtype in {dtype, torch.float32}:
        for added in (None, bias):
            expected = x.double() @ weight.double().T + (0 if added is None else added.double())
            with rk.use_backend(backend):
                out = rk.linear(x, weight, added, out_dtype=out_dtype)
            assert out.dtype == out_dtype
            assert_close(out, expected, max(TOLERANCE[out_dtype], 1e-5 if dtype == torch.bfloat16 else 4e-6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_rows_apart(backend: str, dtype: torch.dtype) -> None:
    x, weight = randn(6, 45, dtype=dtype, seed=1), randn(10, 45, dtype=dtype, seed=2)
    with rk.use_backend(backend):
        assert_same_bits(rk.linear(rows_apart(x), rows_apart(weight, 3)), rk.linear(x, weight))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(131, 63), (96, 576), (1, 64)])
def test_linear_row_does_not_depend_on_batch_or_threads(
    backend: str, dtype: torch.dtype, columns: int, depth: int
) -> None:
    rows = 75 if backend == "cpu" else 9
    x, weight = randn(rows, depth, dtype=dtype, seed=4), randn(columns, depth, dtype=dtype, seed=5)
    with rk.use_backend(backend):
        whole = rk.linear(x, weight, out_dtype=torch.float32)
        for count in (1, 2):
            with num_threads(count):
                alone = torch.cat([rk.linear(x[i : i + 1], weight, out_dtype=torch.float32) for i in range(rows)])
                assert_same_bits(alone, whole)
                for size in (*range(2, 18), 31, 64):
                    if size < rows:
                        assert_same_bits(rk.linear(x[-size:], weight, out_dtype=torch.float32), whole[-size:])
                assert_same_bits(rk.linear(x, weight, out_dtype=torch.float32), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_threads_than_processors_and_than_columns_leave_nothing_out(dtype: torch.dtype) -> None:
    x, weight = randn(3, 64, dtype=dtype, seed=8), randn(1000, 64, dtype=dtype, seed=9)
    with num_threads(1):
        expected = rk.linear(x, weight)
    for count in (3, 7, 80):
        with num_threads(count):
            for columns in (1, 33, 1000):
                for _ in range(20):
                    assert_same_bits(rk.linear(x, weight[:columns]), expected[:, :columns].contiguous())


def test_linear_column_does_not_depend_on_the_columns_beside_it() -> None:
    x, weight = randn(7, 100, dtype=torch.bfloat16, seed=6), randn(70, 100, dtype=torch.bfloat16, seed=7)
    whole = rk.linear(x, weight)
    for first, end in [(0, 1), (3, 40), (17, 70), (69, 70)]:
        assert_same_bits(rk.linear(x, weight[first:end]), whole[:, first:end].contiguous())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((randn(2, 3), randn(4, 5)), ValueError, r"x has shape \(2, 3\): it must be \[T, 5\]"),
        (
            (randn(2, 3), randn(4, 3, dtype=torch.bfloat16)),
            TypeError,
            "x is torch.float32 and weight is torch.bfloat16",
        ),
        ((randn(2, 3).half(), randn(4, 3).half()), TypeError, "torch.float16 has no CPU kernels"),
        ((randn(2, 3), randn(4, 3), randn(3)), ValueError, r"bias has shape \(3,\): it must be \[4\]"),
        ((randn(3, 2).T, randn(4, 3)), ValueError, "x has strides"),
        ((randn(2, 3), randn(4)), ValueError, "weight has shape"),
    ],
)
def test_linear_names_the_wrong_argument(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rk.linear(*arguments)
