"""The Triton `rms_norm` and its backward against float64, and the row invariance of both."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels import reference
from rollout_kernels.gpu.norm import rms_norm, rms_norm_backward
from rollout_kernels.gpu.numerics import canonical_rows, row_stride
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart
from tests.support.triton_kernels import DTYPES, TOLERANCE, poisoned_memory

SIZES = [1, 7, 64, 576, 2500]
EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64, differentiable."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_forward_equals_float64(dtype: torch.dtype, size: int, with_residual: bool) -> None:
    x, weight = randn(9, size, dtype=dtype, seed=1, scale=3.0), randn(size, dtype=dtype, seed=2)
    residual = rows_apart(randn(9, size, seed=3, scale=10.0)) if with_residual else None
    with poisoned_memory():
        normed, total = rms_norm(x, weight, EPS, residual, dtype)
    exact = x.double() + (0 if residual is None else residual.double())
    assert normed.dtype == dtype
    assert_close(normed, exact_norm(exact, weight.double()), TOLERANCE[dtype])
    assert_same_bits(total, x.float() + (0 if residual is None else residual))


def test_a_wide_stream_is_its_own_total() -> None:
    x, weight = randn(4, 40, seed=1), randn(40, dtype=torch.bfloat16, seed=2)
    normed, total = rms_norm(x, weight, EPS, None, torch.bfloat16)
    assert normed.dtype == torch.bfloat16
    assert total is x


def test_rows_apart_and_no_rows() -> None:
    x, weight = randn(5, 96, dtype=torch.bfloat16, seed=1), randn(96, seed=2)
    for near, apart in zip(
        rms_norm(x, weight, EPS, None, torch.float32),
        rms_norm(rows_apart(x), weight, EPS, None, torch.float32),
        strict=True,
    ):
        assert_same_bits(near, apart)
    assert rms_norm(x[:0], weight, EPS, None, torch.float32)[0].shape == (0, 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_backward_equals_float64(dtype: torch.dtype, size: int) -> None:
    total, weight = randn(300 if size < 100 else 9, size, seed=1, scale=3.0), randn(size, dtype=dtype, seed=2)
    grad, grad_total = randn(*total.shape, dtype=dtype, seed=3), randn(*total.shape, seed=4)
    h, w = total.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.autograd.grad(
        (exact_norm(h, w), h), (h, w), grad_outputs=(grad.double(), grad_total.double()), allow_unused=True
    )
    with poisoned_memory():
        grad_x, grad_residual, grad_weight = rms_norm_backward(grad, grad_total, total, weight, EPS, dtype, True, True)
    assert grad_x is not None and grad_residual is not None and grad_weight is not None
    assert grad_x.dtype == dtype and grad_residual.dtype == grad_weight.dtype == torch.float32
    assert_close(grad_x, exact[0], TOLERANCE[dtype] + 2e-6)
    assert_close(grad_residual, exact[0], 4e-6)
    assert_close(grad_weight, exact[1], 4e-6)


def test_backward_makes_what_is_wanted_alone() -> None:
    total, weight, grad = randn(3, 20, seed=1), randn(20, seed=2), randn(3, 20, seed=3)
    expected = reference.rms_norm_backward(grad.double(), None, total.double(), weight, EPS, torch.float64, True, True)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        x_dtype = torch.float32 if wanted[0] else None
        with poisoned_memory():
            results = rms_norm_backward(grad, None, total, weight, EPS, x_dtype, *wanted[1:])
        assert [result is not None for result in results] == list(wanted)
        for result, exact in zip(results, expected, strict=True):
            assert exact is not None
            if result is not None:
                assert_close(result, exact, 4e-6)
    _, _, grad_weight = rms_norm_backward(grad[:0], None, total[:0], weight, EPS, torch.float32, False, True)
    assert grad_weight is not None and grad_weight.tolist() == [0.0] * 20


@pytest.mark.parametrize("size", [64, 146, 2500])
def test_a_row_does_not_depend_on_the_batch(size: int) -> None:
    rows = 37
    x, weight = randn(rows, size, dtype=torch.bfloat16, seed=1), randn(size, dtype=torch.bfloat16, seed=2)
    residual, grad = randn(rows, size, seed=3), randn(rows, size, dtype=torch.bfloat16, seed=4)

    def run(part: slice) -> list[torch.Tensor | None]:
        normed, total = rms_norm(x[part], weight, EPS, residual[part], torch.bfloat16)
        gradients = rms_norm_backward(grad[part], None, total, weight, EPS, torch.bfloat16, True, False)
        return [normed, total, *gradients[:2]]

    whole = run(slice(None))
    for part in (slice(0, 1), slice(17, 18), slice(36, 37), slice(5, 30)):
        for result, expected in zip(run(part), whole, strict=True):
            assert result is not None and expected is not None
            assert_same_bits(result, expected[part])


def test_too_long_a_row_is_named() -> None:
    with pytest.raises(ValueError, match=r"x has rows of 16385 elements: on GPUs a norm takes 1 to 16384"):
        rms_norm(randn(1, 16385), randn(16385), EPS, None, torch.float32)


@pytest.mark.parametrize("size", [48, 50])
def test_rows_come_to_the_kernels_in_one_form(size: int) -> None:
    """Wherever they lie: the compiled kernel, and with it the order of a sum, follows from the rows' length alone."""
    memory = randn(4000, dtype=torch.bfloat16, seed=1)
    for first in (0, 1, 8, 50):
        for stride in (size, 64, 51):
            for count in (1, 7):
                x = memory[first:].as_strided((count, size), (stride, 1))
                canonical = canonical_rows(x)
                assert_same_bits(canonical, x)
                assert canonical.data_ptr() % 16 == 0
                assert (row_stride(canonical) % 16 == 0) == (size % 16 == 0)
                if first in (0, 8) and stride == size:
                    assert canonical is x
