"""Who holds which bytes, and what each gave back, checked against the operating system."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


class Holder(Protocol):
    """Something that holds memory and can give it back; `Slab` is one."""

    @property
    def num_bytes(self) -> int: ...

    def resident_bytes(self) -> int: ...

    def release(self) -> None: ...


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


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One owner: bytes of address space or tensors it keeps, and bytes of physical memory it holds now."""

    owner: str
    reserved: int
    resident: int


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """All owners, and the resident memory of the whole process, in bytes."""

    entries: tuple[LedgerEntry, ...]
    process_resident: int

    def __getitem__(self, owner: str) -> LedgerEntry:
        for entry in self.entries:
            if entry.owner == owner:
                return entry
        raise KeyError(f"{owner!r} holds no memory; owners: {', '.join(entry.owner for entry in self.entries)}")

    @property
    def accounted(self) -> int:
        """Resident bytes that have an owner."""
        return sum(entry.resident for entry in self.entries)

    @property
    def unaccounted(self) -> int:
        """Resident bytes of the process that are not the engine's: the interpreter, libraries, the user's own."""
        return self.process_resident - self.accounted

    def __str__(self) -> str:
        lines = [f"{'owner':<12} {'reserved':>10} {'resident':>10}"]
        lines += [f"{e.owner:<12} {format_bytes(e.reserved):>10} {format_bytes(e.resident):>10}" for e in self.entries]
        lines.append(f"{'(others)':<12} {'':>10} {format_bytes(self.unaccounted):>10}")
        lines.append(f"{'process':<12} {'':>10} {format_bytes(self.process_resident):>10}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What each owner gave back, and what the operating system says about it, in bytes."""

    released: dict[str, int]
    resident_before: int
    resident_after: int

    @property
    def total_released(self) -> int:
        return sum(self.released.values())

    @property
    def difference(self) -> int:
        """The drop that the operating system saw, less what the owners say they gave back."""
        return self.resident_before - self.resident_after - self.total_released

    def __str__(self) -> str:
        owners = ", ".join(f"{owner} {format_bytes(count)}" for owner, count in self.released.items()) or "nothing"
        return (
            f"released {format_bytes(self.total_released)} ({owners}); process "
            f"{format_bytes(self.resident_before)} -> {format_bytes(self.resident_after)}, "
            f"unexplained {format_bytes(self.difference)}"
        )


class MemoryLedger:
    """The engine's owners of memory (`weights`, `kv_cache`, `swap`, `workspaces`, `buffers`, ...)."""

    def __init__(self) -> None:
        self._holders: dict[str, list[Holder]] = {}

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._holders)

    def register(
        self, owner: str, holder: Holder | Callable[[], int], release: Callable[[], None] | None = None
    ) -> None:
        """Adds a slab, or a function that counts bytes (with the function that gives them back), to an owner."""
        if callable(holder):
            holder = CountedHolder(holder, release)
        elif release is not None:
            raise ValueError(f"release is for a counting function; {owner!r} was given {type(holder).__name__}")
        self._holders.setdefault(owner, []).append(holder)

    def report(self) -> LedgerReport:
        """What every owner holds now."""
        entries = tuple(
            LedgerEntry(owner, sum(h.num_bytes for h in holders), sum(h.resident_bytes() for h in holders))
            for owner, holders in self._holders.items()
        )
        return LedgerReport(entries, process_resident_bytes())

    def release(self, owners: Iterable[str]) -> SleepReport:
        """Gives the owners' memory back to the operating system. `ValueError` for an owner that is not registered."""
        owners = list(dict.fromkeys(owners))
        unknown = [owner for owner in owners if owner not in self._holders]
        if unknown:
            raise ValueError(f"unknown owners {unknown}; registered: {', '.join(self._holders)}")
        before = process_resident_bytes()
        released = {owner: sum(map(_release, self._holders[owner])) for owner in owners}
        trim_heap()
        return SleepReport(released, before, process_resident_bytes())


def _release(holder: Holder) -> int:
    held = holder.resident_bytes()
    holder.release()
    return held - holder.resident_bytes()


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
