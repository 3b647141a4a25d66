"""Worker processes that end unasked: noticed and named, with nothing lost that was sampled, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.engine.bucket import SharedBucket
from rollout.engine.messages import OpenUpdate, UpdateStep
from rollout.engine.update_on_rank import UpdateOnRank
from rollout.engine.update_over_ranks import PolicyUpdateOverRanks
from rollout.errors import EngineClosedError, PolicyUpdateTimeoutError, WorkerDiedError
from rollout.weights.transaction import Outcome
from tests.support.extension import delay_steps, end_soon, kill_rank, nap, process_id
from tests.support.policies import InFlight, Policies, random_prompt
from tests.support.processes import PATIENCE, is_running, kill, until
from tests.support.recording_engine import RecordingEngine
from tests.support.tiny import make_tiny_llama

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = [random_prompt(6, seed) for seed in range(4)]
OPTIONS = {"kv_cache_memory": "4MiB", "data_parallel_size": 2}


@pytest.mark.slow
def test_a_worker_killed_while_generating_ends_the_call_with_all_that_was_sampled(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=1) for count in (480, 4, 480, 4)]
    whole = LLM(folder, kv_cache_memory="4MiB").generate(PROMPTS, params)
    with LLM(folder, **OPTIONS) as llm:
        pids = llm._engine.process_ids  # type: ignore[attr-defined]
        llm.collective_rpc(delay_steps, args=(0.02,))  # or the long ones may end while this process gets no time
        llm.enqueue(PROMPTS, params)
        outputs = {}
        while len(outputs) < 2:  # the short ones
            outputs |= {output.request_id: output for output in llm.step()}
        ids = llm.enqueue(PROMPTS, params)
        outputs |= {output.request_id: output for output in llm.step()}
        with pytest.raises(WorkerDiedError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL") as caught:
            llm.collective_rpc(kill_rank, args=(1,))
        with pytest.raises(WorkerDiedError, match="rank 1") as caught:
            while llm.num_unfinished:
                outputs |= {output.request_id: output for output in llm.step()}
        error = caught.value
        assert (error.rank, error.exit_code) == (1, -signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            llm.wait_for_completion()
        outputs |= {output.request_id: output for output in caught.value.outputs}
        assert len(outputs) == 8 and set(ids) <= set(outputs)
        for output in outputs.values():
            (mine,), (full,) = output.outputs, whole[PROMPTS.index(output.prompt_token_ids)].outputs
            count = len(mine.token_ids)
            assert mine.token_ids == full.token_ids[:count]
            np.testing.assert_array_equal(mine.raw_logprobs, full.raw_logprobs[:count])
            assert mine.finish_reason == ("length" if count == len(full.token_ids) else "abort")
        counts = [len(output.outputs[0].token_ids) for output in outputs.values()]
        assert counts.count(4) >= 2 and any(4 < count < 480 for count in counts)
        for call in (llm.verify, llm.sleep, lambda: llm.generate(PROMPTS), lambda: llm.collective_rpc("verify")):
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                call()
        assert llm.num_unfinished == 0
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_a_worker_that_ends_while_idle_is_noticed_by_the_next_call_with_what_it_wrote(tmp_path: Path) -> None:
    with LLM(make_tiny_llama(tmp_path), **OPTIONS) as llm:
        pids = llm._engine.process_ids  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError, match=r"from rank .*1"):
            llm.collective_rpc(nap, timeout=0.1, args=(1, 1000.0))
        with pytest.raises(TimeoutError, match=r"from rank .*1"):
            llm.collective_rpc(end_soon, timeout=0.1, args=(0, "the licence has run out", 3))
        until(lambda: not is_running(pids[0]), "the end of rank 0")
        for call in (lambda: llm.generate(PROMPTS), llm.verify, lambda: llm.enqueue(PROMPTS)):
            with pytest.raises(WorkerDiedError, match=r"rank 0 .* exited with code 3; .*\n  the licence has run out"):
                call()
        assert is_running(pids[1])
    assert not any(map(is_running, pids))  # also the one that does not answer


@pytest.mark.slow
def test_errors_at_the_start_are_raised_as_they_are(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match="kv_cache_memory=10 is not valid") as alone:
        LLM(folder, kv_cache_memory=10)
    with pytest.raises(ValueError, match="kv_cache_memory=10 is not valid") as caught:
        LLM(folder, kv_cache_memory=10, data_parallel_size=2)
    assert str(caught.value) == str(alone.value)
    assert "rank 0" in caught.value.__notes__[0]


PARENT = """
import sys, time
from rollout import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_memory="4MiB", data_parallel_size=2)
llm.enqueue([[3, 4, 5], [6, 7]], SamplingParams(max_tokens=400, ignore_eos=True))
print(*llm._engine.process_ids, llm._engine._group._folder, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed_and_leave_no_sockets(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    paths = ":".join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "trainers")])
    program = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths.split(':')!r}\n{PARENT}", str(folder)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            first, second, sockets = parent.stdout.readline().split()
            assert is_running(int(first)) and is_running(int(second)) and Path(sockets).is_dir()
        finally:
            parent.kill()
        parent.wait(PATIENCE)
    until(lambda: not is_running(int(first)) and not is_running(int(second)), "the end of the workers")
    assert not Path(sockets).exists()


