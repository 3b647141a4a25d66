"""Memory that goes back to the operating system while the tensors over it keep their addresses."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch

_HUGE_PAGE = 2 << 20
_PROT_NONE = 0


def slab_bytes(tensors: Iterable[tuple[Sequence[int], torch.dtype]], alignment: int = 64) -> int:
    """The size of a slab from which tensors of these shapes and types can be carved, in any order."""
    return sum(_round_up(math.prod(shape) * dtype.itemsize, alignment) for shape, dtype in tensors)


class Slab:
    """A private anonymous mapping that tensors are carved from.

        slab = Slab("kv_cache", 1 << 30)
        keys = slab.carve((64, 4, 16, 16, 2), torch.bfloat16)   # zeros; no page is held until it is written
        slab.release()                                           # every page goes back; `keys` reads zeros

    A carved tensor keeps the mapping alive by itself, so a slab may be dropped before its tensors. The first and last
    page of the mapping are inaccessible, so that the kernel never merges it with a neighbour and its resident size
    can be read exactly. Linux only: elsewhere the constructor raises `OSError`.
    """

    keeps_addresses = True

    def __init__(self, owner: str, num_bytes: int, huge_pages: bool = True) -> None:
        if sys.platform != "linux":
            raise OSError(f"Slab needs Linux (MADV_DONTNEED gives zeroed pages back); this is {sys.platform}")
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes} is not valid: a slab holds at least one byte")
        self.owner = owner
        self.num_bytes = _round_up(num_bytes, mmap.PAGESIZE)
        self._used = 0
        unit = _HUGE_PAGE if huge_pages and self.num_bytes >= _HUGE_PAGE else mmap.PAGESIZE
        length = self.num_bytes + unit + 2 * mmap.PAGESIZE
        self._mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = _address(self._mapping)
        self.address = _round_up(start + mmap.PAGESIZE, unit)
        self._start = self.address - start  # of the usable part, within the mapping
        _forbid(start, self._start)
        _forbid(self.address + self.num_bytes, length - self._start - self.num_bytes)
        if unit == _HUGE_PAGE:
            self._mapping.madvise(mmap.MADV_HUGEPAGE, self._start, self.num_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that are not carved yet."""
        return self.num_bytes - self._used

    def carve(self, shape: Sequence[int], dtype: torch.dtype, alignment: int = 64) -> torch.Tensor:
        """A contiguous tensor over the next free bytes, zeros until written. `ValueError` if it does not fit."""
        count = math.prod(shape)
        offset = _round_up(self._used, alignment)
        end = offset + count * dtype.itemsize
        if end > self.num_bytes:
            raise ValueError(
                f"slab {self.owner!r} has {self.num_bytes - offset} of {self.num_bytes} bytes left, "
                f"{tuple(shape)} of {dtype} needs {count * dtype.itemsize}"
            )
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        self._used = end
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=self._start + offset)
        return flat.view(tuple(shape))

    def release(self) -> None:
        """Gives every page back to the operating system. Tensors stay valid, at the same addresses, and read zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED, self._start, self.num_bytes)

    def resume(self) -> int:
        """Nothing to do, and 0 bytes taken: the operating system gives each page back when it is written."""
        return 0

    def resident_bytes(self) -> int:
        """Bytes of physical memory that the slab holds now, as `/proc/self/smaps` counts them."""
        return resident_bytes_of([self])[0]

    def __repr__(self) -> str:
        return f"Slab({self.owner!r}, num_bytes={self.num_bytes}, free_bytes={self.free_bytes})"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _forbid(address: int, length: int) -> None:
    """Makes whole pages of a mapping inaccessible."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect failed on the edge of a slab")


def resident_bytes_of(slabs: Sequence[Slab]) -> list[int]:
    """`resident_bytes` of each slab, for the price of one: the kernel counts all of the process's pages each time.

    Sums `Rss` over the mappings inside each slab. The kernel's shared zero pages are not counted.
    """
    bounds = sorted((slab.address, slab.address + slab.num_bytes, index) for index, slab in enumerate(slabs))
    resident = [0] * len(slabs)
    inside: int | None = None  # index of the slab that the mapping belongs to
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if line.startswith("Rss:"):
                if inside is not None:
                    resident[inside] += int(line.split()[1]) * 1024
            elif line[0] in "0123456789abcdef":
                low, high = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
                inside = next((index for start, end, index in bounds if start <= low and high <= end), None)
    return resident
