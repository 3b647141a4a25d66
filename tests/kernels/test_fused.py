"""Matrix products with what follows them: the bits of the separate operations."""

from __future__ import annotations

import pytest
import torch

import rollout_kernels as rk
from tests.kernels.test_elementwise import cos_sin_table
from tests.support.kernels import BACKENDS, DTYPES, assert_same_bits, num_threads, randn, rows_apart


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "depth"), [(1, 48, 64), (3, 17, 33), (70, 1536, 96), (131, 40, 577)])
def test_gating_at_the_end_of_a_product(
    backend: str, dtype: torch.dtype, bias: bool, rows: int, size: int, depth: int
) -> None:
    x = rows_apart(randn(rows, depth, dtype=dtype, seed=rows))
    weight = rows_apart(randn(2 * size, depth, dtype=dtype, seed=size, scale=0.2))
    offset = randn(2 * size, dtype=dtype, seed=3) if bias else None
    with rk.use_backend(backend):
        expected = rk.silu_and_mul(rk.linear(x, weight, offset))
        for threads in (1, 2):
            with num_threads(threads):
                assert_same_bits(rk.linear_silu_and_mul(x, weight, offset), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "others", "head_dim", "depth"),
    [(1, 4, 2, 64, 64), (5, 3, 1, 20, 33), (33, 12, 3, 64, 576), (67, 2, 1, 80, 40), (4, 2, 0, 6, 16)],
)
def test_rotary_embedding_at_the_end_of_a_product(
    backend: str, dtype: torch.dtype, bias: bool, rows: int, heads: int, others: int, head_dim: int, depth: int
) -> None:
    x = rows_apart(randn(rows, depth, dtype=dtype, seed=rows))
    weight = randn((heads + others) * head_dim, depth, dtype=dtype, seed=1, scale=0.2)
    offset = randn((heads + others) * head_dim, dtype=dtype, seed=3) if bias else None
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(rows))
    table = cos_sin_table(50, head_dim)
    with rk.use_backend(backend):
        expected = rk.linear(x, weight, offset)
        rotated = expected[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        rk.rotary_embedding(rotated, rotated[:, :0], positions, table)
        for threads in (1, 2):
            with num_threads(threads):
                out = rk.linear_rotary(x, weight, offset, positions, table, heads * head_dim)
                assert_same_bits(out, expected)


def test_wrong_arguments_are_named() -> None:
    x, weight, table = randn(2, 8), randn(12, 8), cos_sin_table(5, 4)
    with pytest.raises(ValueError, match=r"positions\[1\]=5 is outside cos_sin \(0 to 4\)"):
        rk.linear_rotary(x, weight, None, torch.tensor([0, 5]), table, 8)
    with pytest.raises(ValueError, match=r"rotated_columns=6 is not valid.*multiple of the head size 4, up to 12"):
        rk.linear_rotary(x, weight, None, torch.tensor([0, 1]), table, 6)
    with pytest.raises(ValueError, match=r"rotated_columns=16 is not valid"):
        rk.linear_rotary(x, weight, None, torch.tensor([0, 1]), table, 16)
    with pytest.raises(ValueError, match=r"weight has shape \(11, 8\): it must be \[2I, K\]"):
        rk.linear_silu_and_mul(x, randn(11, 8))


def test_a_gradient_passes_through_the_gated_product() -> None:
    x, weight = randn(3, 8).requires_grad_(), randn(6, 8).requires_grad_()
    rk.linear_silu_and_mul(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is not None
    expected = torch.autograd.grad(rk.silu_and_mul(rk.linear(x, weight)).sum(), [x, weight])
    assert_same_bits(x.grad, expected[0])
    assert_same_bits(weight.grad, expected[1])
