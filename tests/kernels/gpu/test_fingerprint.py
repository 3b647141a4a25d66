"""The Triton `fingerprint`: the reference's bits for every length, view and dtype."""

from __future__ import annotations

import pytest
import torch

from rollout_kernels import reference
from rollout_kernels.gpu.fingerprint import copy_and_fingerprint, fingerprint
from tests.support.kernels import randn
from tests.support.triton_kernels import poisoned_memory


@pytest.mark.parametrize("size", [0, 1, 7, 8, 255, 256, 257, 2047, 2049, 65_535, 65_537])
def test_every_length_of_bytes(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    with poisoned_memory():
        assert fingerprint(data) == reference.fingerprint(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    tensor = (randn(7, 33, seed=1) * 3).to(dtype)
    assert fingerprint(tensor) == reference.fingerprint(tensor)
    assert fingerprint(tensor[0, 0]) == reference.fingerprint(tensor[0, 0])


def test_more_chunks_than_one_program_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_kernels.gpu.fingerprint._CHUNKS", 2)
    data = torch.arange(3 * 8192 - 8000, dtype=torch.int64)
    assert fingerprint(data) == reference.fingerprint(data)


def test_known_value_stays_as_it_is() -> None:
    """Receipts on disk hold such values."""
    assert fingerprint(torch.arange(1000, dtype=torch.int32)) == 0x50FE01EC48397F43


def test_views_count_in_logical_order_and_are_left_alone() -> None:
    wide = randn(60, 132, seed=2).bfloat16()
    before = wide.clone()
    # Rows apart whose words are whole; the same with halves of words; an odd address; a transpose; steps in a row.
    for view in (
        wide[:, :96],
        wide[::3],
        wide[5:, 8:128],
        wide[:, 1:97],
        wide[:, :95],
        wide[7:, 3:],
        wide.T,
        wide[:, ::2],
    ):
        assert not view.is_contiguous()
        assert fingerprint(view) == reference.fingerprint(view)
    flat = wide.view(-1)
    for first in (1, 2, 3, 4):
        assert fingerprint(flat[first:]) == reference.fingerprint(flat[first:])
    assert torch.equal(wide, before)


def test_a_flipped_bit_anywhere_shows() -> None:
    data = torch.zeros(5000, dtype=torch.uint8)
    seen = {fingerprint(data)}
    for byte in (0, 2300, 4999):
        data[byte] = 128
        seen.add(fingerprint(data))
        data[byte] = 0
    assert len(seen) == 4


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_copying_returns_the_fingerprint_of_what_was_written(to: torch.dtype) -> None:
    source, destination = randn(3, 5, 40, seed=4), torch.full((3, 5, 40), float("nan"), dtype=to)
    assert copy_and_fingerprint(destination, source) == reference.fingerprint(source.to(to))
    assert torch.equal(destination, source.to(to))
