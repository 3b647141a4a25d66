"""A lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class LockTimeoutError(TimeoutError):
    """Another thread has held the lock for too long."""


class FairLock:
    """Like `threading.Lock` as a context manager, not re-entrant; first come, first served.

    A thread that steps the engine releases and takes the lock again at once. With an ordinary lock it would win
    against a thread that waits to put the engine to sleep, for as long as there is work.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next_ticket = 0
        self._serving = 0
        self._given_up: set[int] = set()  # tickets of threads that wait no more, interrupted or out of time
        self._owner: int | None = None  # the thread that has it

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock."""
        return self._owner == threading.get_ident()

    @contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """Holds the lock for a block. Raises `LockTimeoutError` if that takes longer than so many seconds."""
        self._take(seconds)
        try:
            yield
        finally:
            self._release()

    def __enter__(self) -> FairLock:
        self._take(None)
        return self

    def _take(self, seconds: float | None) -> None:
        with self._turn:
            ticket = self._next_ticket
            self._next_ticket += 1
            try:
                if not self._turn.wait_for(lambda: self._serving == ticket, seconds):
                    raise LockTimeoutError("another thread's call still holds the engine")
                self._owner = threading.get_ident()
            except BaseException:
                if self._serving == ticket:
                    self._pass_on()
                else:
                    self._given_up.add(ticket)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        with self._turn:
            self._pass_on()

    def _pass_on(self) -> None:
        self._owner = None
        self._serving += 1
        while self._serving in self._given_up:
            self._given_up.remove(self._serving)
            self._serving += 1
        self._turn.notify_all()
