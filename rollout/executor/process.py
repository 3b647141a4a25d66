"""One worker process: how it is started, how its end is noticed, and how it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

_NUM_KEPT_LINES = 20
_MODULE = "rollout.engine.worker_process"


class WorkerProcess:
    """A Python process that runs `rollout.engine.worker_process`, until its parent stops it or is gone.

    It is no fork: it shares nothing but the bucket, imports what the parent can import, and does not run
    the user's main module. Its standard input is a pipe that closes when the parent ends, however that ends; what it
    writes to its standard error is passed on, and the last lines are kept.
    """

    def __init__(self, rank: int, address: Path, bucket: int, environment: Mapping[str, str]) -> None:
        """`bucket` is the descriptor of the bucket that parent and workers share (`rollout.engine.bucket`)."""
        self.rank = rank
        paths = [path or os.getcwd() for path in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, str(address), str(os.getpid()), str(bucket)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            pass_fds=(bucket,),
        )
        self.fileno = os.pidfd_open(self._process.pid)  # readable once the process has ended
        self._last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self._why = ""  # it was killed by us

    @property
    def pid(self) -> int:
        return self._process.pid

    def _pass_on(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._last_lines.append(text)
                print(f"[rank {self.rank}] {text}", file=sys.stderr)

    def describe_end(self) -> str:
        """How the process ended, and its last lines of standard error; waits for its end."""
        code = self._process.wait()
        self._reader.join(timeout=1)  # a child of its own may keep the pipe open
        how = f"was killed by {_signal_name(-code)}{self._why}" if code < 0 else f"exited with code {code}"
        lines = list(self._last_lines)
        said = "\n  ".join(["; the last lines of its standard error:", *lines]) if lines else "; it wrote no error"
        return (
            f"the worker process of rank {self.rank} (pid {self.pid}) {how}; no policy can be served any more: close() "
            f"this LLM and make a new one{said}"
        )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number where one killed it."""
        return self._process.poll()

    def kill(self, why: str) -> None:
        """Kills the process, also one that is stopped, and returns at once. `describe_end` says why."""
        self._why = f" ({why})"
        self._process.kill()

    def end(self, grace_seconds: float) -> None:
        """Waits so long for the process to end by itself, then kills it. Gives back what the parent holds of it."""
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=1)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.fileno >= 0:
            os.close(self.fileno)
            self.fileno = -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
