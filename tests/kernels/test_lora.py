"""`lora_shrink` and `lora_expand` against float64: mixed adapters in a batch, none at all, row invariance, errors."""

from __future__ import annotations

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.cpu.program import Workspace, record
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

SHAPES = [(1, 1, 1), (8, 37, 16), (16, 64, 50), (21, 100, 33), (64, 576, 300)]  # rank, K, N


def mixed_ids(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int32) * 3 % 5 - 1).to(torch.int32)  # -1 to 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "depth", "columns"), SHAPES)
def test_mixed_adapters_equal_float64(backend: str, dtype: torch.dtype, rank: int, depth: int, columns: int) -> None:
    x, a = rows_apart(randn(11, depth, dtype=dtype, seed=1)), randn(4, rank, depth, dtype=dtype, seed=2)
    b, ids, scales = randn(4, columns, rank, dtype=dtype, seed=3), mixed_ids(11), torch.tensor([0.5, 2.0, -1.0, 0.25])
    with rk.use_backend(backend):
        y = rk.lora_shrink(x, a, ids)
    chosen = ids.long().clamp(min=0)
    there = (ids >= 0).double()[:, None]
    assert y.dtype == torch.float32
    assert_close(y, torch.einsum("tk,trk->tr", x.double(), a.double()[chosen]) * there, 4e-6)
    for out_dtype in (dtype, torch.float32):
        wide = torch.full((11, columns + 3), 7.0, dtype=out_dtype)
        out = wide[:, 2 : columns + 2]
        out.copy_(randn(11, columns, dtype=out_dtype, seed=4))
        before = out.clone()
        added = torch.einsum("tr,tnr->tn", y.double(), b.double()[chosen]) * scales.double()[chosen][:, None] * there
        with rk.use_backend(backend):
            rk.lora_expand(y, b, ids, out, scales)
        assert_close(out, before.double() + added, TOLERANCE[out_dtype] + 4e-6)
        assert_same_bits(out[ids < 0], before[ids < 0])
        assert wide[:, :2].eq(7.0).all() and wide[:, -1].eq(7.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", [1, 5])
def test_a_row_does_not_depend_on_batch_adapters_or_threads(backend: str, dtype: torch.dtype, run: int) -> None:
    """`run`: tokens that follow each other and have one adapter."""
    rows = 40
    x, a, b = randn(rows, 75, dtype=dtype, seed=1), randn(4, 18, 75, dtype=dtype, seed=2), randn(4, 300, 18, seed=3)
    ids = mixed_ids(-(-rows // run)).repeat_interleave(run)[:rows].contiguous()
    b, scales = b.to(dtype), torch.tensor([0.5, 2.0, -1.0, 0.25])
    start = randn(rows, 300, dtype=dtype, seed=4)

    def compute(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        out = start[part].clone()
        y = rk.lora_shrink(x[part], a, ids[part].contiguous())
        rk.lora_expand(y, b, ids[part].contiguous(), out, scales)
        return y, out

    with rk.use_backend(backend):
        whole = compute(slice(None))
        for count in (1, 2):
            with num_threads(count):
                for part in (slice(None), slice(0, 1), slice(39, 40), slice(7, 24)):
                    for result, expected in zip(compute(part), whole, strict=True):
                        assert_same_bits(result, expected[part])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_adapter_at_all(backend: str) -> None:
    x, ids = randn(3, 8, seed=1), torch.full((3,), -1, dtype=torch.int32)
    out = randn(3, 5, seed=2)
    before = out.clone()
    with rk.use_backend(backend):
        y = rk.lora_shrink(x, torch.full((1, 2, 8), torch.nan), ids)
        assert y.tolist() == [[0.0, 0.0]] * 3
        rk.lora_expand(y, torch.full((1, 5, 2), torch.nan), ids, out, torch.ones(1))
    assert_same_bits(out, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_of_no_adapter_is_named_and_nothing_changes(backend: str) -> None:
    out = randn(2, 5, seed=2)
    before = out.clone()
    with rk.use_backend(backend):
        for bad in (2, -2):
            ids = torch.tensor([0, bad], dtype=torch.int32)
            message = rf"adapter_ids\[1\]={bad} is no adapter: it must be -1 \(none\) to 1"
            with pytest.raises(ValueError, match=message):
                rk.lora_shrink(randn(2, 8), randn(2, 3, 8), ids)
            with pytest.raises(ValueError, match=message):
                rk.lora_expand(randn(2, 3), randn(2, 5, 3), ids, out, torch.ones(2))
    assert_same_bits(out, before)


def test_float64_is_exact_to_double_precision() -> None:
    x, a, ids = randn(4, 30, dtype=torch.float64), randn(2, 6, 30, dtype=torch.float64, seed=1), mixed_ids(4) % 2
    y = rk.lora_shrink(x, a, ids)
    assert y.dtype == torch.float64
    assert_close(y, torch.einsum("tk,trk->tr", x, a[ids.long()]), 1e-13)


def test_wrong_arguments_are_named() -> None:
    ids, scales = torch.zeros(2, dtype=torch.int32), torch.ones(1)
    with pytest.raises(ValueError, match=r"x has shape \(2, 7\): it must be \[T, 8\]"):
        rk.lora_shrink(randn(2, 7), randn(1, 3, 8), ids)
    with pytest.raises(TypeError, match=r"adapter_ids is torch.int64"):
        rk.lora_shrink(randn(2, 8), randn(1, 3, 8), ids.long())
    with pytest.raises(ValueError, match="a has shape"):
        rk.lora_shrink(randn(2, 8), randn(3, 8), ids)
    with pytest.raises(TypeError, match=r"y is torch.bfloat16: it must be torch.float32"):
        rk.lora_expand(randn(2, 3).bfloat16(), randn(1, 5, 3), ids, randn(2, 5), scales)
    with pytest.raises(ValueError, match=r"out has shape \(2, 4\): it must be \[2, 5\]"):
        rk.lora_expand(randn(2, 3), randn(1, 5, 3), ids, randn(2, 4), scales)
    with pytest.raises(ValueError, match=r"scales has shape \(2,\): it must be \[1\]"):
        rk.lora_expand(randn(2, 3), randn(1, 5, 3), ids, randn(2, 5), torch.ones(2))
    with pytest.raises(ValueError, match="lora_shrink has no gradient"):
        rk.lora_shrink(randn(2, 8).requires_grad_(), randn(1, 3, 8), ids)


def test_a_recorded_program_follows_new_adapter_ids() -> None:
    x, a, b = randn(3, 24, seed=1), randn(4, 8, 24, seed=2), randn(4, 40, 8, seed=3)
    ids, out, scales = mixed_ids(3), torch.zeros(3, 40), torch.ones(4)

    def forward() -> torch.Tensor:
        y = rk.lora_shrink(x, a, ids)
        rk.lora_expand(y, b, ids, out, scales)
        return y

    y, program = record(forward, Workspace(torch.empty(1 << 12, dtype=torch.uint8)))
    ids.copy_(torch.tensor([3, -1, 2], dtype=torch.int32))
    out.zero_()
    program.replay()
    expected_out = torch.zeros(3, 40)
    expected_y = rk.lora_shrink(x, a, ids)
    rk.lora_expand(expected_y, b, ids, expected_out, scales)
    assert_same_bits(y, expected_y)
    assert_same_bits(out, expected_out)
