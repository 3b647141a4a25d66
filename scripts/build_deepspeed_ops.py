"""Compiles what DeepSpeed would compile in the middle of the first `init_distributed`, once, into .venv.

    export TORCH_EXTENSIONS_DIR=$(python scripts/build_deepspeed_ops.py)

On CPUs that is one operation, its shared-memory collectives: some 50 seconds in which every rank waits. It needs a C++
compiler, and ninja on PATH, which comes with the extra `deepspeed`. A process that is killed while it loads the
operation leaves a file `lock`, for which torch makes all later ones wait for ever: it is removed here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

# One folder for each path by which the environment is reached: the path is in the compiler's options, and ninja builds
# anew where they are others.
FOLDER = Path(sys.prefix) / "torch_extensions" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
OPERATION = "deepspeed_shm_comm"
STALE_SECONDS = 60  # what is built is loaded in less

_BUILD = "from deepspeed.ops.op_builder import ShareMemCommBuilder; ShareMemCommBuilder().load()"


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """The variables by which DeepSpeed finds ninja and what was built."""
    scripts = str(Path(sys.executable).parent)  # not resolved: the environment's own folder
    return {"TORCH_EXTENSIONS_DIR": str(folder), "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


def build(folder: Path = FOLDER) -> Path:
    """Returns the compiled operation, which one process builds while others wait. Raises `CalledProcessError`."""
    folder.mkdir(parents=True, exist_ok=True)
    built, lock = folder / OPERATION / f"{OPERATION}.so", folder / OPERATION / "lock"
    with open(folder / ".building", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)  # given back by the system, however this process ends
        if built.is_file():
            _wait_for(lock)
            return built
        shutil.rmtree(folder / OPERATION, ignore_errors=True)
        variables = {**os.environ, **environment(folder)}
        subprocess.run([sys.executable, "-c", _BUILD], check=True, env=variables, stdout=sys.stderr)
    return built


def _wait_for(lock: Path) -> None:
    """Until whoever loads the operation at this moment has done so, or has evidently been killed."""
    while lock.exists():
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            lock.unlink()
            return
        time.sleep(0.2)


if __name__ == "__main__":
    build()
    print(FOLDER)
