"""The order of requests: a list kept sorted by rank, so that who goes first never depends on how it got there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from rollout.request import Request

_rank = attrgetter("rank")


class RequestQueue:
    """Requests sorted by their rank, which is unique. A preempted request returns to where it stood."""

    def __init__(self) -> None:
        self.items: list[Request] = []  # lowest rank first

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.items)

    def add(self, request: Request) -> None:
        items = self.items
        if not items or items[-1].rank < request.rank:
            items.append(request)
        else:
            insort(items, request, key=_rank)

    def discard(self, request: Request) -> bool:
        """Takes `request` out; False where it is not here."""
        position = bisect_left(self.items, request.rank, key=_rank)
        if position == len(self.items) or self.items[position] is not request:
            return False
        del self.items[position]
        return True

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the order is broken or two requests share a rank."""
        ranks = [request.rank for request in self.items]
        assert all(a < b for a, b in pairwise(ranks)), f"the queue is out of order: {ranks}"
