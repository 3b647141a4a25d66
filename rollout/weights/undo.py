"""What a policy update overwrites, kept until the update has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from rollout_kernels import copy_and_fingerprint


class UndoMemory(Protocol):
    """Host memory to carve tensors from, such as a `Slab`. Pages are taken when they are written."""

    def carve(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor: ...

    def release(self) -> None: ...


class UndoLog:
    """Old values of an engine's tensors, in the order in which they were overwritten.

    `memory` has room for all `tensors`; it is given back by `close`, which then calls `on_close`.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], memory: UndoMemory, on_close: Callable[[], None] | None = None
    ) -> None:
        self._tensors = tensors
        self._memory = memory
        self._on_close = on_close
        self._saved: dict[str, torch.Tensor] = {}

    def save(self, name: str) -> None:
        """Keeps the present value of a tensor; only the first call for a name counts."""
        if name not in self._saved:
            tensor = self._tensors[name]
            old = self._memory.carve(tensor.shape, tensor.dtype)
            copy_and_fingerprint(old, tensor)  # faster than torch's copy where other threads keep the cores busy
            self._saved[name] = old

    def restore(self) -> None:
        """Writes every value that was kept back to where it came from."""
        for name, old in self._saved.items():
            copy_and_fingerprint(self._tensors[name], old)

    def close(self) -> None:
        """Forgets the values and gives their memory back."""
        self._saved.clear()
        self._memory.release()
        if self._on_close is not None:
            self._on_close()
