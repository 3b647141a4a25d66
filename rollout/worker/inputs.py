"""The inputs of a step on their way from the host to the device, and its results on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rollout.platform.platform import Copies, Event

_ALIGNMENT = 16  # bytes; kernels load 16 at once where pointers allow it
_SLOTS = 2  # one is filled while kernels still read the other
_FIRST_CAPACITY = 1 << 20


class StepInputs(Protocol):
    """Hands arrays of the host to the device."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        ...

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Tensors with the arrays' values, valid until the next but one call."""
        ...


class DirectInputs:
    """On the CPU the arrays are the tensors: nothing is copied."""

    num_bytes = 0

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class StagedInputs:
    """Packs all arrays of a call into one pinned buffer, and sends it with one copy beside the kernels.

    Two such pairs of buffers, on host and device, take turns. A host buffer is filled again once its last copy has
    ended; a device buffer is overwritten once every kernel has ended that was started before the call after its own.
    """

    def __init__(self, copies: Copies, capacity: int = _FIRST_CAPACITY) -> None:
        self._copies = copies
        self._turn = 0
        self._allocate(capacity)

    @property
    def num_bytes(self) -> int:
        return _SLOTS * self._capacity

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        starts, end = packed_offsets([array.nbytes for array in arrays])
        if end > self._capacity:
            self._grow(end)
        self._released[self._turn - 1] = self._copies.mark()  # of the call before: all its kernels have been started
        host, device = self._hosts[self._turn], self._devices[self._turn]
        self._sent[self._turn].synchronize()
        packed = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._sent[self._turn] = self._copies.upload(host[:end], device[:end], self._released[self._turn])
        self._turn = (self._turn + 1) % _SLOTS
        return [_view(device, start, array) for array, start in zip(arrays, starts, strict=True)]

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._hosts = [self._copies.host_buffer(capacity) for _ in range(_SLOTS)]
        self._devices = [self._copies.device_buffer(capacity) for _ in range(_SLOTS)]
        now = self._copies.mark()
        self._sent: list[Event] = [now] * _SLOTS
        self._released: list[Event] = [now] * _SLOTS

    def _grow(self, needed: int) -> None:
        self._copies.mark().synchronize()  # nothing reads the old buffers any more
        for event in self._sent:
            event.synchronize()
        self._allocate(max(2 * self._capacity, needed))


def packed_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned places of pieces of these sizes one after the other, and the end of the last."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def _view(buffer: torch.Tensor, start: int, array: np.ndarray) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)


def fetch(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of tensors that lie on one device, on the host: with one copy, and one wait, for all of them."""
    if all(tensor.is_cpu for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    starts, end = packed_offsets([tensor.nbytes for tensor in tensors])
    packed = torch.empty(end, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, starts, strict=True):
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return unpack(packed.cpu(), tensors)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The arrays in a buffer uint8 on the host that was packed from `like`."""
    starts, _ = packed_offsets([tensor.nbytes for tensor in like])
    return [
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).numpy()
        for tensor, start in zip(like, starts, strict=True)
    ]
