"""A lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """Like `threading.Lock` as a context manager, not re-entrant; who asked first gets it first.

    A thread that steps the engine releases and takes the lock again at once. With an ordinary lock it would win
    against a thread that waits to put the engine to sleep, for as long as there is work.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()  # held by the one thread that waits next
        self._lock = threading.Lock()

    def __enter__(self) -> FairLock:
        with self._gate:
            self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
