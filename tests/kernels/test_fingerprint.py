"""`fingerprint`: the reference's bits, every bit and every position counts, views and threads do not."""

import pytest
import torch

import rollout_kernels as rk
from tests.support.kernels import num_threads, randn


def reference(tensor: torch.Tensor) -> int:
    with rk.use_backend("reference"):
        return rk.fingerprint(tensor)


@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 4095, 16_384, 16_385, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_cpp_equals_reference(size: int, dtype: torch.dtype) -> None:
    tensor = (randn(size, seed=size) * 50).to(dtype)
    value = rk.fingerprint(tensor)
    assert 0 <= value < 2**64
    assert value == reference(tensor)


def test_known_value_stays_as_it_is() -> None:
    """Receipts on disk hold such values."""
    assert rk.fingerprint(torch.arange(1000, dtype=torch.int32)) == 0x50FE01EC48397F43


def test_dtype_and_shape_do_not_matter_but_length_does() -> None:
    tensor = randn(12, 8, seed=1)
    assert rk.fingerprint(tensor) == rk.fingerprint(tensor.view(torch.uint8)) == rk.fingerprint(tensor.view(4, 3, 8))
    zeros = {rk.fingerprint(torch.zeros(size)) for size in range(300)}
    assert len(zeros) == 300


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_views_count_in_logical_order(backend: str) -> None:
    wide = randn(700, 130, seed=2).bfloat16()
    with rk.use_backend(backend):
        for view in (wide[:, :96], wide[::3], wide[5:, 7:130], wide.T, wide[:, ::2], wide.view(70, 10, 130)[:, 3]):
            assert not view.is_contiguous()
            assert rk.fingerprint(view) == rk.fingerprint(view.contiguous())


def test_every_single_bit_matters() -> None:
    tensor = torch.zeros(600, dtype=torch.uint8)
    seen = {rk.fingerprint(tensor)}
    for byte in range(600):
        for bit in (0, 3, 7):
            tensor[byte] = 1 << bit
            seen.add(rk.fingerprint(tensor))
        tensor[byte] = 0
    assert len(seen) == 1 + 600 * 3


def test_pairs_of_bits_in_neighbouring_stripes_do_not_cancel() -> None:
    """Whatever a flipped bit does to the state of its lane, no flip of another bit undoes it without a trace."""
    seen = set()
    base = torch.zeros(512, dtype=torch.uint8)
    for first in range(64):
        for second in range(64):
            tensor = base.clone()
            tensor[first // 8] = 1 << (first % 8)
            tensor[256 + second // 8] = 1 << (second % 8)
            seen.add(rk.fingerprint(tensor))
    assert len(seen) == 64 * 64
    assert rk.fingerprint(base) not in seen


def test_swaps_and_pairs_of_sign_flips_are_seen() -> None:
    """Sums and exclusive ors of words would miss these."""
    tensor = randn(40_000, seed=3)
    seen = {rk.fingerprint(tensor)}
    for i, j in [(0, 1), (0, 64), (5, 5 + 16_384), (100, 39_999), (2, 66)]:
        swapped, flipped = tensor.clone(), tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        flipped[[i, j]] = -tensor[[i, j]]
        seen |= {rk.fingerprint(swapped), rk.fingerprint(flipped)}
    assert len(seen) == 11


def test_threads_do_not_matter() -> None:
    tensor = randn(300_001, seed=4)
    with num_threads(1):
        expected = rk.fingerprint(tensor)
    with num_threads(2):
        assert rk.fingerprint(tensor) == expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("origin", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 15, 17, 32_768, 40_001, 300_001])
def test_copying_writes_what_torch_writes_and_returns_its_fingerprint(
    backend: str, to: torch.dtype, origin: torch.dtype, size: int
) -> None:
    source = (randn(size, seed=size) * 3).to(origin)
    if size > 10:  # below 2^-126, infinite, the largest, ties
        odd = torch.tensor([1e-40, -3e-39, float("inf"), -float("inf"), 3.39e38, 1 + 2**-8, 1 + 3 * 2**-8, -0.0])
        source[: len(odd)] = odd.to(origin)
    destination = torch.full((size,), float("nan"), dtype=to)
    with rk.use_backend(backend):
        value = rk.copy_and_fingerprint(destination, source)
        assert value == rk.fingerprint(source.to(to))
    assert torch.equal(destination.view(torch.uint8), source.to(to).view(torch.uint8))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_copying_between_strided_tensors_touches_nothing_else(backend: str) -> None:
    wide = torch.full((50, 40), float("nan"))
    source = randn(30, 50, seed=6).T
    with rk.use_backend(backend):
        assert rk.copy_and_fingerprint(wide[:, 5:35], source) == rk.fingerprint(source)
        fused = torch.full((3, 4, 10), float("nan"), dtype=torch.bfloat16)
        assert rk.copy_and_fingerprint(fused[1], source[:4, :10]) == rk.fingerprint(source[:4, :10].bfloat16())
    assert torch.equal(wide[:, 5:35], source)
    assert torch.isnan(wide[:, :5]).all()
    assert torch.isnan(wide[:, 35:]).all()
    assert torch.equal(fused[1], source[:4, :10].bfloat16())
    assert torch.isnan(fused[::2]).all()


def test_a_copy_counts_as_a_change_in_place() -> None:
    destination = torch.zeros(10)
    rk.copy_and_fingerprint(destination, torch.ones(10))
    assert destination._version > 0
    with torch.inference_mode():
        rk.copy_and_fingerprint(torch.zeros(10), torch.ones(10))


def test_copies_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match=r"source has shape \(3,\), destination \(4,\)"):
        rk.copy_and_fingerprint(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ValueError, match="destination has strides"):
        rk.copy_and_fingerprint(torch.zeros(4, 4).T, torch.zeros(4, 4))
