"""Slabs: addresses that stay, pages that go back to the operating system, exact resident sizes."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.worker.ledger import process_resident_bytes
from rollout.worker.slab import Slab, slab_bytes

MIB = 1 << 20


def test_release_of_256_mib_shows_in_the_resident_memory_of_the_process():
    slab = Slab("kv_cache", 256 * MIB)
    tensor = slab.carve((64, MIB), torch.float32)
    idle = process_resident_bytes()
    tensor.fill_(1.5)
    full = process_resident_bytes()
    assert abs(full - idle - 256 * MIB) < 4 * MIB
    assert slab.resident_bytes() == 256 * MIB
    address = tensor.data_ptr()
    slab.release()
    assert slab.resident_bytes() == 0
    assert abs(full - process_resident_bytes() - 256 * MIB) < 4 * MIB
    assert tensor.data_ptr() == address
    assert tensor[::7, ::4097].count_nonzero() == 0
    tensor[5].fill_(2.0)
    assert 4 * MIB <= slab.resident_bytes() <= 8 * MIB
    assert tensor[5].sum() == 2.0 * MIB


def test_memory_is_held_only_where_it_was_written():
    slab = Slab("kv_cache", 64 * MIB, huge_pages=False)
    tensor = slab.carve((64, MIB), torch.uint8)
    assert slab.resident_bytes() == 0
    tensor[10:12] = 1
    assert slab.resident_bytes() == 2 * MIB


def test_reading_released_memory_holds_nothing():
    slab = Slab("weights", 8 * MIB, huge_pages=False)
    tensor = slab.carve((8 * MIB,), torch.uint8)
    tensor.fill_(1)
    slab.release()
    assert tensor.sum() == 0
    assert slab.resident_bytes() == 0


def test_a_hundred_cycles_do_not_grow():
    slab = Slab("kv_cache", 4 * MIB)
    tensor = slab.carve((4 * MIB,), torch.uint8)
    before = process_resident_bytes()
    for cycle in range(100):
        tensor.fill_(cycle)
        assert tensor[-1] == cycle
        slab.release()
    assert slab.resident_bytes() == 0
    assert process_resident_bytes() - before < 2 * MIB


def test_neighbouring_slabs_are_counted_and_released_apart():
    slabs = [Slab("one", MIB, huge_pages=False) for _ in range(4)]
    tensors = [slab.carve((MIB,), torch.uint8).fill_(index + 1) for index, slab in enumerate(slabs)]
    slabs[1].release()
    assert [slab.resident_bytes() for slab in slabs] == [MIB, 0, MIB, MIB]
    assert [int(tensor[-1]) for tensor in tensors] == [1, 0, 3, 4]


def test_tensors_outlive_their_slab_and_the_memory_goes_with_the_last():
    slab = Slab("weights", 32 * MIB)
    tensor = slab.carve((32 * MIB,), torch.uint8).fill_(3)
    part = tensor[-10:]
    del slab, tensor
    gc.collect()
    assert part.tolist() == [3] * 10
    full = process_resident_bytes()
    del part
    gc.collect()
    assert full - process_resident_bytes() > 30 * MIB


@settings(max_examples=50, deadline=None)
@given(
    specs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
            st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.int64]),
        ),
        min_size=1,
        max_size=12,
    ),
    alignment=st.sampled_from([64, 256]),
)
def test_carved_tensors_are_aligned_zero_and_apart(specs: list[tuple[tuple[int, ...], torch.dtype]], alignment: int):
    slab = Slab("weights", max(1, slab_bytes(specs, alignment)))
    tensors = [slab.carve(shape, dtype, alignment) for shape, dtype in specs]
    ends = slab.address
    for (shape, dtype), tensor in zip(specs, tensors, strict=True):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.count_nonzero() == 0
        if tensor.numel():
            assert tensor.data_ptr() % alignment == 0
            assert tensor.data_ptr() >= ends
            ends = tensor.data_ptr() + tensor.nbytes
    assert ends <= slab.address + slab.num_bytes
    for index, tensor in enumerate(tensors):
        tensor.fill_(index + 1)
    assert all(bool((tensor == index + 1).all()) for index, tensor in enumerate(tensors))


def test_carving_beyond_the_end_raises_with_the_numbers():
    slab = Slab("kv_cache", 4096)
    slab.carve((1000,), torch.uint8)
    assert slab.free_bytes == 3096
    with pytest.raises(
        ValueError, match=r"'kv_cache' has 3072 of 4096 bytes left, \(3073,\) of torch.uint8 needs 3073"
    ):
        slab.carve((3073,), torch.uint8)
    slab.carve((3072,), torch.uint8)
    assert slab.free_bytes == 0


def test_large_slabs_start_on_a_huge_page():
    assert Slab("kv_cache", 2 * MIB).address % (2 * MIB) == 0
    assert Slab("kv_cache", 3 * MIB + 1).num_bytes == 3 * MIB + 4096


def test_parameters_over_a_slab_train():
    slab = Slab("weights", 4096)
    parameter = torch.nn.Parameter(slab.carve((4, 4), torch.float32))
    (parameter.sum() * 2).backward()
    with torch.no_grad():
        assert parameter.grad is not None
        parameter -= parameter.grad
    assert parameter.eq(-2).all()
    slab.release()
    assert parameter.eq(0).all()


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_slab_is_refused(size: int):
    with pytest.raises(ValueError, match=f"num_bytes={size} is not valid"):
        Slab("kv_cache", size)


def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match=r"needs Linux.*darwin"):
        Slab("kv_cache", 4096)