@pytest.mark.slow
def test_a_worker_killed_in_a_policy_update_ends_it_with_an_error_that_names_it(tmp_path: Path) -> None:
    policies = Policies.make(tmp_path)
    with policies.engine(data_parallel_size=2) as llm:
        pids = llm._engine.process_ids  # type: ignore[attr-defined]
        long = SamplingParams(max_tokens=480, ignore_eos=True)
        llm.collective_rpc(delay_steps, args=(0.02,))
        flight = InFlight(llm, PROMPTS, long)
        with pytest.raises(WorkerDiedError, match="rank 1") as waiting, flight:
            flight.wait_for_steps(5)
            weights = policies.weights(1)

            def send() -> Iterator[tuple[str, torch.Tensor]]:
                yield from list(weights.items())[:10]
                kill(pids[1])
                yield from list(weights.items())[10:]

            with (
                pytest.raises(WorkerDiedError, match=r"rank 1 .* was killed by SIGKILL") as caught,
                llm.policy_update(in_flight="keep") as update,
            ):
                update.load(send())
            assert update.outcome is Outcome.UNUSABLE
            assert "failed half-way" in caught.value.__notes__[-1]
            with pytest.raises(WorkerDiedError):
                llm.policy_update().__enter__()
        assert [output.prompt_token_ids for output in waiting.value.outputs] == PROMPTS
        assert all(output.outputs[0].finish_reason == "abort" for output in waiting.value.outputs)
        assert is_running(pids[0])
    assert not any(map(is_running, pids))


def stop(pid: int) -> None:
    """The process answers nothing any more, and does not end."""
    os.kill(pid, signal.SIGSTOP)


