"""The Triton `silu_and_mul` and its backward against float64, and the row invariance of both."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels.gpu.activation import silu_and_mul, silu_and_mul_backward
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart
from tests.support.triton_kernels import DTYPES, TOLERANCE, poisoned_memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 1024, 1536])
def test_forward_and_backward_equal_float64(dtype: torch.dtype, size: int) -> None:
    x = rows_apart(randn(4, 2 * size, dtype=dtype, seed=1, scale=4.0))
    grad = rows_apart(randn(4, size, dtype=dtype, seed=2))
    exact_x = x.double().requires_grad_()
    gate, up = exact_x.chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    (exact_grad,) = torch.autograd.grad(exact, exact_x, grad.double())
    with poisoned_memory():
        out, grad_x = silu_and_mul(x), silu_and_mul_backward(grad, x)
    assert out.dtype == grad_x.dtype == dtype
    assert_close(out, exact.detach(), TOLERANCE[dtype])
    assert_close(grad_x, exact_grad, TOLERANCE[dtype])


def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gate = torch.tensor([[-200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0]])
    out = silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    assert_close(out, torch.nn.functional.silu(gate.double()), 2e-6)
    assert out[0, 2].item() == pytest.approx(-20.0 / (1.0 + 4.851651954097903e8), rel=1e-5)
    gradient = silu_and_mul_backward(torch.ones_like(gate), torch.cat((gate, torch.ones_like(gate)), -1))
    assert gradient.isfinite().all()


def test_not_a_number_stays_one() -> None:
    x = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])
    assert silu_and_mul(x).isnan().all()


def test_a_row_does_not_depend_on_the_batch() -> None:
    x, grad = randn(20, 300, dtype=torch.bfloat16, seed=1), randn(20, 150, dtype=torch.bfloat16, seed=2)
    out, grad_x = silu_and_mul(x), silu_and_mul_backward(grad, x)
    for part in (slice(0, 1), slice(19, 20), slice(3, 12)):
        assert_same_bits(silu_and_mul(x[part]), out[part])
        assert_same_bits(silu_and_mul_backward(grad[part], x[part]), grad_x[part])
    assert silu_and_mul(x[:0]).shape == (0, 150)
    assert silu_and_mul_backward(grad[:0], x[:0]).shape == (0, 300)
