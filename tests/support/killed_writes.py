"""Kills a process before each of its file operations in turn, and says what it has left behind each time.

    python -m tests.support.killed_writes FOLDER

For each of `ACTIONS` a list goes to the standard output, as JSON: for each operation what the action's target is after
the process was killed before it, and after the next process has cleaned up, with all names in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_trainers import durable
from rollout_trainers.durable import exclusive, new_folder, put_link, remove_folder, remove_leftovers, write_text

# Statements for a small process that is to know `durable` and none of the large libraries that its package imports.
LOAD_DURABLE = (
    "import importlib.util\n"
    f"_spec = importlib.util.spec_from_file_location('durable', {durable.__file__!r})\n"
    "durable = importlib.util.module_from_spec(_spec)\n_spec.loader.exec_module(durable)\n"
)
FILES = ("one", "two", "inner/three")
_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"}


def write_folder(folder: Path, content: str) -> None:
    """A folder with files that belong together."""
    with new_folder(folder) as partial:
        (partial / "inner").mkdir()
        for name in FILES:
            (partial / name).write_text(content)


ACTIONS: dict[str, Callable[[Path], None]] = {
    "new folder": lambda root: write_folder(root / "target", "new"),
    "folder replaced": lambda root: write_folder(root / "target", "new"),
    "folder removed": lambda root: remove_folder(root / "target"),
    "file replaced": lambda root: write_text(root / "target", "new"),
    "link moved": lambda root: put_link(root / "target", "new"),
}


def prepare(action: str, root: Path) -> None:
    """What is there before the action."""
    root.mkdir()
    if action in ("folder replaced", "folder removed"):
        write_folder(root / "target", "old")
    elif action == "file replaced":
        (root / "target").write_text("old")
    elif action == "link moved":
        put_link(root / "target", "old")


def state(root: Path) -> Any:
    """What the target is: the contents of its files by name, its text, where it points to, or None."""
    target = root / "target"
    if target.is_symlink():
        return str(target.readlink())
    if target.is_dir():
        return {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    return target.read_text() if target.is_file() else None


def killed_before(number: int, action: str, root: Path) -> bool:
    """Whether the process was killed before its operation of this number, or has ended before."""
    pid = os.fork()
    if pid == 0:
        left = [number]

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _EVENTS and any(isinstance(each, (str, Path)) and str(root) in str(each) for each in arguments):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        ACTIONS[action](root)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def killed_everywhere(action: str, folder: Path) -> list[dict[str, Any]]:
    """The last entry is of a process that was not killed."""
    results: list[dict[str, Any]] = []
    is_killed = True
    while is_killed:
        root = folder / str(len(results))
        prepare(action, root)
        is_killed = killed_before(len(results) + 1, action, root)
        found = state(root)
        with exclusive(root):
            remove_leftovers(root)
        names = sorted(path.name for path in root.iterdir())
        results.append({"killed": is_killed, "target": found, "after": state(root), "names": names})
        shutil.rmtree(root)
    return results


if __name__ == "__main__":
    print(json.dumps({action: killed_everywhere(action, Path(sys.argv[1])) for action in ACTIONS}))
