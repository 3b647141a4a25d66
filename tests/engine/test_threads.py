"""Several threads and several engines in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout import LLM, RequestOutput, SamplingParams
from rollout.engine.lock import FairLock, LockTimeoutError
from rollout.errors import EngineAsleepError
from tests.support.tiny import make_tiny_llama

WATCHDOG = 60  # seconds after which a thread counts as hung


def in_thread(work: Callable[[], list[RequestOutput]]) -> Callable[[], list[RequestOutput]]:
    """Starts `work`; the function that is returned waits for its outputs, or raises its error."""
    outputs: list[list[RequestOutput]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            outputs.append(work())
        except (RuntimeError, ValueError, EngineAsleepError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> list[RequestOutput]:
        thread.join(WATCHDOG)
        assert not thread.is_alive(), "the thread hangs"
        if errors:
            raise errors[0]
        return outputs[0]

    return wait


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def test_sleep_from_another_thread_returns_what_was_sampled(tmp_path: Path) -> None:
    # case SW-05
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="16MiB")
    params = SamplingParams(n=4, max_tokens=450, seed=1, ignore_eos=True)
    whole = llm.generate([[5, 6, 7], [8, 9]], params)
    steps = llm.get_metrics()["num_steps_total"]
    wait = in_thread(lambda: llm.generate([[5, 6, 7], [8, 9]], params))
    until(lambda: llm.get_metrics()["num_steps_total"] > steps + 5)
    llm.sleep(1)
    partial = wait()
    assert llm.is_sleeping and llm.num_unfinished == 0
    for part, full in zip(partial, whole, strict=True):
        for a, b in zip(part.outputs, full.outputs, strict=True):
            assert a.finish_reason == "abort" and 0 < len(a.token_ids) < 450
            assert a.token_ids == b.token_ids[: len(a.token_ids)]
    with pytest.raises(EngineAsleepError):
        in_thread(lambda: llm.generate([[5, 6]], params))()
    llm.wake_up()
    again = llm.generate([[5, 6, 7], [8, 9]], params)
    assert [c.token_ids for o in again for c in o.outputs] == [c.token_ids for o in whole for c in o.outputs]


def test_a_policy_update_from_another_thread_ends_requests_in_flight_whole(tmp_path: Path) -> None:
    # case WS-02
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="16MiB")
    other = LLM(make_tiny_llama(tmp_path / "other", seed=9), kv_cache_memory="16MiB")
    params = SamplingParams(n=4, max_tokens=450, seed=1, ignore_eos=True)
    wait = in_thread(lambda: llm.generate([list(range(3, 60))], params))
    until(lambda: llm.get_metrics()["num_steps_total"] > 5)
    with llm.policy_update() as update:
        update.load(list(other.shared_model().named_parameters()))
    assert {c.finish_reason for c in wait()[0].outputs} == {"abort"}
    mine, theirs = (e.generate([list(range(3, 60))], params)[0] for e in (llm, other))
    assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in theirs.outputs]
    assert mine.num_cached_tokens == 0 and mine.policy_version == 1
    assert mine.outputs[0].policy_versions == [(1, 0, 450)]


def test_threads_get_their_own_outputs(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="16MiB")
    prompts = [[[10 * i + j] * 5 for j in range(4)] for i in range(1, 5)]
    params = SamplingParams(n=2, max_tokens=60, seed=3, ignore_eos=True)
    alone = [llm.generate(batch, params) for batch in prompts]
    waits = [in_thread(lambda batch=batch: llm.generate(batch, params)) for batch in prompts]
    for batch, wait, expected in zip(prompts, waits, alone, strict=True):
        outputs = wait()
        assert [output.prompt_token_ids for output in outputs] == batch
        for a, b in zip(outputs, expected, strict=True):
            assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]


def test_engines_with_other_kernels_do_not_disturb_each_other(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    reference = LLM(folder, kv_cache_memory="4MiB", kernels="reference")
    before = reference.generate([5, 6, 7], params)[0].outputs[0].raw_logprobs.tolist()
    compiled = LLM(folder, kv_cache_memory="4MiB", kernels="cpu")
    first = compiled.generate([5, 6, 7], params)[0].outputs[0].raw_logprobs.tolist()
    assert reference.generate([5, 6, 7], params)[0].outputs[0].raw_logprobs.tolist() == before
    assert compiled.generate([5, 6, 7], params)[0].outputs[0].raw_logprobs.tolist() == first
    assert before != first  # the last bits differ, so that a mix-up would have shown


def test_the_lock_serves_threads_in_the_order_in_which_they_asked() -> None:
    lock = FairLock()
    order: list[int] = []

    def ask(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(8)]
    with lock:
        for number, thread in enumerate(threads):
            thread.start()
            until(lambda number=number: lock._next_ticket == number + 2)
    for thread in threads:
        thread.join(WATCHDOG)
    assert order == list(range(8))


def test_a_thread_that_is_interrupted_while_it_waits_does_not_block_the_others() -> None:
    lock = FairLock()
    with lock:
        wait_for_turn = lock._turn.wait

        def interrupted(timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

        lock._turn.wait = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt), lock:
            raise AssertionError("the lock is taken")
        lock._turn.wait = wait_for_turn  # type: ignore[method-assign]
    with lock:
        pass


def test_a_thread_that_waits_no_longer_for_its_turn_does_not_block_the_others() -> None:
    lock = FairLock()
    with lock, pytest.raises(LockTimeoutError, match="another thread's call"), lock.within(0.01):
        raise AssertionError("the lock is taken")
    with lock.within(0.01):
        pass
    with lock:
        pass
