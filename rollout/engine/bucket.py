"""Memory that an engine and its worker processes share: tensors on their way to all of them, one bucket at a time.

It has no name in a file system: the worker processes inherit its descriptor, and it is gone with the last of them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

ALIGNMENT = 64


class SharedBucket:
    """A stretch of memory behind a file descriptor; both ends have one of these."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedBucket:
        """Empty: takes no memory before `reserve`."""
        return cls(os.memfd_create("rollout-bucket"))

    @property
    def num_bytes(self) -> int:
        return self._bytes.nbytes

    def reserve(self, num_bytes: int) -> None:
        """Makes it at least so large. Tensors that were viewed in it are invalid afterwards."""
        if num_bytes > self.num_bytes:
            os.ftruncate(self.descriptor, num_bytes)
            self.map(num_bytes)

    def map(self, num_bytes: int) -> None:
        """Sees the first `num_bytes` bytes, which the other end has reserved."""
        if num_bytes != self.num_bytes:
            self._map = mmap.mmap(self.descriptor, num_bytes)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from `offset`, which `ALIGNMENT` divides."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset : offset + num_bytes].view(dtype).view(tuple(shape))

    def empty(self) -> None:
        """Gives the memory back to the operating system, for both ends; the next bytes written take it anew."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Gives back the descriptor; the memory too, once no tensor lies in it."""
        self._bytes, self._map = torch.empty(0, dtype=torch.uint8), None
        os.close(self.descriptor)
