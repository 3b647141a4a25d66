"""Where kernels' time goes: seconds and calls of each, in direct calls and in replayed programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout_kernels.cpu.bindings import bind
from rollout_kernels.cpu.build import load_library
from rollout_kernels.cpu.ops import CpuKernels
from rollout_kernels.cpu.program import Program
from rollout_kernels.dispatch import use_kernels


@dataclass(slots=True)
class KernelTimes:
    """Sums by kernel, named as in the C interface without its prefix."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, kernel: str, calls: int, seconds: float) -> None:
        self.seconds[kernel] = self.seconds.get(kernel, 0.0) + seconds
        self.calls[kernel] = self.calls.get(kernel, 0) + calls

    def replay(self, program: Program) -> None:
        """Replays a program and adds its kernels' times."""
        for kernel, (calls, seconds) in program.replay_timed().items():
            self.add(kernel, calls, seconds)


@contextmanager
def timed_kernels(times: KernelTimes) -> Iterator[None]:
    """The C++ kernels inside a `with` block, with every direct call added to `times`."""
    functions = {
        name: function if name == "set_num_threads" else _timed(name, function, times)
        for name, function in bind(load_library()).items()
    }
    with use_kernels(CpuKernels(functions)):
        yield


def _timed(name: str, function: Any, times: KernelTimes) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        times.add(name, 1, time.perf_counter() - started)
        return result

    return call
