"""Runs a function on several ranks, each a process of its own, and leaves none of them behind.

    run_ranks("tests.support.torch_ranks:main", folder)     # main(folder) on two ranks, which write to `folder`

Ranks find each other through a store that this process
holds on a port of the system's choice, as under torchrun, so that there is no port to collide on.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


def run_ranks(
    function: str,
    folder: Path,
    num_ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> None:
    """Calls `function(folder)` on every rank. Raises `AssertionError` with the end of what the ranks wrote, if one
    fails or `timeout` seconds pass; the others are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.support.distributed", *function.split(":"), str(folder)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            variables = os.environ | rank_environment(rank, num_ranks, store.port) | dict(environment or {})
            with open(folder / f"rank{rank}.log", "wb") as log:
                ranks.append(
                    subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True)
                )
        _wait(ranks, timeout, folder)
    finally:
        for process in ranks:
            kill_group(process)


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank whose store is held by another process."""
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers"))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session of its own, with all that it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float, folder: Path) -> None:
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > end:
            break
        time.sleep(0.1)
    if any(process.poll() != 0 for process in ranks):
        states = {rank: process.poll() for rank, process in enumerate(ranks)}
        logs = "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(folder.glob("rank*.log")))
        raise AssertionError(f"ranks ended with {states} (None: still running) of {timeout} s:\n{logs}")


def _main(module: str, name: str, folder: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also when the tests themselves are killed
    function = importlib.import_module(module).__dict__[name]
    function(Path(folder))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
