"""The Triton rotary embedding against float64: in place, inside a fused projection, there and back."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels.gpu.rotary import rotate_
from tests.support.kernels import assert_close, assert_same_bits, randn
from tests.support.triton_kernels import DTYPES, TOLERANCE


def cos_sin_table(max_positions: int, head_dim: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cosine, sine = table[positions].double()[:, None].chunk(2, -1)
    low, high = x.double().chunk(2, -1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "q_heads", "k_heads"), [(2, 3, 1), (64, 9, 3), (80, 40, 8), (128, 17, 1), (256, 5, 5)]
)
def test_rotates_views_of_a_fused_projection(dtype: torch.dtype, head_dim: int, q_heads: int, k_heads: int) -> None:
    table, positions = cos_sin_table(50, head_dim), torch.tensor([0, 49, 7, 7])
    qkv = randn(4, (q_heads + 2 * k_heads) * head_dim, dtype=dtype, seed=1)
    q, k, v = qkv.split([q_heads * head_dim, k_heads * head_dim, k_heads * head_dim], dim=1)
    q, k = q.unflatten(1, (q_heads, head_dim)), k.unflatten(1, (k_heads, head_dim))
    exact_q, exact_k, v_before = rotated(q, table, positions), rotated(k, table, positions), v.clone()
    rotate_(q, k, positions, table, 1.0)
    assert_close(q, exact_q, TOLERANCE[dtype])
    assert_close(k, exact_k, TOLERANCE[dtype])
    assert_same_bits(v, v_before)


def test_direction_minus_one_rotates_back() -> None:
    q, k = randn(6, 4, 96, seed=1), randn(6, 2, 96, seed=2)
    table, positions = cos_sin_table(1000, 96), torch.tensor([0, 1, 500, 999, 3, 3])
    q_there, k_there = q.clone(), k.clone()
    rotate_(q_there, k_there, positions, table, 1.0)
    assert not torch.allclose(q_there[1:], q[1:])
    rotate_(q_there, k_there, positions, table, -1.0)
    assert_close(q_there, q, 2e-6)
    assert_close(k_there, k, 2e-6)


def test_a_position_outside_the_table_leaves_its_token_alone() -> None:
    q, k = randn(4, 2, 64, dtype=torch.bfloat16, seed=1), randn(4, 1, 64, dtype=torch.bfloat16, seed=2)
    table = cos_sin_table(10, 64)
    expected_q, expected_k = q.clone(), k.clone()
    rotate_(expected_q[2:], expected_k[2:], torch.tensor([9, 4]), table, 1.0)
    rotate_(q, k, torch.tensor([-1, 10, 9, 4]), table, 1.0)
    assert_same_bits(q, expected_q)
    assert_same_bits(k, expected_k)


def test_a_row_does_not_depend_on_the_batch() -> None:
    q, k = randn(30, 5, 80, dtype=torch.bfloat16, seed=1), randn(30, 2, 80, dtype=torch.bfloat16, seed=2)
    table, positions = cos_sin_table(30, 80), torch.arange(30).flip(0)
    whole_q, whole_k = q.clone(), k.clone()
    rotate_(whole_q, whole_k, positions, table, 1.0)
    for part in (slice(0, 1), slice(29, 30), slice(4, 20)):
        part_q, part_k = q[part].clone(), k[part].clone()
        rotate_(part_q, part_k, positions[part].contiguous(), table, 1.0)
        assert_same_bits(part_q, whole_q[part])
        assert_same_bits(part_k, whole_k[part])
    rotate_(q[:0], k[:0], positions[:0], table, 1.0)
