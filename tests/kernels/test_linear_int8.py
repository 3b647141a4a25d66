"""`quantize_weight` and `linear_int8` against float64, their row invariance, and every instruction set."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.cpu.build import SOURCE_DIR, find_compiler
from rollout_kernels.cpu.ops import CpuKernels
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


def outlying(rows: int, depth: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers, some of them 50 times as large, and a row of zeros."""
    x = randn(rows, depth, dtype=torch.float32, seed=seed)
    x[randn(rows, depth, seed=seed + 100) > 2.3] *= 50
    x[rows // 2 : rows // 2 + 1] = 0
    return x.to(dtype)


def rounded(x: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray]:
    """(Whole numbers int64 [T, groups, group], scales float64 [T, groups, 1]) of x, rounded to nearest even."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    padded = padded.view(x.shape[0], padded.shape[1] // group, group).numpy()
    largest = np.abs(padded).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(padded * inverse).astype(np.int64), (largest / np.float32(127)).astype(np.float64)


def oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of the rounded numbers in float64: scales of 32 neighbours in x, of a whole row in the weight."""
    x_values, x_scales = rounded(x, 32)
    w_values, w_scales = rounded(weight, -(-weight.shape[1] // 32) * 32)
    w_values = w_values.reshape(weight.shape[0], -1, 32)
    sums = np.einsum("tgk,ngk->tgn", x_values, w_values)
    return torch.from_numpy((sums * x_scales).sum(1) * w_scales[:, 0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_product_equals_float64_product_of_the_rounded_numbers(
    backend: str, dtype: torch.dtype, rows: int, columns: int, depth: int
) -> None:
    x, weight = outlying(rows, depth, dtype, 1), outlying(columns, depth, dtype, 2)
    bias = randn(columns, dtype=dtype, seed=3)
    with rk.use_backend(backend):
        packed = rk.quantize_weight(weight)
        for out_dtype in {dtype, torch.float32}:
            for added in (None, bias):
                expected = oracle(x, weight) + (0 if added is None else added.double())
                out = rk.linear_int8(x, packed, added, out_dtype=out_dtype)
                assert out.dtype == out_dtype
                assert_close(out, expected, TOLERANCE[out_dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_the_true_product_is_within_the_bound_of_rounding(backend: str, dtype: torch.dtype) -> None:
    x, weight = outlying(13, 200, dtype, 4), outlying(50, 200, dtype, 5)
    with rk.use_backend(backend):
        out = rk.linear_int8(x, rk.quantize_weight(weight), out_dtype=torch.float32).double()
    x_half = torch.from_numpy(rounded(x, 32)[1] / 2).expand(-1, -1, 32).reshape(13, -1)[:, :200]  # half a unit
    w_half = torch.from_numpy(rounded(weight, 224)[1][:, 0] / 2).expand(-1, 200)
    a, b = x.double(), weight.double()
    bound = a.abs() @ w_half.T + x_half @ b.abs().T + x_half @ w_half.T
    error = (out - a @ b.T).abs()
    assert (error <= bound * (1 + 1e-5) + 1e-9).all()
    assert error.mean() > 1e-4  # it is rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (7, 13), (33, 80), (64, 576), (1100, 35)])
def test_packed_weights_have_the_same_bits_on_every_backend(dtype: torch.dtype, columns: int, depth: int) -> None:
    weight = outlying(columns, depth, dtype, 6)
    weight[0, 0] = 1e-38  # rows of one element: too small to count
    packed = []
    for backend in BACKENDS:
        values, scales = rk.int8_weight_shapes(columns, depth)
        dirty = rk.Int8Weight(torch.full(values, 77, dtype=torch.uint8), torch.full(scales, torch.nan), depth)
        with rk.use_backend(backend):
            assert rk.quantize_weight(rows_apart(weight), dirty) is dirty
        packed.append(dirty)
    assert_same_bits(packed[0].values, packed[1].values)
    assert_same_bits(packed[0].scales, packed[1].scales)
    unpacked = packed[0].values.transpose(1, 2).reshape(packed[0].values.shape[0] * 16, -1).long() - 128
    assert (unpacked[columns:] == 0).all()
    assert (unpacked[:, depth:] == 0).all()
    restored = unpacked[:columns, :depth].double() * packed[0].scales[:, None].double()
    assert ((restored - weight.double()).abs() <= packed[0].scales[:, None].double() / 2 * (1 + 1e-5) + 2**-100).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(131, 63), (96, 576), (1, 64)])
def test_row_does_not_depend_on_batch_or_threads(backend: str, dtype: torch.dtype, columns: int, depth: int) -> None:
    rows = 75 if backend == "cpu" else 9
    x, weight = outlying(rows, depth, dtype, 7), outlying(columns, depth, dtype, 8)
    with rk.use_backend(backend):
        packed = rk.quantize_weight(weight)
        whole = rk.linear_int8(x, packed, out_dtype=torch.float32)
        assert_same_bits(rk.linear_int8(rows_apart(x), packed, out_dtype=torch.float32), whole)
        for count in (1, 2):
            with num_threads(count):
                alone = [rk.linear_int8(x[i : i + 1], packed, out_dtype=torch.float32) for i in range(rows)]
                assert_same_bits(torch.cat(alone), whole)
                for size in (2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 64):
                    if size < rows:
                        assert_same_bits(rk.linear_int8(x[-size:], packed, out_dtype=torch.float32), whole[-size:])
                again = rk.quantize_weight(weight)
                assert_same_bits(again.values, packed.values)
                assert_same_bits(rk.linear_int8(x, again, out_dtype=torch.float32), whole)


@pytest.mark.parametrize("rows", [1, 3, 400])
def test_long_products_and_many_rows_are_cut_into_the_same_bits(rows: int) -> None:
    x, weight = outlying(rows, 3000, torch.bfloat16, 9), outlying(208, 3000, torch.bfloat16, 10)
    packed = rk.quantize_weight(weight)
    out = rk.linear_int8(x, packed, out_dtype=torch.float32)
    assert_close(out, oracle(x, weight), 1e-5)
    assert_same_bits(rk.linear_int8(x[-1:], packed, out_dtype=torch.float32), out[-1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_row_or_column_nan(backend: str, dtype: torch.dtype, value: float) -> None:
    x, weight = randn(10, 70, dtype=dtype, seed=11), randn(20, 70, dtype=dtype, seed=12)
    with rk.use_backend(backend):
        clean = rk.linear_int8(x, rk.quantize_weight(weight))
        x[4, 68] = value
        weight[9, 1] = value
        out = rk.linear_int8(x, rk.quantize_weight(weight))
    bad = torch.zeros(10, 20, dtype=torch.bool)
    bad[4], bad[:, 9] = True, True
    assert torch.equal(out.isnan(), bad)
    assert_same_bits(out[~bad], clean[~bad])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for instruction sets of x86-64")
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3"])
def test_other_instruction_sets_compute_the_same(architecture: str, tmp_path: Path) -> None:
    cpu = Path("/proc/cpuinfo").read_text()
    if architecture == "x86-64-v3" and not all(f" {flag} " in cpu for flag in ("avx2", "fma", "bmi2")):
        pytest.skip("this CPU has no AVX2")
    flags = ["-std=c++17", "-O2", f"-march={architecture}", "-pthread", "-fPIC", "-shared", "-w"]
    sources = [str(SOURCE_DIR / name) for name in ("gemm_int8.cpp", "threads.cpp")]
    subprocess.run([find_compiler().path, *flags, *sources, "-o", str(tmp_path / "other.so")], check=True)
    library = ctypes.CDLL(str(tmp_path / "other.so"))
    native = CpuKernels()
    other = CpuKernels()
    for name in ("linear_int8", "quantize_weight"):
        function, known = getattr(library, f"rk_{name}"), vars(native)[f"_{name}"]
        function.argtypes, function.restype = known.argtypes, known.restype
        setattr(other, f"_{name}", function)
    for dtype in DTYPES:
        x, weight = outlying(11, 300, dtype, 13), outlying(75, 300, dtype, 14)
        packed = rk.quantize_weight(weight)
        dirty = rk.Int8Weight(torch.full_like(packed.values, 77), torch.full_like(packed.scales, torch.nan), 300)
        other.quantize_weight(weight, dirty)
        assert_same_bits(dirty.values, packed.values)
        assert_same_bits(dirty.scales, packed.scales)
        out = other.linear_int8(x, dirty, None, torch.float32)
        assert_close(out, native.linear_int8(x, packed, None, torch.float32).double(), 1e-6)
        assert_close(out, oracle(x, weight), 2e-6)
        alone = [other.linear_int8(x[i : i + 1], dirty, None, torch.float32) for i in range(11)]
        assert_same_bits(torch.cat(alone), out)


def test_gradients_are_refused() -> None:
    packed = rk.quantize_weight(randn(4, 8))
    x = randn(2, 8).requires_grad_()
    with pytest.raises(ValueError, match="linear_int8 has no gradient"):
        rk.linear_int8(x, packed)
    with torch.no_grad():
        assert rk.linear_int8(x, packed).shape == (2, 4)


GOOD = rk.quantize_weight(randn(4, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((randn(2, 5), GOOD), ValueError, r"x has shape \(2, 5\): it must be \[T, 3\]"),
        ((randn(2, 3).half(), GOOD), TypeError, "torch.float16 has no CPU kernels: they take bfloat16 and float32"),
        ((randn(2, 3).double(), GOOD), TypeError, "x is torch.float64"),
        ((randn(3, 2).T, GOOD), ValueError, "x has strides"),
        ((randn(2, 3), GOOD, randn(3)), ValueError, r"bias has shape \(3,\): it must be \[4\]"),
        ((randn(2, 3), GOOD._replace(values=GOOD.values.char())), TypeError, "weight.values is torch.int8"),
        ((randn(2, 3), GOOD._replace(values=GOOD.values[:, :4])), ValueError, "weight.values has shape"),
        ((randn(2, 3), GOOD._replace(scales=GOOD.scales.double())), TypeError, "weight.scales is torch.float64"),
    ],
)
def test_linear_int8_names_the_wrong_argument(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rk.linear_int8(*arguments)


@pytest.mark.parametrize(
    ("weight", "into", "error", "message"),
    [
        (randn(4), None, ValueError, "weight has shape"),
        (randn(4, 3).half(), None, TypeError, "torch.float16 has no CPU kernels"),
        (randn(3, 4).T, None, ValueError, "weight has strides"),
        (randn(4, 5), GOOD, ValueError, "into.in_features=3 is not valid: the weight has 5"),
        (randn(40, 3), GOOD, ValueError, "into.values has shape"),
    ],
)
def test_quantize_weight_names_the_wrong_argument(
    weight: torch.Tensor, into: rk.Int8Weight | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rk.quantize_weight(weight, into)
