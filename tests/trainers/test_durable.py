"""Files and folders are whole or not there, before whichever operation the process is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_trainers.durable import exclusive, new_folder, remove_leftovers, write_text
from tests.support.distributed import ROOT
from tests.support.killed_writes import FILES, LOAD_DURABLE

OLD, NEW = (dict.fromkeys(FILES, content) for content in ("old", "new"))


@pytest.fixture(scope="module")
def killed_everywhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers"))
    command = [sys.executable, "-m", "tests.support.killed_writes", str(tmp_path_factory.mktemp("writes"))]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=240)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("action", "before", "after", "between"),
    [
        ("new folder", None, NEW, ()),
        ("folder replaced", OLD, NEW, (None,)),  # neither, between two renames; never a mixture
        ("folder removed", OLD, None, ()),
        ("file replaced", "old", "new", ()),
        ("link moved", "old", "new", ()),
    ],
)
def test_what_is_under_a_whole_name_is_whole(
    action: str,
    before: Any,
    after: Any,
    between: tuple[Any, ...],
    killed_everywhere: dict[str, list[dict[str, Any]]],
):
    *killed, last = killed_everywhere[action]
    assert all(each["killed"] for each in killed) and not last["killed"]
    assert len(killed) >= 3
    targets = [each["target"] for each in killed]
    assert targets[0] == before
    assert all(target in (before, after, *between) for target in targets), targets
    assert last["target"] == after
    # The next process finds the same, and nothing else than it.
    for each in (*killed, last):
        assert each["after"] == each["target"]
        assert set(each["names"]) <= {".lock", "target"}


def test_an_error_while_a_folder_is_filled_leaves_the_old_one_and_nothing_else(tmp_path: Path):
    with new_folder(tmp_path / "target") as folder:
        (folder / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "target") as folder:
        (folder / "file").write_text("new")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target" / "file").read_text() == "old"


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_text(tmp_path / "file", "old")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_leftovers_of_a_folder_that_is_not_there_are_none(tmp_path: Path):
    remove_leftovers(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_forked_child_does_not_keep_its_parents_folder(tmp_path: Path):
    """A reward function's worker may outlive a run that was killed."""
    code = (
        f"import os, sys, time\nfrom pathlib import Path\n{LOAD_DURABLE}"
        "with durable.exclusive(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        time.sleep(600)\n        os._exit(0)\n"
        "    print(child, flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert process.wait(timeout=240) == -9
        with exclusive(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    finally:
        os.kill(child, 9)
        process.stdout.close()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with exclusive(tmp_path):
        pass

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "lockf", broken)
    with pytest.raises(OSError, match="Input/output"), exclusive(tmp_path):
        pass
