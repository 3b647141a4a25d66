"""The Triton `lora_shrink` and `lora_expand` against float64: mixed adapters, ids of none, row invariance."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels.gpu import lora as module
from rollout_kernels.gpu.lora import lora_expand, lora_shrink
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart
from tests.support.triton_kernels import DTYPES, TOLERANCE, poisoned_memory

SCALES = torch.tensor([0.5, 2.0, -1.0, 0.25])


def mixed_ids(count: int) -> torch.Tensor:
    return (torch.arange(count) * 3 % 5 - 1).to(torch.int32)  # -1 to 3


def exact_shrink(x: torch.Tensor, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    there = (ids >= 0).double()[:, None]
    return torch.einsum("tk,trk->tr", x.double(), a.double()[ids.long().clamp(min=0)]) * there


def exact_added(y: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    chosen, there = ids.long().clamp(min=0), (ids >= 0).double()[:, None]
    return torch.einsum("tr,tnr->tn", y.double(), b.double()[chosen]) * SCALES.double()[chosen][:, None] * there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rank", "depth", "columns"), [(1, 1, 1), (8, 300, 70), (16, 64, 130), (33, 129, 9), (130, 40, 65)]
)
def test_mixed_adapters_equal_float64(dtype: torch.dtype, rank: int, depth: int, columns: int) -> None:
    x, ids = rows_apart(randn(19, depth, dtype=dtype, seed=1)), mixed_ids(19)
    a, b = randn(4, rank, depth, dtype=dtype, seed=2), randn(4, columns, rank, dtype=dtype, seed=3)
    with poisoned_memory():
        y = lora_shrink(x, a, ids)
    assert y.dtype == torch.float32
    assert_close(y, exact_shrink(x, a, ids), 4e-6)
    for out_dtype in {dtype, torch.float32}:
        wide = torch.full((19, columns + 3), 7.0, dtype=out_dtype)
        out = wide[:, 2 : columns + 2]
        out.copy_(randn(19, columns, dtype=out_dtype, seed=4))
        before = out.clone()
        lora_expand(y, b, ids, out, SCALES)
        assert_close(out, before.double() + exact_added(y, b, ids), TOLERANCE[out_dtype] + 4e-6)
        assert_same_bits(out[ids < 0], before[ids < 0])
        assert wide[:, :2].eq(7.0).all() and wide[:, -1].eq(7.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_batch_or_neighbours(dtype: torch.dtype) -> None:
    rows = 37
    x, a = randn(rows, 75, dtype=dtype, seed=1), randn(4, 18, 75, dtype=dtype, seed=2)
    b, start, ids = randn(4, 150, 18, dtype=dtype, seed=3), randn(rows, 150, dtype=dtype, seed=4), mixed_ids(rows)

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        y, out = lora_shrink(x[part], a, ids[part].contiguous()), start[part].clone()
        lora_expand(y, b, ids[part].contiguous(), out, SCALES)
        return y, out

    whole = run(slice(None))
    for part in (slice(1, 2), slice(36, 37), slice(5, 27)):
        for result, expected in zip(run(part), whole, strict=True):
            assert_same_bits(result, expected[part])


@pytest.mark.parametrize("few_tiles", [0, 16])
def test_one_adapter_for_all_and_one_for_each(few_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the adapters of a tile in one program, and shared out to many."""
    monkeypatch.setattr(module, "_FEW_TILES", few_tiles)
    x, a, b = randn(32, 20, seed=1), randn(40, 4, 20, seed=2), randn(40, 6, 4, seed=3)
    scales = torch.ones(40)
    for ids in (torch.full((32,), 7), torch.arange(32) + 5, torch.arange(32) // 3):
        ids = ids.to(torch.int32)
        out = torch.zeros(32, 6)
        with poisoned_memory():
            y = lora_shrink(x, a, ids)
        lora_expand(y, b, ids, out, scales)
        assert_close(y, exact_shrink(x, a, ids), 4e-6)
        assert_close(out, torch.einsum("tr,tnr->tn", y.double(), b.double()[ids.long()]), 4e-6)


def test_an_id_of_no_adapter_counts_as_none() -> None:
    x, out = randn(4, 8, seed=1), randn(4, 5, seed=2)
    before, ids = out.clone(), torch.tensor([-1, 2, -7, 1000], dtype=torch.int32)
    with poisoned_memory():
        y = lora_shrink(x, torch.full((2, 3, 8), torch.nan), ids)
    assert y.tolist() == [[0.0] * 3] * 4
    lora_expand(y, torch.full((2, 5, 3), torch.nan), ids, out, torch.ones(2))
    assert_same_bits(out, before)
    assert lora_shrink(x[:0], torch.ones(2, 3, 8), ids[:0]).shape == (0, 3)
    lora_expand(y[:0], torch.ones(2, 5, 3), ids[:0], out[:0], torch.ones(2))


def test_bad_numbers_of_a_neighbour_and_of_its_adapter_stay_there() -> None:
    x, a, b = randn(3, 8, seed=1), randn(2, 3, 8, seed=2), randn(2, 5, 3, seed=3)
    ids, out = torch.tensor([0, 1, 0], dtype=torch.int32), torch.zeros(3, 5)
    expected_y = lora_shrink(x, a, ids)
    lora_expand(expected_y, b, ids, expected_out := out.clone(), torch.ones(2))
    x[1], a[1], b[1] = torch.nan, torch.nan, torch.nan
    y = lora_shrink(x, a, ids)
    lora_expand(y, b, ids, out, torch.ones(2))
    assert_same_bits(y[[0, 2]], expected_y[[0, 2]])
    assert_same_bits(out[[0, 2]], expected_out[[0, 2]])
    assert y[1].isnan().all() and out[1].isnan().all()
