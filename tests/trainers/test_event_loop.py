"""An event loop beside the caller's thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout_trainers.event_loop import EventLoopThread, run_in_thread


async def thread_name() -> str:
    return threading.current_thread().name


def test_coroutines_run_in_another_thread_and_give_what_they_return_or_raise() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    with EventLoopThread() as loop:
        assert loop.submit(thread_name()).result(10) == "rollout-event-loop"
        with pytest.raises(KeyError):
            loop.submit(fail(KeyError("x"))).result(10)
        for fatal in (SystemExit(1), KeyboardInterrupt()):
            with pytest.raises(RuntimeError, match="it raised"):
                loop.submit(fail(fatal)).result(10)
        assert loop.submit(thread_name()).result(10)  # it still runs


def test_leaving_cancels_what_still_runs() -> None:
    ended: list[str] = []
    begun = threading.Event()

    async def wait() -> None:
        try:
            begun.set()
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with EventLoopThread() as loop:
        loop.submit(wait())
        assert begun.wait(10)
    assert ended == ["cancelled"]
    assert "rollout-event-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_blocking_function_has_a_thread_of_its_own_that_a_cancelled_caller_leaves_behind() -> None:
    release = threading.Event()

    def block() -> str:
        release.wait(30)
        return threading.current_thread().name

    async def both() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_in_thread(block), 0.05)
        release.set()
        return await run_in_thread(block)

    assert asyncio.run(both()) == "rollout-tool"

    def fail(error: BaseException) -> None:
        raise error

    for error in (SystemExit(2), StopIteration(3)):
        with pytest.raises(RuntimeError, match="it raised"):
            asyncio.run(run_in_thread(fail, error))
    with pytest.raises(KeyError):
        asyncio.run(run_in_thread(fail, KeyError("x")))
