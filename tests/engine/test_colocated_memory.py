"""Sampler and trainer take turns with one machine's memory: in one process, and as two processes that alternate."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM, SamplingParams
from rollout.memory_phases import OTHERS, MemoryPhases, PhaseMemory
from rollout.platform.cpu import CpuPlatform
from rollout.worker.ledger import LedgerReport, trim_heap

MIB = 1 << 20
SLACK = 24 * MIB  # allocators' rounding, threads' stacks, what a first call loads
POOL = 96 * MIB
PARAMS = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=0)


class NoPeaks(CpuPlatform):
    """A kernel that does not let the peak be reset."""

    def reset_peak(self) -> bool:
        return False


def test_a_phase_has_the_peak_inside_it_and_what_is_left_at_its_end() -> None:
    phases = MemoryPhases(CpuPlatform(), lambda: LedgerReport((), CpuPlatform().used_memory()))
    kept = []
    with phases.phase("training"):
        kept.append(torch.ones(64 * MIB, dtype=torch.uint8))
        torch.ones(96 * MIB, dtype=torch.uint8)
    with phases.phase("sleeping"):
        pass
    training, sleeping = phases.measured["training"], phases.measured["sleeping"]
    assert training.peak - training.resident == pytest.approx(96 * MIB, abs=SLACK)
    assert sleeping.peak == pytest.approx(sleeping.resident, abs=SLACK)  # the peak before it does not count
    assert phases.largest == training.peak
    assert training.owners == {OTHERS: training.resident}
    kept.clear()


def test_a_phase_that_raises_or_cannot_be_measured_is_not_recorded() -> None:
    phases = MemoryPhases(CpuPlatform(), lambda: LedgerReport((), 1))
    with pytest.raises(KeyError), phases.phase("training"):
        raise KeyError
    assert phases.measured == {}
    unmeasured = MemoryPhases(NoPeaks(), lambda: LedgerReport((), 1))
    with unmeasured.phase("training"):
        pass
    assert unmeasured.measured == {}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(num_layers=4, num_kv_heads=4, head_dim=256)  # 32 KiB of KV a token


def prompts() -> list[list[int]]:
    return [[3 + (place * 7 + index) % 120 for index in range(150)] for place in range(12)]


def test_in_one_process_the_pools_memory_and_the_trainers_do_not_add_up(folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory=POOL)
    phases = MemoryPhases.of(llm)
    for _ in range(3):
        with phases.phase("sampling"):
            llm.generate(prompts(), PARAMS, use_tqdm=False)
        with phases.phase("sleeping"):
            llm.sleep(level=1)
        with phases.phase("training"):
            torch.ones(POOL, dtype=torch.uint8)
        with phases.phase("update"):
            llm.reload_weights()
        llm.wake_up()
    check(phases.measured)
    assert phases.largest >= max(phase.peak for phase in phases.measured.values())


def check(measured: dict[str, PhaseMemory]) -> None:
    sampling, sleeping = measured["sampling"], measured["sleeping"]
    held = sampling.owners["kv_cache"]
    assert held > POOL // 2
    assert sampling.engine >= held
    assert sleeping.owners["kv_cache"] == 0
    assert sampling.resident - sleeping.resident > held - SLACK
    # Training took as much as the pool, and the peak is that of one of them and not of both.
    training = measured["training"]
    assert training.peak < sleeping.resident + POOL + SLACK
    assert training.peak > sleeping.resident + POOL - SLACK
    assert training.peak < sampling.resident + POOL - held + SLACK
    assert measured["update"].peak < sampling.peak + SLACK


ENGINE = """
import json, sys
from rollout import LLM, SamplingParams
from rollout.memory_phases import MemoryPhases

folder, pool = sys.argv[1], int(sys.argv[2])
llm = LLM(folder, kv_cache_memory=pool)
phases = MemoryPhases.of(llm)
for line in sys.stdin:
    command = json.loads(line)
    with phases.phase(command["phase"]):
        if command["do"] == "generate":
            llm.generate(command["prompts"], SamplingParams(**command["params"]), use_tqdm=False)
        elif command["do"] == "sleep":
            llm.sleep(level=1)
        elif command["do"] == "update":
            llm.reload_weights()
            llm.wake_up()
    phase = phases.measured[command["phase"]]
    print(json.dumps({"peak": phase.peak, "resident": phase.resident, "owners": phase.owners}), flush=True)
"""


@contextmanager
def engine_process(folder: Path, tmp_path: Path) -> Iterator[Callable[..., PhaseMemory]]:
    """Runs commands in a process that has the engine; the phase's memory there comes back."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(POOL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # this checkout, wherever it is
    )
    assert process.stdin is not None and process.stdout is not None
    sender, receiver = process.stdin, process.stdout

    def call(phase: str, do: str, **arguments: Any) -> PhaseMemory:
        sender.write(json.dumps({"phase": phase, "do": do, **arguments}) + "\n")
        sender.flush()
        return PhaseMemory(phase, **json.loads(receiver.readline()))

    try:
        yield call
        sender.close()
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_across_two_processes_the_sum_of_both_never_has_both_peaks(folder: Path, tmp_path: Path) -> None:
    """Engine and trainer in processes of their own: while one works, the other holds what it holds at rest."""
    trim_heap()
    trainer = MemoryPhases(CpuPlatform(), lambda: LedgerReport((), CpuPlatform().used_memory()))
    params = {"n": 2, "max_tokens": 20, "ignore_eos": True, "seed": 0}
    with engine_process(folder, tmp_path) as engine:
        for _ in range(2):
            with trainer.phase("sampling"):
                sampling = engine("sampling", "generate", prompts=prompts(), params=params)
            sleeping = engine("sleeping", "sleep")
            with trainer.phase("training"):
                torch.ones(POOL, dtype=torch.uint8)
            gc.collect()
            with trainer.phase("update"):
                update = engine("update", "update")
    held = sampling.owners["kv_cache"]
    assert held > POOL // 2
    resting = trainer.measured["sampling"].resident
    sums = {
        "sampling": sampling.peak + trainer.measured["sampling"].peak,
        "training": sleeping.resident + trainer.measured["training"].peak,
        "update": update.peak + trainer.measured["update"].peak,
    }
    assert sums["training"] < sampling.resident - held + resting + POOL + SLACK
    assert max(sums.values()) < sums["sampling"] + POOL - held + 2 * SLACK
    assert sums["update"] < sums["sampling"] + SLACK
