"""The threads of gloo's process groups at the end of a process.

A gloo group works off its collectives in native threads, and such a thread takes Python's lock to drop the tensors of
one that is done. If the interpreter has begun to shut down, Python ends the thread in C++ code that cannot be unwound,
and a process that has done all of its work aborts with "terminate called without an active exception". It takes a
busy machine, on which the thread does not run between the last collective and the end. `destroy_process_group` does
not wait for these threads where something (a sharded model, DeepSpeed's engine) still refers to the group.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

_NAME = "pt_gloo"  # prefix of the names that torch gives these threads
_PATIENCE = 5.0  # seconds; a collective that another rank never joins must not keep the process alive


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Lets this process end only when its gloo threads have nothing left to drop. Later calls change nothing."""
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads(patience: float = _PATIENCE) -> bool:
    """Sleeps until every gloo thread of this process waits for work, at most `patience` seconds; whether they do.

    Without /proc (systems other than Linux) it sleeps for a moment and assumes so.
    """
    end = time.monotonic() + patience
    while True:
        time.sleep(0.01)  # without Python's lock, which a thread that waits for it has now had
        if not any(_is_running(thread) for thread in _threads()):
            return True
        if time.monotonic() >= end:
            return False


def _threads() -> list[Path]:
    return list(Path("/proc/self/task").glob("*"))


def _is_running(thread: Path) -> bool:
    """Whether this is a gloo thread that runs or could run, by proc_pid_stat(5)."""
    try:
        name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name.startswith(_NAME) and rest.split()[0] not in "SD"
