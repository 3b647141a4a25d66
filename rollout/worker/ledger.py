"""Who holds which bytes, and what each gave back, checked against the operating system or the device's driver."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rollout.worker.slab import Slab, resident_bytes_of


class Holder(Protocol):
    """Something that holds memory and can give it back; `Slab` is one."""

    @property
    def num_bytes(self) -> int: ...

    def resident_bytes(self) -> int: ...

    def release(self) -> None: ...

    def resume(self) -> int:
        """Takes the memory into use again, if it was released; the bytes that this took at once. Where it raises, the
        memory stays released."""
        ...


@dataclass(frozen=True, slots=True)
class CountedHolder:
    """Memory that is counted by a function: all of it is resident, and `free` (if there is one) gives it back."""

    count: Callable[[], int]
    free: Callable[[], None] | None = None

    @property
    def num_bytes(self) -> int:
        return self.count()

    def resident_bytes(self) -> int:
        return self.count()

    def release(self) -> None:
        if self.free is not None:
            self.free()

    def resume(self) -> int:
        """What was freed is made again where it is needed."""
        return 0


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One owner: bytes of address space or tensors it keeps, and bytes of physical memory it holds now."""

    owner: str
    reserved: int
    resident: int
    on_host: bool = False  # memory of the host, held by an engine that runs on another device


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """All owners, and the memory in use on the engine's device: on a CPU the resident memory of the whole process, on
    CUDA what the driver says is taken (by other processes too), in bytes."""

    entries: tuple[LedgerEntry, ...]
    process_resident: int

    def __getitem__(self, owner: str) -> LedgerEntry:
        for entry in self.entries:
            if entry.owner == owner:
                return entry
        raise KeyError(f"{owner!r} holds no memory; owners: {', '.join(entry.owner for entry in self.entries)}")

    @property
    def accounted(self) -> int:
        """Bytes in use on the engine's device that have an owner."""
        return sum(entry.resident for entry in self.entries if not entry.on_host)

    @property
    def unaccounted(self) -> int:
        """Bytes in use that are not the engine's: the interpreter, libraries, caches, the user's own."""
        return self.process_resident - self.accounted

    def __str__(self) -> str:
        rows = [(e.owner, format_bytes(e.reserved), format_bytes(e.resident)) for e in self.entries]
        rows = [("owner", "reserved", "resident"), *rows, ("(others)", "", format_bytes(self.unaccounted))]
        rows.append(("process", "", format_bytes(self.process_resident)))
        width = max(12, *(len(owner) for owner, _, _ in rows))
        return "\n".join(f"{owner:<{width}} {reserved:>10} {resident:>10}" for owner, reserved, resident in rows)


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What each owner gave back, and what the operating system or the driver says about it, in bytes."""

    released: dict[str, int]  # what lay on the engine's device
    resident_before: int  # without what the process held unused, which went back first
    resident_after: int
    released_on_host: dict[str, int] = field(default_factory=dict)  # by an engine that runs on another device

    @property
    def total_released(self) -> int:
        return sum(self.released.values())

    @property
    def difference(self) -> int:
        """The drop that the operating system or the driver saw, less what the owners say they gave back."""
        return self.resident_before - self.resident_after - self.total_released

    def __str__(self) -> str:
        owners = ", ".join(f"{owner} {format_bytes(count)}" for owner, count in self.released.items()) or "nothing"
        return (
            f"released {format_bytes(self.total_released)} ({owners}); process "
            f"{format_bytes(self.resident_before)} -> {format_bytes(self.resident_after)}, "
            f"unexplained {format_bytes(self.difference)}"
        )


@dataclass(frozen=True, slots=True)
class WakeReport:
    """What each owner took into use again, and what the operating system or the driver says about it, in bytes. On a
    CPU that is nothing yet: each page comes when it is written."""

    resumed: dict[str, int]  # what lies on the engine's device
    resident_before: int
    resident_after: int
    resumed_on_host: dict[str, int] = field(default_factory=dict)  # by an engine that runs on another device

    @property
    def total_resumed(self) -> int:
        return sum(self.resumed.values())

    @property
    def difference(self) -> int:
        """The rise that the operating system or the driver saw, less what the owners say they took."""
        return self.resident_after - self.resident_before - self.total_resumed


class MemoryLedger:
    """The engine's owners of memory (`weights`, `kv_cache`, `swap`, `workspaces`, `buffers`, ...)."""

    def __init__(self, used: Callable[[], int] | None = None, trim: Callable[[], None] | None = None) -> None:
        """`used` counts the bytes in use on the device, `trim` returns those held unused; by default this process's."""
        self._holders: dict[str, list[Holder]] = {}
        self._on_host: set[str] = set()
        self._used = used or process_resident_bytes
        self._trim = trim or trim_heap

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._holders)

    def register(
        self,
        owner: str,
        holder: Holder | Callable[[], int],
        release: Callable[[], None] | None = None,
        on_host: bool = False,
    ) -> None:
        """Adds memory, or a function that counts bytes (with the function that gives them back), to an owner."""
        if callable(holder):
            holder = CountedHolder(holder, release)
        elif release is not None:
            raise ValueError(f"release is for a counting function; {owner!r} was given {type(holder).__name__}")
        self._holders.setdefault(owner, []).append(holder)
        if on_host:
            self._on_host.add(owner)

    def unregister(self, owner: str) -> None:
        """Forgets an owner that has come and gone. `ValueError` for one that is not registered."""
        self._known([owner])
        del self._holders[owner]
        self._on_host.discard(owner)

    def report(self) -> LedgerReport:
        """What every owner holds now."""
        resident = self._resident(self._holders)
        entries = tuple(
            LedgerEntry(
                owner,
                sum(h.num_bytes for h in holders),
                self._sum(owner, resident),
                owner in self._on_host,
            )
            for owner, holders in self._holders.items()
        )
        return LedgerReport(entries, self._used())

    def _of(self, owners: Iterable[str]) -> list[Holder]:
        return [holder for owner in owners for holder in self._holders[owner]]

    def _sum(self, owner: str, counts: dict[int, int]) -> int:
        return sum(counts[id(holder)] for holder in self._holders[owner])

    def _resident(self, owners: Iterable[str]) -> dict[int, int]:
        """Resident bytes of the owners' holders, by their identity; all slabs are counted in one pass."""
        holders = self._of(owners)
        slabs = [holder for holder in holders if isinstance(holder, Slab)]
        resident = dict(zip(map(id, slabs), resident_bytes_of(slabs), strict=True))
        return resident | {id(h): h.resident_bytes() for h in holders if id(h) not in resident}

    def release(self, owners: Iterable[str]) -> SleepReport:
        """Gives the owners' memory back. `ValueError` for an owner that is not registered."""
        owners = self._known(owners)
        self._trim()  # else what was unused before would look as if the owners had given it back
        before = self._used()
        held = self._resident(owners)
        for holder in self._of(owners):
            holder.release()
        left = self._resident(owners)
        released = {owner: self._sum(owner, held) - self._sum(owner, left) for owner in owners}
        self._trim()
        on_host = {owner: count for owner, count in released.items() if owner in self._on_host}
        on_device = {owner: count for owner, count in released.items() if owner not in self._on_host}
        return SleepReport(on_device, before, self._used(), on_host)

    def resume(self, owners: Iterable[str]) -> WakeReport:
        """Takes the owners' memory into use again. `ValueError` for an owner that is not registered.

        Where one of them cannot, what this call has taken is given back before the error is raised.
        """
        owners = self._known(owners)
        before = self._used()
        resumed = dict.fromkeys(owners, 0)
        taken: list[Holder] = []
        try:
            for owner in owners:
                for holder in self._holders[owner]:
                    count = holder.resume()
                    resumed[owner] += count
                    if count:  # else it was awake, and holds what must not get lost
                        taken.append(holder)
        except BaseException:
            for holder in reversed(taken):
                holder.release()
            self._trim()
            raise
        on_host = {owner: count for owner, count in resumed.items() if owner in self._on_host}
        on_device = {owner: count for owner, count in resumed.items() if owner not in self._on_host}
        return WakeReport(on_device, before, self._used(), on_host)

    def _known(self, owners: Iterable[str]) -> list[str]:
        owners = list(dict.fromkeys(owners))
        unknown = [owner for owner in owners if owner not in self._holders]
        if unknown:
            raise ValueError(f"unknown owners {unknown}; registered: {', '.join(self._holders)}")
        return owners


def process_resident_bytes() -> int:
    """Resident memory of this process, from `/proc/self/statm`."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def trim_heap() -> None:
    """Asks the C library to return freed heap memory to the operating system, where it knows how (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def format_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    value, sign = float(abs(count)), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} GiB"
