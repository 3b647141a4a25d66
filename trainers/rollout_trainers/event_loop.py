"""An event loop in a thread of its own, for code that waits for other things than the engine: environments, rewards."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_SECONDS_TO_END = 1.0  # for what was cancelled; then the thread, which cannot keep the process alive, is left behind


class EventLoopThread:
    """Runs coroutines beside the thread that made it, which may step an engine or run a loop of its own meanwhile.

    with EventLoopThread() as loop:
        future = loop.submit(fetch(url))
        ...
        page = future.result()
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-event-loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what still runs. Code that does not let go of the loop (it calls `time.sleep`, say) is left."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(2 * _SECONDS_TO_END)
        if not self._thread.is_alive():
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine. Its future has what it returns or raises; to cancel that cancels the coroutine.

        SystemExit and KeyboardInterrupt, which would end the loop for all, come out as `RuntimeError`.
        """
        return asyncio.run_coroutine_threadsafe(guarded(coroutine), self._loop)


async def guarded(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns or raises; what would end the loop, in a task, comes out as `RuntimeError`."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"it raised {error!r}") from error


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_SECONDS_TO_END)


def seconds_until(deadline: float) -> float | None:
    """For a wait until `deadline` of `time.monotonic`; None, for one without end, where that is infinite."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


async def run_in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """What a blocking function returns or raises, without blocking the loop; SystemExit comes out as `RuntimeError`.

    It has a thread of its own, which does not keep the process alive: a function that never returns holds up neither
    others nor the end of the program.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is goes to the caller, as from an executor
            is_odd = isinstance(error, StopIteration)  # which no future of asyncio takes
            settle(done.set_exception, RuntimeError(f"it raised {error!r}") if is_odd else error)
        except (SystemExit, KeyboardInterrupt) as error:
            settle(done.set_exception, RuntimeError(f"it raised {error!r}"))
        else:
            settle(done.set_result, result)

    def settle(take: Callable[[Any], None], value: Any) -> None:
        if done.set_running_or_notify_cancel():  # False: nobody waits any more
            take(value)

    threading.Thread(target=work, name="rollout-tool", daemon=True).start()
    return await asyncio.wrap_future(done)
