"""What the engine asks of a CPU machine: how much memory there is, and how much a piece of work takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from rollout.platform.platform import Event
from rollout.worker.ledger import process_resident_bytes, trim_heap
from rollout.worker.slab import Slab


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit():
                total = min(total, int(text))
    return total


def reset_peak_memory() -> None:
    """Starts a new measurement of `peak_memory`."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Largest resident size of this process in bytes since `reset_peak_memory`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


class CpuPlatform:
    """The machine's own memory: slabs whose pages go back to the operating system, and nothing to copy."""

    device = torch.device("cpu")
    max_profile_tokens = 256

    def total_memory(self) -> int:
        return total_memory()

    def free_memory(self) -> None:
        return None

    def used_memory(self) -> int:
        return process_resident_bytes()

    def reset_peak(self) -> bool:
        try:
            reset_peak_memory()
        except OSError:
            return False
        return True

    def peak_memory(self) -> int:
        return peak_memory()

    def measure_peak(self, work: Callable[[], object]) -> int:
        """Raises `ValueError` where the kernel does not let the peak be reset."""
        work()  # the first time: threads, caches, code pages
        trim_heap()
        try:
            reset_peak_memory()
        except OSError as error:
            raise ValueError(f"the memory of a step cannot be measured here ({error}): give kv_cache_memory") from error
        before = peak_memory()
        work()
        return max(0, peak_memory() - before)

    def trim(self) -> None:
        trim_heap()

    def memory(self, owner: str, num_bytes: int, huge_pages: bool = True) -> Slab:
        return Slab(owner, num_bytes, huge_pages)

    def host_memory(self, owner: str, num_bytes: int) -> Slab:
        return Slab(owner, num_bytes, huge_pages=False)

    def copies(self) -> ImmediateCopies:
        return ImmediateCopies()

    def step_capture(self) -> DirectSteps:
        return DirectSteps()


class Done:
    """An event in the past: the CPU has computed what was asked of it."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class ImmediateCopies:
    """Copies within the host's memory, finished when they return."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Done:
        return Done()

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Event) -> Done:
        after.synchronize()
        device.copy_(host)
        return Done()


class DirectStep:
    """A step that is replayed by calling it; its output moves into the tensor of the first call."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self._step = step
        self.output = step()

    def replay(self) -> None:
        self.output.copy_(self._step())


class DirectSteps:
    """The place of CUDA graphs on a CPU, so that everything around them is the same."""

    num_bytes = 0

    def capture(self, step: Callable[[], torch.Tensor]) -> DirectStep:
        return DirectStep(step)

    def reset(self) -> None:
        """Steps hold no memory of their own."""
