"""Worker processes that end unasked: noticed and named, with nothing lost that was sampled, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.errors import WorkerDiedError
from rollout.weights.transaction import Outcome
from tests.support.extension import delay_steps, end_soon, kill_rank, nap
from tests.support.policies import InFlight, Policies, random_prompt
from tests.support.processes import PATIENCE, is_running, kill, until
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
        llm.enqueue(PROMPTS, params)
        outputs = {}
        while len(outputs) < 2:  # the short ones
            outputs |= {output.request_id: output for output in llm.step()}
        llm.collective_rpc(delay_steps, args=(0.02,))
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
