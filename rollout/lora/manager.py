"""Which adapters an engine holds, in which slots, and which of them has to go when another is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rollout.errors import FingerprintMismatchError, PolicyUpdateError
from rollout.lora.adapter import Adapter, read_folder
from rollout.lora.memory import AdapterMemory
from rollout.lora.request import LoRARequest
from rollout.weights.receipt import combine, fingerprint_tensors


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter in memory. `request.lora_path` is empty where a policy update has put it there."""

    request: LoRARequest
    slot: int
    ranks: dict[str, int]  # layer -> rank
    fingerprints: dict[str, int] = field(repr=False)  # of what lies in the slot
    key: str = ""  # name and content: part of every KV block's hash
    first_path: str = ""  # where it was first read from; kept when an update replaces its tensors
    is_pinned: bool = False


class AdapterManager:
    """The adapters of one engine. `in_use` gives the slots that unfinished requests name.

    An adapter that was read from a folder makes room for another, least recently used first, unless it is pinned or in
    use. One that a policy update has put there exists nowhere else, so it stays until it is removed or replaced.
    """

    def __init__(self, memory: AdapterMemory, in_use: Callable[[], set[int]]) -> None:
        self.memory = memory
        self._in_use = in_use
        self._loaded: dict[int, LoadedAdapter] = {}  # by number, least recently used first
        self._dropped: dict[int, LoRARequest] = {}  # lost in sleep, and not loaded since

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self._loaded.values())

    def find(self, choice: LoRARequest | str) -> LoadedAdapter | None:
        """The adapter in memory that a request names; None where it has to be read from its folder.

        Raises `ValueError`, with the adapters that are known, where there is none, where sleep has dropped it, and
        where the name, the number and the path are not those of one adapter.
        """
        if isinstance(choice, str):
            found = next((adapter for adapter in self._loaded.values() if adapter.request.lora_name == choice), None)
            if found is None:
                self._check_not_dropped(choice)
                raise ValueError(f"there is no adapter {choice!r}; {self._known()}")
            return found
        found = self._loaded.get(choice.lora_int_id)
        if found is None:
            self._check_not_dropped(choice.lora_name, choice.lora_int_id)
            self.check_name_is_free(choice)
            if not choice.lora_path:
                raise ValueError(f"there is no adapter {choice.lora_name!r}, and no lora_path to read; {self._known()}")
            return None
        if found.request.lora_name != choice.lora_name:
            raise ValueError(
                f"lora_int_id={choice.lora_int_id} is the adapter {found.request.lora_name!r}, not "
                f"{choice.lora_name!r}; {self._known()}"
            )
        if choice.lora_path not in ("", found.first_path):
            raise ValueError(
                f"lora_path={choice.lora_path!r} is not where the adapter {choice.lora_name!r} in memory comes from "
                f"({found.first_path!r}): call add_lora to read it anew, or give it another number"
            )
        return found

    def resolve(self, choices: Sequence[LoRARequest | str | None]) -> list[LoadedAdapter | None]:
        """The adapter of each request, read from its folder where it is not in memory.

        Raises `ValueError` as `find` does, where the slots do not suffice for all of them, and for a folder that cannot
        be applied.
        """
        found = [None if choice is None else self.find(choice) for choice in choices]
        held = {adapter.slot for adapter in found if adapter is not None}
        for index, choice in enumerate(choices):
            if isinstance(choice, LoRARequest) and found[index] is None:
                adapter = self._loaded.get(choice.lora_int_id) or self.load(choice, held)
                self.find(choice)  # two choices of this call may contradict each other
                held.add(adapter.slot)
                found[index] = adapter
        for adapter in found:
            if adapter is not None:
                self._touch(adapter)
        return found

    def load(self, request: LoRARequest, held: set[int] | None = None) -> LoadedAdapter:
        """Reads the request's folder into memory, in the place of an adapter with its number if there is one."""
        self.check_name_is_free(request)
        present = self._loaded.get(request.lora_int_id)
        if present is not None and present.slot in self._in_use():
            raise ValueError(f"the adapter {request.lora_name!r} is in use: wait for its requests, or abort them")
        try:
            adapter = self.memory.prepared(read_folder(request.lora_path))
        except PolicyUpdateError as error:
            raise ValueError(f"lora_path={request.lora_path!r} is not valid: {error}") from error
        slot = self.slot_for(request, held or set())
        return self.put(request, slot, adapter, first_path=request.lora_path)

    def slot_for(self, request: LoRARequest, held: set[int]) -> int:
        """Where an adapter would go: its own slot, a free one, or that of an adapter which may be evicted."""
        present = self._loaded.get(request.lora_int_id)
        if present is not None:
            return present.slot
        taken = {adapter.slot for adapter in self._loaded.values()} | held
        free = [slot for slot in range(self.memory.num_slots) if slot not in taken]
        if free:
            return free[0]
        busy = held | self._in_use()
        for adapter in self._loaded.values():
            if adapter.request.lora_path and not adapter.is_pinned and adapter.slot not in busy:
                return adapter.slot
        raise ValueError(
            f"there is no room for the adapter {request.lora_name!r}: max_loras={self.memory.num_slots} and all that "
            f"are in memory are in use, pinned, or of a policy update; {self._known()}: raise max_loras, or remove_lora"
        )

    def put(self, request: LoRARequest, slot: int, adapter: Adapter, first_path: str) -> LoadedAdapter:
        """Writes a prepared adapter to a slot; another one that was there is forgotten."""
        before = self.at(slot)
        if before is not None:
            del self._loaded[before.request.lora_int_id]
        self._dropped.pop(request.lora_int_id, None)
        self.memory.write(slot, adapter)
        ranks = {name: part.rank for name, part in adapter.modules.items()}
        tensors = self.memory.tensors(slot, ranks)
        fingerprints = fingerprint_tensors(tensors)
        key = f"{request.lora_int_id} {request.lora_name} {combine(tensors, fingerprints)}"
        is_pinned = before is not None and before.request.lora_int_id == request.lora_int_id and before.is_pinned
        loaded = LoadedAdapter(request, slot, ranks, fingerprints, key, first_path, is_pinned)
        self._loaded[request.lora_int_id] = loaded
        self._use_what_is_loaded()
        return loaded

    def restore(self, slot: int, before: LoadedAdapter | None, content: Adapter | None) -> None:
        """Puts back what `snapshot` took of a slot."""
        now = self.at(slot)
        if now is not None:
            del self._loaded[now.request.lora_int_id]
        self.memory.write(slot, content)
        if before is not None:
            self._loaded[before.request.lora_int_id] = before
        self._use_what_is_loaded()

    def snapshot(self, slot: int) -> tuple[LoadedAdapter | None, Adapter | None]:
        """What `restore` needs to put a slot back as it is now."""
        before = self.at(slot)
        return before, None if before is None else self.memory.content(slot, before.ranks)

    def at(self, slot: int) -> LoadedAdapter | None:
        return next((adapter for adapter in self._loaded.values() if adapter.slot == slot), None)

    def named(self, name: str) -> LoRARequest | None:
        """The adapter with this name, in memory or dropped by sleep."""
        known = [*(adapter.request for adapter in self._loaded.values()), *self._dropped.values()]
        return next((request for request in known if request.lora_name == name), None)

    def free_number(self) -> int:
        """A number that no adapter has or had."""
        return max([0, *self._loaded, *self._dropped]) + 1

    def check_name_is_free(self, request: LoRARequest) -> None:
        """Raises `ValueError` where the name or the number is another adapter's."""
        for known in [*(adapter.request for adapter in self._loaded.values()), *self._dropped.values()]:
            same_name = known.lora_name == request.lora_name
            if same_name != (known.lora_int_id == request.lora_int_id):
                raise ValueError(
                    f"lora_name={request.lora_name!r} with lora_int_id={request.lora_int_id} is not valid: the "
                    f"{'name' if same_name else 'number'} is that of the adapter {known.lora_name!r} "
                    f"({known.lora_int_id})"
                )

    def remove(self, lora_int_id: int) -> bool:
        """Forgets an adapter; False where there is none of this number. Raises `ValueError` while it is in use."""
        if lora_int_id not in self._loaded:
            return self._dropped.pop(lora_int_id, None) is not None
        adapter = self._loaded[lora_int_id]
        if adapter.slot in self._in_use():
            raise ValueError(
                f"the adapter {adapter.request.lora_name!r} is in use: wait for its requests, or abort them"
            )
        del self._loaded[lora_int_id]
        self.memory.write(adapter.slot, None)
        self._use_what_is_loaded()
        return True

    def pin(self, lora_int_id: int) -> None:
        """Keeps an adapter in memory until it is removed. Raises `ValueError` where there is none of this number."""
        if lora_int_id not in self._loaded:
            raise ValueError(f"lora_int_id={lora_int_id!r} is no adapter in memory; {self._known()}")
        self._loaded[lora_int_id].is_pinned = True

    def drop_all(self) -> None:
        """The memory was given back: none of the adapters is loaded until it is put there again."""
        self._dropped |= {number: adapter.request for number, adapter in self._loaded.items()}
        self._loaded.clear()
        self._use_what_is_loaded()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the kernels read of all adapters: "policy/model.layers.0.self_attn.q_proj.lora_A.weight", ..."""
        return {
            f"{adapter.request.lora_name}/{name}": tensor
            for adapter in sorted(self._loaded.values(), key=lambda adapter: adapter.request.lora_int_id)
            for name, tensor in self.memory.tensors(adapter.slot, adapter.ranks).items()
        }

    def fingerprints(self) -> dict[str, int]:
        """Of `tensors`, as they were when they were written."""
        return {
            f"{adapter.request.lora_name}/{name}": value
            for adapter in self._loaded.values()
            for name, value in adapter.fingerprints.items()
        }

    def dirty(self) -> list[str]:
        """Names of the layers that hold something beside an adapter where there should be zeros."""
        return [
            f"{adapter.request.lora_name}/{name}"
            for adapter in self._loaded.values()
            for name in self.memory.dirty_padding(adapter.slot, adapter.ranks)
        ]

    def check_holds(self, adapter: LoadedAdapter, sent: Mapping[str, int]) -> None:
        """Raises `FingerprintMismatchError` unless the adapter's slot holds what has the fingerprints `sent`."""
        now = fingerprint_tensors(self.memory.tensors(adapter.slot, adapter.ranks))
        wrong = sorted(name for name in now.keys() | sent.keys() if now.get(name) != sent.get(name))
        wrong += self.memory.dirty_padding(adapter.slot, adapter.ranks)
        if wrong:
            raise FingerprintMismatchError(
                f"the adapter {adapter.request.lora_name!r} in memory is not what was sent: {', '.join(wrong[:8])}"
            )

    def _touch(self, adapter: LoadedAdapter) -> None:
        number = adapter.request.lora_int_id
        self._loaded[number] = self._loaded.pop(number)

    def _use_what_is_loaded(self) -> None:
        self.memory.use_only(name for adapter in self._loaded.values() for name in adapter.ranks)

    def _check_not_dropped(self, name: str, number: int | None = None) -> None:
        for request in self._dropped.values():
            if request.lora_name == name or request.lora_int_id == number:
                raise ValueError(
                    f"the adapter {request.lora_name!r} was dropped by sleep(level=2): load it again with a policy "
                    "update (update.load_adapter) or add_lora"
                )

    def _known(self) -> str:
        known = [f"{adapter.request.lora_name!r} ({number})" for number, adapter in self._loaded.items()]
        return f"adapters in memory: {', '.join(known) or 'none'}"
