"""The processes of a data-parallel run: how many there are, and what they tell each other.

    ranks = Ranks(torch.distributed.group.WORLD)        under torchrun, after `init_process_group`
    ranks = Ranks()                                     one process: nothing below costs anything

Rank 0 runs the session, and decides. The others follow: what needs all ranks says so with `calling`, and they call the
same of theirs.

    rank 0      session ─► trainer.step(7) ─ calling("step", 7) ─┬─► sample, learn, update ─► metrics, files
    others      follow({"step": trainer.step, ...}) ─────────────┴─► sample, learn, update ─► wait for the next call

Every method but `part` is collective: all ranks call it, in the same order. Sums and what is gathered are the same on
all ranks, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rollout.errors import RolloutError

T = TypeVar("T")

BUCKET_BYTES = 32 << 20  # of small tensors that are summed together


class RankFailedError(RolloutError):
    """Another rank has failed. The message says which, and with what."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a rank sends in place of a value, once it has failed."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class _Call:
    """What rank 0 asks the others to call; without a name it is the end, with the result of the run."""

    name: str | None
    arguments: tuple[Any, ...] = ()


class Ranks:
    """The ranks of a process group, or one process alone (`group` of None)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._depth = 0  # of calls that all ranks are in
        self._has_failed = False  # and the others know, or are where they can't be told

    @property
    def is_main(self) -> bool:
        """Whether this one runs the session."""
        return self.rank == 0

    def part(self, count: int) -> range:
        """This rank's share of `count` places. The shares stand one after the other, and differ by at most one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, value: T) -> list[T]:
        """Every rank's value (anything that can be pickled), in their order.

        Raises `RankFailedError` if another rank has failed in a block of `together`, has ended, or does not answer.
        """
        values = self._exchange(value)
        for each in values:
            if isinstance(each, _Failure):
                self._has_failed = True
                raise RankFailedError(f"rank {each.rank} failed with {each.text}")
        return values

    def _exchange(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:  # all that gloo says, be it a connection that was closed or a time limit
            self._has_failed = True
            raise RankFailedError(f"another rank has ended or does not answer: {error}") from error
        return values

    def gather_all(self, values: Sequence[T]) -> tuple[list[T], slice]:
        """The values of all ranks in one list, rank after rank, and where in it this rank's own are."""
        if self._group is None:
            return list(values), slice(0, len(values))
        parts = self.gather(list(values))
        first = sum(len(part) for part in parts[: self.rank])
        return [value for part in parts for value in part], slice(first, first + len(values))

    def sum(self, *values: int) -> list[int]:
        """Each value's sum over the ranks."""
        return [sum(parts) for parts in zip(*self.gather(values), strict=True)]

    def most(self, value: int) -> int:
        """The largest of the ranks' values."""
        return max(self.gather(value))

    def from_main(self, value: T) -> T:
        """Rank 0's value (anything that can be pickled), on all ranks."""
        return self.gather(value if self.is_main or self._group is None else None)[0]  # type: ignore[return-value]

    @torch.no_grad()
    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replaces each tensor by its sum over the ranks, in place. All ranks have tensors of the same shapes and
        dtypes, in the same order; small ones travel together."""
        if self._group is None:
            return
        for bucket in _buckets(tensors):
            if len(bucket) == 1:
                dist.all_reduce(bucket[0], group=self._group)
                continue
            joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(joined, group=self._group)
            for tensor, part in zip(bucket, joined.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    @torch.no_grad()
    def copy_from_main(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor's values by those that rank 0 has, in place."""
        if self._group is not None:
            dist.broadcast(tensor, group=self._group, group_src=0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that all ranks come out of, or none: where one fails, it raises its own error, and the others
        `RankFailedError` with its message.

        The block calls no collective but those that gather, in which the others learn of it, too: a sum of tensors in
        it would wait for the rank that has failed.
        """
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise
        self.gather(None)

    def _tell(self, error: Exception) -> None:
        """Once: those that have heard of it have left."""
        if not self._has_failed:
            self._has_failed = True
            self._exchange(_Failure(self.rank, f"{type(error).__name__}: {error}"))

    @contextmanager
    def calling(self, name: str, *arguments: Any) -> Iterator[None]:
        """The body of what all ranks call `name`: rank 0 lets the others begin it. Within another such body, it is a
        part of that."""
        if self._group is not None and self.is_main and self._depth == 0:
            self._exchange(_Call(name, arguments))
        self._depth += 1
        try:
            yield
        except BaseException:
            self._has_failed = True  # whoever has not been told waits elsewhere: the end of this process ends it
            raise
        finally:
            self._depth -= 1

    def lead(self, session: Callable[[], T]) -> T:
        """Rank 0: runs the session, which calls the others, and gives them its result in the end, or its error."""
        try:
            result = session()
        except Exception as error:
            self._tell(error)
            raise
        self._exchange(_Call(None, (result,)))
        return result

    def follow(self, methods: Mapping[str, Callable[..., object]]) -> Any:
        """The other ranks: calls what rank 0 calls, until its session ends. Returns the session's result.

        Raises `RankFailedError` if the session, or a call on another rank, has failed.
        """
        while True:
            calls: list[Any] = self.gather(None)
            call = calls[0]
            assert isinstance(call, _Call)
            if call.name is None:
                return call.arguments[0]
            methods[call.name](*call.arguments)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of one dtype that together have at most `BUCKET_BYTES`, or a larger one alone."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
