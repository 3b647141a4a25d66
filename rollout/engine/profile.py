"""Where a run's time goes: matrix products, attention, sampling, other kernels, the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout_kernels.cpu.times import KernelTimes, timed_kernels

if TYPE_CHECKING:
    from rollout.engine.core import EngineCore

_PARTS = {
    "linear": "matrix products",
    "linear_rotary": "matrix products",  # with the rotary embedding at its end
    "linear_silu_and_mul": "matrix products",  # with the gating at its end
    "linear_int8": "matrix products",
    "paged_attention": "attention",
    "write_kv": "attention",
    "sample": "sampling",
    "token_logprobs": "sampling",
    "top_logprobs": "sampling",
}
_ORDER: tuple[str, ...] = ("matrix products", "attention", "sampling", "other kernels", "host")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Seconds by part of everything between two moments; "host" is what no kernel took."""

    num_steps: int
    num_tokens: int  # sampled
    seconds: float
    parts: dict[str, float]

    @classmethod
    def of(cls, times: KernelTimes, num_steps: int, num_tokens: int, seconds: float) -> StepProfile:
        parts = dict.fromkeys(_ORDER, 0.0)
        for kernel, taken in times.seconds.items():
            parts[_PARTS.get(kernel, "other kernels")] += taken
        parts["host"] = seconds - sum(times.seconds.values())
        return cls(num_steps, num_tokens, seconds, parts)

    def share(self, part: str) -> float:
        """The part's share of all seconds, 0 to 1."""
        return self.parts[part] / self.seconds if self.seconds else 0.0

    def table(self) -> str:
        """A line for each part: seconds, milliseconds a step, share."""
        steps = max(self.num_steps, 1)
        rows = [*self.parts.items(), ("all", self.seconds)]
        lines = [f"{self.num_steps} steps, {self.num_tokens} tokens      seconds   ms/step   share"]
        lines += [
            f"  {part:<24}{taken:>10.3f}{taken / steps * 1e3:>10.3f}{taken / max(self.seconds, 1e-12):>7.1%}"
            for part, taken in rows
        ]
        return "\n".join(lines)


@contextmanager
def profile(engine: EngineCore) -> Iterator[list[StepProfile]]:
    """Measures what runs inside a `with` block; the list that it yields holds the profile once the block has ended.

    Times the C++ kernels, whichever backend was chosen, in the thread that opens the block: generate in this thread.
    Raises `ValueError` inside another such block, and for an engine on a CUDA device or on Triton's kernels: those are
    for torch's own profiler.
    """
    profiles: list[StepProfile] = []
    times, counters, runner = KernelTimes(), engine.counters, engine.executor.worker.runner
    device, chosen = engine.executor.worker.device, engine.config.kernels
    if device.type != "cpu" or chosen == "triton":
        raise ValueError(f"profile times C++ kernels on a CPU, not kernels={chosen!r} on {device}: use torch.profiler")
    if runner.times is not None:
        raise ValueError("a profile of this engine is already being taken: one at a time")
    steps, tokens, started = counters.num_steps, counters.num_generated_tokens, time.perf_counter()
    runner.times = times
    try:
        with timed_kernels(times):
            yield profiles
    finally:
        runner.times = None
        seconds = time.perf_counter() - started
        tokens = counters.num_generated_tokens - tokens
        profiles.append(StepProfile.of(times, counters.num_steps - steps, tokens, seconds))
