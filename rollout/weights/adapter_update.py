"""The adapters of a policy update: checked and copied aside, written when everything is there, put back if it fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout.errors import AdapterTensorError, DuplicateTensorError
from rollout.lora.adapter import Adapter, from_pairs, from_peft_model, read_folder
from rollout.lora.manager import AdapterManager, LoadedAdapter
from rollout.lora.request import LoRARequest
from rollout.weights.receipt import fingerprint_tensors

if TYPE_CHECKING:
    from peft import LoraConfig

AdapterSource = torch.nn.Module | str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    request: LoRARequest
    slot: int
    first_path: str
    adapter: Adapter  # a copy in the engine's dtype
    fingerprints: dict[str, int]  # of that copy


def read_adapter(source: AdapterSource, config: LoraConfig | Mapping[str, Any] | None, adapter: str | None) -> Adapter:
    """An adapter from a PEFT model, a folder, or pairs with their `config`. Raises as `rollout.lora.adapter` does."""
    if isinstance(source, torch.nn.Module):
        if config is not None:
            raise AdapterTensorError("a PEFT model has its configuration with it: leave config out")
        return from_peft_model(source, adapter)
    if adapter is not None:
        raise AdapterTensorError(f"adapter={adapter!r} is only used with a PEFT model, which may hold several")
    if isinstance(source, (str, Path)):
        if config is not None:
            raise AdapterTensorError("an adapter's folder has its configuration in it: leave config out")
        return read_folder(source)
    if config is None:
        raise AdapterTensorError(
            "names and tensors need config: the LoraConfig, or adapter_config.json as a dictionary"
        )
    return from_pairs(source, config)


class AdapterUpdate:
    """What one policy update does to the adapters of `manager`, in the order of the methods."""

    def __init__(self, manager: AdapterManager | None) -> None:
        self._manager = manager
        self._staged: dict[str, _Staged] = {}
        self._before: list[tuple[int, LoadedAdapter | None, Adapter | None]] = []  # slots and what they held
        self._written: list[tuple[LoadedAdapter, _Staged]] = []

    @property
    def is_staged(self) -> bool:
        """Whether the update brings an adapter."""
        return bool(self._staged)

    def stage(self, name: str, source: AdapterSource, config: Any, adapter: str | None) -> list[str]:
        """Reads and checks an adapter, and keeps a copy. Nothing of the engine changes. Returns the layers' names."""
        manager = self._manager
        if manager is None:
            raise AdapterTensorError("the engine applies no adapters: give it enable_lora=True, or send merged weights")
        if name in self._staged:
            raise DuplicateTensorError(f"the adapter {name!r} was loaded twice in one policy update")
        known = manager.named(name)
        taken = [staged.request.lora_int_id for staged in self._staged.values()]
        number = max([manager.free_number(), *(number + 1 for number in taken)]) if known is None else known.lora_int_id
        request = LoRARequest(name, number)
        prepared = manager.memory.prepared(read_adapter(source, config, adapter))
        slot = manager.slot_for(request, {staged.slot for staged in self._staged.values()})
        present = manager.at(slot)
        same = present is not None and present.request.lora_int_id == number
        path = present.first_path if present is not None and same else ""
        fingerprints = fingerprint_tensors(manager.memory.expected(prepared))
        self._staged[name] = _Staged(request, slot, path, prepared, fingerprints)
        return list(prepared.modules)

    def write(self) -> int:
        """Puts the adapters into their slots. Returns the bytes that were copied."""
        copied = 0
        for staged in self._staged.values():
            assert self._manager is not None
            self._before.append((staged.slot, *self._manager.snapshot(staged.slot)))
            loaded = self._manager.put(staged.request, staged.slot, staged.adapter, staged.first_path)
            self._written.append((loaded, staged))
            copied += sum(tensor.nbytes for tensor in self._manager.memory.expected(staged.adapter).values())
        return copied

    def verify(self) -> None:
        """Raises `FingerprintMismatchError` unless the slots hold what was given to `stage`, bit for bit."""
        for loaded, staged in self._written:
            assert self._manager is not None
            self._manager.check_holds(loaded, staged.fingerprints)

    def restore(self) -> None:
        """The update has failed: every slot holds again what it held before."""
        while self._before:
            assert self._manager is not None
            self._manager.restore(*self._before.pop())
