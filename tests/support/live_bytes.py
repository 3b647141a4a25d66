"""Counts the memory of tensors that are made while a block runs, at every operation in it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak` is the most that new storages held at one time; `known` tensors and views of theirs are not new.

    It sees every operation on plain tensors, those inside libraries and collectives too, and follows each storage by a
    weak reference until it is freed. `settle` seconds are waited at each new peak, for threads that let go of memory a
    moment after they have told so, as gloo's do; where there are none, 0 is as right and much faster.
    """

    def __init__(self, known: Iterable[torch.Tensor], settle: float = 0.05) -> None:
        super().__init__()
        self._settle = settle
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self.live > self.peak:
            time.sleep(self._settle)
            self.peak = max(self.peak, self.live)
        return result
