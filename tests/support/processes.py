"""Processes that tests watch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 240  # seconds; processes of a busy machine may stand still for a long time


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended (a zombie has)."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool], what: str) -> None:
    """Returns once `condition()` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it took too long: {what}"
        time.sleep(0.01)


def kill(pid: int) -> None:
    """Ends a process as the system does where memory runs out, and waits for its end."""
    os.kill(pid, 9)
    until(lambda: not is_running(pid), f"the end of process {pid}")
