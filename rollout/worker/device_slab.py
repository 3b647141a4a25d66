"""Memory of a device that goes back to its driver while the tensors over it exist."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch


class _Carved:
    """Tensors that are carved one after the other from one storage."""

    keeps_addresses: bool

    def __init__(self, owner: str, base: torch.Tensor) -> None:
        """`base`: uint8, one dimension, the whole of its storage."""
        self.owner = owner
        self.num_bytes = base.numel()
        self._base = base
        self._used = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are not carved yet."""
        return self.num_bytes - self._used

    def carve(self, shape: Sequence[int], dtype: torch.dtype, alignment: int = 64) -> torch.Tensor:
        """A contiguous tensor over the next free bytes, zeros until written. `ValueError` if it does not fit."""
        size = math.prod(shape) * dtype.itemsize
        start = -(-self._used // alignment) * alignment
        if start + size > self.num_bytes:
            raise ValueError(
                f"memory of {self.owner!r} has {max(self.num_bytes - start, 0)} of {self.num_bytes} bytes left, "
                f"{tuple(shape)} of {dtype} needs {size}"
            )
        self._used = start + size
        return self._base[start : start + size].view(dtype).view(tuple(shape))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.owner!r}, num_bytes={self.num_bytes}, free_bytes={self.free_bytes})"


class StorageSlab(_Carved):
    """One storage that is shrunk to nothing and grown again: every tensor over it follows, to another address.

    Between `release` and `resume` the tensors keep their shapes but may not be touched. What was freed lies in torch's
    caching allocator until `torch.cuda.empty_cache()`, which `MemoryLedger.release` has its platform call.
    """

    keeps_addresses = False

    def __init__(self, owner: str, num_bytes: int, device: torch.device) -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes} is not valid: a slab holds at least one byte")
        super().__init__(owner, torch.zeros(num_bytes, dtype=torch.uint8, device=device))

    def release(self) -> None:
        self._base.untyped_storage().resize_(0)

    def resume(self) -> int:
        """The bytes that this took. Raises `torch.OutOfMemoryError`, and stays released, where the device has no such
        memory left."""
        storage = self._base.untyped_storage()
        if storage.nbytes() > 0:
            return 0
        storage.resize_(self.num_bytes)
        try:
            with torch.inference_mode(self._base.is_inference()):
                self._base.zero_()
        except BaseException:
            self.release()
            raise
        return self.num_bytes

    def resident_bytes(self) -> int:
        return self._base.untyped_storage().nbytes()


class MemorySaver(Protocol):
    """The object `torch_memory_saver.torch_memory_saver`: what is allocated in a region can be paused and resumed."""

    def region(self, tag: str) -> AbstractContextManager[None]: ...

    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None: ...


class SavedSlab(_Carved):
    """Memory whose pages torch_memory_saver takes away and gives back at the same addresses: CUDA graphs stay valid."""

    keeps_addresses = True
    _count = 0

    def __init__(self, owner: str, num_bytes: int, device: torch.device, saver: MemorySaver) -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes} is not valid: a slab holds at least one byte")
        SavedSlab._count += 1
        self._saver = saver
        self._tag = f"rollout-{owner}-{SavedSlab._count}"  # its own: two engines may live in one process
        self._paused = False
        with saver.region(tag=self._tag):
            base = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        super().__init__(owner, base)

    def release(self) -> None:
        if not self._paused:
            self._saver.pause(self._tag)
            self._paused = True

    def resume(self) -> int:
        if not self._paused:
            return 0
        self._saver.resume(self._tag)
        self._paused = False
        try:
            self._base.zero_()
        except BaseException:
            self.release()
            raise
        return self.num_bytes

    def resident_bytes(self) -> int:
        return 0 if self._paused else self.num_bytes


def installed_memory_saver() -> MemorySaver | None:
    """torch_memory_saver, hooked into torch's allocator, where the package is installed and can work."""
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if importlib.util.find_spec("torch_memory_saver") is None or "expandable_segments:True" in allocator:
        return None
    module: Any = importlib.import_module("torch_memory_saver")
    saver = module.torch_memory_saver
    with contextlib.suppress(AttributeError):  # somebody has used it already: it stays in the mode that they chose
        saver.hook_mode = "torch"  # the other mode, "preload", needs LD_PRELOAD before the process starts
    return cast(MemorySaver, saver)