class Raised:
    """Calls `action` in a thread. Leaving the block waits for its end; `error` is what it raised."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._action = action
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def __enter__(self) -> Raised:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def is_waiting_for_a_worker(llm: LLM) -> bool:
    return bool(llm._engine._group._awaited)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_policy_update_with_a_limit_ends_without_a_worker_that_does_not_answer(tmp_path: Path) -> None:
    policies = Policies.make(tmp_path)
    with policies.engine(data_parallel_size=2) as llm:
        pids = llm.collective_rpc(process_id)
        weights = policies.weights(1)
        update = llm.policy_update(timeout=20)

        def send() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(weights.items())[:10]
            stop(pids[1])
            yield from list(weights.items())[10:]

        with (
            pytest.raises(
                PolicyUpdateTimeoutError, match=r"its limit of 20 s at load: no answer from rank 1\n"
            ) as caught,
            update,
        ):
            update.load(send())
        assert update.outcome is Outcome.UNUSABLE
        assert "rank 1" in caught.value.__notes__[-1] and "did not answer" in caught.value.__notes__[-1]
        for call in (lambda: llm.generate(PROMPTS), llm.verify, lambda: llm.policy_update().__enter__()):
            with pytest.raises(
                WorkerDiedError, match=r"rank 1 .* did not answer .*close\(\) this LLM and make a new one"
            ):
                call()
        assert is_running(pids[0])
    assert not any(map(is_running, pids))


@pytest.mark.slow
@pytest.mark.parametrize("roll_back", [False, True])
def test_a_worker_that_answers_late_gives_up_the_update_like_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roll_back: bool
) -> None:
    policies = Policies.make(tmp_path)
    insist = PolicyUpdateOverRanks._insist
    with policies.engine(data_parallel_size=2) as llm:
        pids = llm.collective_rpc(process_id)

        def go_on_first(update: PolicyUpdateOverRanks, *arguments: object) -> list[object]:
            os.kill(pids[1], signal.SIGCONT)
            return insist(update, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(PolicyUpdateOverRanks, "_insist", go_on_first)
        monkeypatch.setattr("rollout.engine.update_over_ranks._GIVE_UP_SECONDS", float(PATIENCE))
        before = llm.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
        receipt = llm.receipt
        for step, outcome in (
            ("pause", Outcome.UNCHANGED),
            ("verify", Outcome.ROLLED_BACK if roll_back else Outcome.UNUSABLE),
        ):
            limit = 1 if step == "pause" else 20
            update = llm.policy_update(timeout=limit, roll_back=roll_back)
            with pytest.raises(
                PolicyUpdateTimeoutError, match=rf"limit of {limit} s at {step}: no answer from rank 1\n"
            ):
                if step == "pause":
                    stop(pids[1])
                with update:
                    update.load(policies.weights(1))
                    update.post_process()
                    stop(pids[1])
            assert update.outcome is outcome
            if outcome is not Outcome.UNUSABLE:
                after = llm.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
                assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]
                assert llm.verify() == receipt
        monkeypatch.undo()
        with llm.policy_update() as update:
            update.load(policies.weights(1))
        assert llm.verify() == update.receipt


@pytest.mark.slow
def test_a_policy_update_with_a_limit_does_not_wait_for_ever_for_another_threads_call(tmp_path: Path) -> None:
    policies = Policies.make(tmp_path)
    with policies.engine(data_parallel_size=2) as llm:
        pids = llm.collective_rpc(process_id)
        stop(pids[1])
        with Raised(lambda: llm.collective_rpc(process_id)) as other:
            until(lambda: is_waiting_for_a_worker(llm), "the call that waits for rank 1")
            for mode in ("abort", "wait"):
                with pytest.raises(PolicyUpdateTimeoutError, match=r"limit of 0.5 s: another thread's call"):
                    llm.policy_update(timeout=0.5, in_flight=mode).__enter__()  # type: ignore[arg-type]
            os.kill(pids[1], signal.SIGCONT)
        assert other.error is None
        with llm.policy_update(timeout=PATIENCE) as update:
            update.load(policies.weights(1))
        assert llm.verify() == update.receipt


def update_to(llm: LLM, policies: Policies) -> None:
    with llm.policy_update() as update:
        update.load(policies.weights(1))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["update", "call", "generate"])
def test_close_ends_the_workers_while_another_thread_waits_for_one_that_does_not_answer(
    tmp_path: Path, what: str
) -> None:
    policies = Policies.make(tmp_path)
    llm = policies.engine(data_parallel_size=2)
    try:
        pids = llm.collective_rpc(process_id)
        stop(pids[1])
        calls = {
            "update": lambda: update_to(llm, policies),
            "call": llm.verify,
            "generate": lambda: llm.generate(PROMPTS),
        }
        with Raised(calls[what]) as waiting:
            until(lambda: is_waiting_for_a_worker(llm), "the call that waits for rank 1")
            llm.close()
            assert not any(map(is_running, pids))
        assert isinstance(waiting.error, EngineClosedError)
    finally:
        llm.close()


def test_the_seconds_that_other_ranks_took_count_and_the_limit_is_told_as_the_user_gave_it() -> None:
    bucket = SharedBucket.create()
    try:
        update = UpdateOnRank(RecordingEngine(), bucket)  # type: ignore[arg-type]
        update.answer(OpenUpdate(0, 1, "abort", 100, 1000.0, False))
        with pytest.raises(PolicyUpdateTimeoutError, match="its limit of 100 s at wake"):
            update.answer(UpdateStep(1, "wake"))
    finally:
        bucket.close()
