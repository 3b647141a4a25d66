"""Many tensors in one piece of memory: what transports that move bytes have in common.

    named ─► pack ─► Bucket(memory, entries) ── bytes, and the entries as JSON ──► unpack ─► named

A tensor is copied once, cast on the way if asked for, and its fingerprint is taken in the same pass.
Tensors never straddle buckets: one that is larger than a bucket gets a bucket of its own size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from rollout.errors import TensorKindError, TransportError
from rollout.weights.names import DRAFTER_PREFIX, is_drafters
from rollout.weights.receipt import combine
from rollout.weights.transport import NamedTensor, SendReport
from rollout_kernels import copy_and_fingerprint

_ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a bucket. `fingerprint` is of the bytes as they were packed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the bucket's beginning, a multiple of 64
    fingerprint: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in the bucket's bytes."""
        return memory[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)

    def as_json(self) -> list[Any]:
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.offset, self.fingerprint]

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """Raises `TransportError` for what `as_json` did not make."""
        try:
            name, dtype, shape, offset, fingerprint = value
            return cls(str(name), DTYPES[dtype], tuple(map(int, shape)), int(offset), int(fingerprint))
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(f"a tensor was announced in a form that is not known here: {value!r}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    memory: torch.Tensor  # uint8, at least `num_bytes` of them
    entries: tuple[Entry, ...]
    num_bytes: int


def pack(
    named: Iterable[NamedTensor],
    capacity: int,
    take: Callable[[int], torch.Tensor],
    dtype: torch.dtype | None = None,
) -> Iterator[Bucket]:
    """Packs tensors in the order in which they come; `named` is asked for the next one when the last is copied.

    `take(num_bytes)` gives uint8 memory of at least that size for one bucket: `capacity` bytes, or what a larger tensor
    needs. A bucket may be reused when the next one is asked for, if `take` does so. `dtype` casts floating-point
    tensors. Raises `TensorKindError` for a tensor without plain dense storage.
    """
    memory: torch.Tensor | None = None
    entries: list[Entry] = []
    end = 0
    for name, tensor in named:
        kind = wire_dtype(name, tensor, dtype)
        size = tensor.numel() * kind.itemsize
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if memory is not None and start + size > memory.numel():
            yield Bucket(memory, tuple(entries), end)
            memory, entries, start = None, [], 0
        if memory is None:
            memory = take(max(capacity, size))
        place = Entry(name, kind, tuple(tensor.shape), start, 0)
        entries.append(Entry(name, kind, place.shape, start, copy_and_fingerprint(place.view(memory), tensor)))
        end = start + size
    if memory is not None:
        yield Bucket(memory, tuple(entries), end)


def unpack(memory: torch.Tensor, entries: Sequence[Entry]) -> Iterator[NamedTensor]:
    """Views of the bucket's tensors, in the order in which they were packed."""
    for entry in entries:
        if entry.offset % _ALIGNMENT or entry.offset < 0 or entry.offset + entry.num_bytes > memory.numel():
            raise TransportError(f"{entry.name!r} was announced outside of its bucket of {memory.numel()} bytes")
        yield entry.name, entry.view(memory)


def wire_dtype(name: str, tensor: object, dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype a tensor travels. Raises `TensorKindError` for one that has no plain dense storage."""
    if not isinstance(tensor, torch.Tensor):
        raise TensorKindError(f"{name!r} is a {type(tensor).__name__}, not a torch tensor")
    if isinstance(tensor, DTensor):
        raise TensorKindError(
            f"{name!r} is a DTensor, sharded over ranks: send rollout.weights.trainer_tensors.policy_tensors(model)"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise TensorKindError(f"{name!r} has no dense storage (device {tensor.device}, layout {tensor.layout})")
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if kind not in DTYPES.values():
        raise TensorKindError(f"{name!r} is {kind}: a tensor must be one of {', '.join(DTYPES)} to be sent")
    return kind


@dataclass(slots=True)
class Tally:
    """What went over the wire: fingerprints by name, and the fingerprint of the whole as a receipt has it."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    largest: int = 0
    started: float = field(default_factory=time.perf_counter)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], fingerprint: int) -> None:
        self.fingerprints[name] = fingerprint
        self._tensors[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")

    def add_bucket(self, entries: Iterable[Entry], num_bytes: int) -> None:
        for entry in entries:
            self.add(entry.name, entry.dtype, entry.shape, entry.fingerprint)
        self.num_bytes += num_bytes
        self.largest = max(self.largest, num_bytes)

    @property
    def fingerprint(self) -> str | None:
        """`Receipt.parameters_fingerprint` of an engine that holds these tensors in these dtypes; None without any."""
        own = {name: tensor for name, tensor in self._tensors.items() if not is_drafters(name)}
        return combine(own, self.fingerprints) if own else None

    @property
    def drafter_fingerprint(self) -> str | None:
        """`Receipt.drafter_fingerprint`, likewise: over a drafter's own names. None without any of its tensors."""
        names = {name.removeprefix(DRAFTER_PREFIX): name for name in self._tensors if is_drafters(name)}
        if not names:
            return None
        return combine(
            {short: self._tensors[name] for short, name in names.items()},
            {short: self.fingerprints[name] for short, name in names.items()},
        )

    def end(self) -> dict[str, Any]:
        """What the sending side says at the end of a policy."""
        return {"num_tensors": len(self._tensors), "fingerprint": combine(self._tensors, self.fingerprints)}

    def check_end(self, told: Mapping[str, Any]) -> None:
        """Raises `TransportError` where the end that the sending side told is not that of what was announced."""
        mine = self.end()
        wrong = [
            f"{key} {told.get(key)} was sent, {value} arrived" for key, value in mine.items() if told.get(key) != value
        ]
        if wrong:
            raise TransportError(f"what arrived is not the policy that was sent: {'; '.join(wrong)}")

    def report(self) -> SendReport:
        return SendReport(
            num_tensors=len(self._tensors),
            num_bytes=self.num_bytes,
            seconds=time.perf_counter() - self.started,
            fingerprint=self.fingerprint,
            drafter_fingerprint=self.drafter_fingerprint,
            largest_bucket=self.largest,
        )


@contextmanager
def to_the_end(named: Iterable[NamedTensor]) -> Iterator[Iterator[NamedTensor]]:
    """`named` as an iterator for a block; if the block raises, the rest is consumed before the error goes on.

    Producing the tensors may be a collective of the trainer's ranks: a rank that leaves early would leave the others
    waiting. Where `named` itself has raised there is nothing left to consume.
    """
    source = iter(named)
    try:
        yield source
    except Exception:  # not an interruption: somebody who presses Ctrl-C does not want to wait for the rest
        for _ in source:
            pass
        raise


class Session(Protocol):
    """One policy on its way, as a transport of buckets sends it."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory for the next bucket, uint8, once nobody needs what was in it."""
        ...

    def announce(self, bucket: Bucket) -> None: ...

    def end(self, told: Mapping[str, Any]) -> None:
        """That was the whole policy; returns when everybody has it."""
        ...

    def give_up(self, reason: str) -> None: ...


def send_policy(
    session: Session, named: Iterable[NamedTensor], bucket_bytes: int, dtype: torch.dtype | None
) -> SendReport:
    """Sends all of `named` in buckets. An error is told to the other end, and raised once `named` has ended."""
    tally = Tally()
    with to_the_end(named) as source:
        try:
            for bucket in pack(source, bucket_bytes, session.take, dtype):
                session.announce(bucket)
                tally.add_bucket(bucket.entries, bucket.num_bytes)
            session.end(tally.end())
        except BaseException as error:
            session.give_up(f"{type(error).__name__}: {error}")
            raise
    return tally.report()


def check_above_zero(**values: float) -> None:
    """Raises `ValueError` naming the first of `values` that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r} is not valid: it must be above 0")


def only_consumed(named: Iterable[NamedTensor]) -> SendReport:
    """The report of a rank that takes part in producing the tensors and sends none of them."""
    started = time.perf_counter()
    count = sum(1 for _ in named)
    return SendReport(count, num_bytes=0, seconds=time.perf_counter() - started, fingerprint=None)
