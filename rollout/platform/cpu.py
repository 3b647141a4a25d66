"""What the engine asks of a CPU machine: how much memory there is, and how much a piece of work takes."""

from __future__ import annotations

import os
from pathlib import Path


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
