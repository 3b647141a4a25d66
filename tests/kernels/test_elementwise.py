"""`rms_norm`, `rotary_embedding` and `silu_and_mul` against float64, and their row invariance."""

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


def cos_sin_table(max_positions: int, head_dim: int) -> torch.Tensor:
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 63, 576])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_float64(backend: str, dtype: torch.dtype, size: int, with_residual: bool) -> None:
    x, weight = randn(5, size, dtype=dtype, seed=1, scale=3.0), randn(size, dtype=dtype, seed=2)
    residual = rows_apart(randn(5, size, seed=3, scale=10.0)) if with_residual else None
    with rk.use_backend(backend):
        normed, total = rk.rms_norm(x, weight, 1e-5, residual)
    exact = x.double() + (0 if residual is None else residual.double())
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert normed.dtype == dtype
    assert total.dtype == torch.float32
    assert_close(normed, expected, TOLERANCE[dtype])
    assert_same_bits(total, x.float() + (0 if residual is None else residual))


def test_rms_norm_takes_a_wide_residual_stream_and_a_narrow_weight() -> None:
    x, weight = randn(4, 40, seed=1), randn(40, dtype=torch.bfloat16, seed=2)
    normed, total = rk.rms_norm(x, weight, 1e-6)
    assert normed.dtype == torch.bfloat16
    assert total is x
    assert rk.rms_norm(x, weight, 1e-6, out_dtype=torch.float32)[0].dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_rotary_rotates_in_place_like_float64(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    table = cos_sin_table(50, head_dim)
    positions = torch.tensor([0, 49, 7, 7])
    qkv = randn(4, (7 + 2) * head_dim, dtype=dtype, seed=1)
    q = qkv[:, : 7 * head_dim].unflatten(1, (7, head_dim))
    k = qkv[:, 7 * head_dim : 8 * head_dim].unflatten(1, (1, head_dim))
    rest = qkv[:, 8 * head_dim :].clone()
    cosine, sine = table[positions].double()[:, None].chunk(2, -1)
    expected = []
    for x in (q, k):
        low, high = x.double().chunk(2, -1)
        expected.append(torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1))
    with rk.use_backend(backend):
        rotated = rk.rotary_embedding(q, k, positions, table)
    for result, source, wanted in zip(rotated, (q, k), expected, strict=True):
        assert result.data_ptr() == source.data_ptr()
        assert_close(result, wanted, TOLERANCE[dtype])
    assert_same_bits(qkv[:, 8 * head_dim :], rest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rotary_refuses_a_position_outside_the_table(backend: str) -> None:
    q, k = randn(2, 3, 8), randn(2, 1, 8)
    before = q.clone()
    with rk.use_backend(backend), pytest.raises(ValueError, match=r"positions\[1\]=5 is outside cos_sin \(0 to 4\)"):
        rk.rotary_embedding(q, k, torch.tensor([0, 5]), cos_sin_table(5, 8))
    assert_same_bits(q, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 131])
def test_silu_and_mul_equals_float64(backend: str, dtype: torch.dtype, size: int) -> None:
    x = randn(6, 2 * size, dtype=dtype, seed=1, scale=4.0)
    x[0, 0], x[1, 0] = 300.0, -300.0
    gate, up = x.double().chunk(2, -1)
    with rk.use_backend(backend):
        out = rk.silu_and_mul(rows_apart(x))
    assert out.dtype == dtype
    assert_close(out, torch.nn.functional.silu(gate) * up, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_batch_or_threads(backend: str, dtype: torch.dtype) -> None:
    rows, size, head_dim = 300, 146, 80
    x, weight, residual = (
        randn(rows, size, dtype=dtype, seed=1),
        randn(size, dtype=dtype, seed=2),
        randn(rows, size, seed=3),
    )
    heads, table = randn(rows, 3, head_dim, dtype=dtype, seed=4), cos_sin_table(rows, head_dim)
    positions = torch.arange(rows)

    def run(part: slice) -> list[torch.Tensor]:
        normed, total = rk.rms_norm(x[part], weight, 1e-5, residual[part])
        rotated = rk.rotary_embedding(heads[part].clone(), heads[part, :1].clone(), positions[part], table)
        return [normed, total, *rotated, rk.silu_and_mul(x[part])]

    with rk.use_backend(backend):
        whole = run(slice(None))
        for count in (1, 2):
            with num_threads(count):
                for part in (slice(None), slice(0, 1), slice(299, 300), slice(100, 207)):
                    for result, expected in zip(run(part), whole, strict=True):
                        assert_same_bits(result, expected[part])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="weight has shape"):
        rk.rms_norm(randn(2, 8), randn(7), 1e-5)
    with pytest.raises(TypeError, match=r"residual is torch.bfloat16"):
        rk.rms_norm(randn(2, 8), randn(8), 1e-5, randn(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="x has shape"):
        rk.silu_and_mul(randn(2, 7))
    with pytest.raises(ValueError, match="even head dimension"):
        rk.rotary_embedding(randn(2, 3, 7), randn(2, 3, 7), torch.arange(2), randn(4, 7))
    with pytest.raises(TypeError, match=r"positions is torch.int32"):
        rk.rotary_embedding(randn(2, 3, 8), randn(2, 3, 8), torch.arange(2, dtype=torch.int32), randn(4, 8))
    with pytest.raises(ValueError, match="heads of a row must lie side by side"):
        rk.rotary_embedding(randn(2, 8, 4).transpose(0, 1), randn(8, 3, 4), torch.arange(8), randn(8, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 577])
def test_embedding_rows_are_widened_exactly(backend: str, dtype: torch.dtype, size: int) -> None:
    weight = rows_apart(randn(23, size, dtype=dtype, seed=size))
    ids = torch.tensor([22, 0, 7, 7, 1])
    with rk.use_backend(backend):
        out = rk.embedding(ids, weight)
        assert out.dtype is torch.float32
        assert_same_bits(out, torch.stack([weight[i].float() for i in ids.tolist()]))
        for bad in (-1, 23):
            with pytest.raises(ValueError, match=rf"token_ids\[1\]={bad} is not in the vocabulary \(0 to 22\)"):
                rk.embedding(torch.tensor([0, bad]), weight)
