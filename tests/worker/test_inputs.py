"""Arrays on their way to the device: packed, sent in turns, never overwritten while something reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.platform.cpu import ImmediateCopies
from rollout.platform.platform import Event
from rollout.worker.inputs import DirectInputs, StagedInputs, fetch, packed_offsets, unpack


def random_arrays(rng: np.random.Generator) -> list[np.ndarray]:
    return [
        rng.integers(-(2**62), 2**62, 7),
        rng.integers(0, 99, (3, 5)).astype(np.int32),
        rng.standard_normal(9).astype(np.float32),
        np.empty(0, np.int64),
        rng.integers(0, 99, (4, 6)).astype(np.int32)[:, :3],  # rows apart
    ]


@pytest.mark.parametrize("inputs", [DirectInputs(), StagedInputs(ImmediateCopies())], ids=["direct", "staged"])
def test_tensors_have_the_values_dtypes_and_shapes_of_the_arrays(inputs: DirectInputs | StagedInputs) -> None:
    arrays = random_arrays(np.random.default_rng())
    for array, tensor in zip(arrays, inputs.send(arrays), strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(tensor.numpy(), array)


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    assert packed_offsets([7, 0, 16, 1]) == ([0, 16, 16, 32], 33)


def test_tensors_stay_valid_through_the_next_call_whatever_becomes_of_the_arrays() -> None:
    inputs = StagedInputs(ImmediateCopies(), capacity=64)
    first = np.arange(8)
    (sent,) = inputs.send([first])
    first[:] = -1
    inputs.send([np.full(8, 9)])
    assert sent.tolist() == list(range(8))


def test_more_than_the_buffers_hold_makes_larger_ones() -> None:
    inputs = StagedInputs(ImmediateCopies(), capacity=64)
    assert inputs.num_bytes == 128
    (before,) = inputs.send([np.arange(8)])
    (after,) = inputs.send([np.arange(1000)])
    assert after.tolist() == list(range(1000)) and before.tolist() == list(range(8))
    assert inputs.num_bytes == 2 * 8000


class LazyDevice:
    """A device that copies nothing before somebody waits for it, and then everything that was asked for before."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor, Event]] = []
        self.num_done = 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def mark(self) -> LazyEvent:
        return LazyEvent(self, len(self.copies))

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Event) -> LazyEvent:
        self.copies.append((host, device, after))
        return LazyEvent(self, len(self.copies))


class LazyEvent:
    def __init__(self, device: LazyDevice, num_before: int) -> None:
        self.device = device
        self.num_before = num_before

    def synchronize(self) -> None:
        for host, device, _ in self.device.copies[self.device.num_done : self.num_before]:
            device.copy_(host)
        self.device.num_done = max(self.device.num_done, self.num_before)


def test_a_host_buffer_is_filled_again_only_after_its_copy() -> None:
    device = LazyDevice()
    inputs = StagedInputs(device, capacity=64)
    results = [inputs.send([np.full(4, value)])[0] for value in (1, 2)]
    assert [device.num_done, results[0].tolist()] == [0, [-1] * 4]  # nothing has arrived yet
    third = inputs.send([np.full(4, 3)])[0]  # must wait for the first copy: it uses the same host buffer
    assert device.num_done == 1 and results[0].tolist() == [1] * 4
    device.mark().synchronize()
    assert third.tolist() == [3] * 4 and results[1].tolist() == [2] * 4


def test_a_device_buffer_is_overwritten_only_after_the_kernels_that_could_read_it() -> None:
    device = LazyDevice()
    marks: list[LazyEvent] = []
    mark = device.mark

    def recording_mark() -> LazyEvent:
        marks.append(mark())
        return marks[-1]

    device.mark = recording_mark  # type: ignore[method-assign]
    inputs = StagedInputs(device, capacity=64)
    for value in range(4):
        inputs.send([np.full(4, value)])
    # The third copy goes where the first went: it waits for the mark of the second call, before which every kernel
    # that reads the first call's tensors was started; and so on.
    afters = [after for *_, after in device.copies][-2:]
    assert afters == [marks[2], marks[3]] and len(marks) == 5


def test_results_come_back_as_arrays() -> None:
    tensors = [torch.randint(0, 9, (5,)), torch.randn(5), torch.tensor([True, False])]
    for array, tensor in zip(fetch(tensors), tensors, strict=True):
        assert np.array_equal(array, tensor.numpy())


def test_packed_results_are_taken_apart() -> None:
    tensors = [torch.randint(-9, 9, (5,)), torch.randn(3, 2), torch.empty(0), torch.randint(0, 9, (7,)).int()]
    starts, end = packed_offsets([tensor.nbytes for tensor in tensors])
    packed = torch.full((end,), 255, dtype=torch.uint8)
    for tensor, start in zip(tensors, starts, strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    for array, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        assert np.array_equal(array, tensor.numpy())
