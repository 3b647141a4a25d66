"""Files and folders that are whole or not there, whatever becomes of the process or the machine meanwhile.

What is being written stands under a name that begins with `.partial-` until all of it is on the disk; what is being
removed gets such a name first. So every other name is whole. `exclusive` holds a folder for one process: it knows that
such names are a dead one's, and `remove_leftovers` takes them away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL = ".partial-"
_REMOVED = ".partial-removed-"
_LOCK_FILE = ".lock"


def partial_name(path: Path) -> Path:
    """Where what is to be `path` is written first: in the same folder, with the same ending."""
    return path.with_name(f"{_PARTIAL}{path.name}")


def put_file(path: Path) -> None:
    """Takes the finished file at `partial_name(path)` for `path`, in one step, once it is on the disk."""
    partial = partial_name(path)
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes `path` as UTF-8; what was there before stays until all of the new is there."""
    partial_name(path).write_text(text, encoding="utf-8")
    put_file(path)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """An empty folder to be filled inside of the `with` block, at whose end it takes the place of `final`.

    An error inside removes it, and `final` stays what it was.
    """
    partial = partial_name(final)
    _remove_tree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_tree(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # the first error is the one to be told
        raise
    _put_folder(partial, final)


def _put_folder(partial: Path, final: Path) -> None:
    old = None
    if final.exists():
        old = final.with_name(f"{_REMOVED}{final.name}")
        _remove_tree(old)
        os.rename(final, old)
    os.rename(partial, final)
    _sync(final.parent)
    if old is not None:
        shutil.rmtree(old)


def remove_folder(folder: Path) -> None:
    """Removes a folder: it has no whole name any more before the first of its files goes."""
    removed = folder.with_name(f"{_REMOVED}{folder.name}")
    _remove_tree(removed)
    os.rename(folder, removed)
    _sync(folder.parent)
    shutil.rmtree(removed)


def put_link(link: Path, target: str) -> None:
    """Makes `link` a symbolic link to its neighbour `target`, in one step."""
    partial = partial_name(link)
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)
    _sync(link.parent)


def remove_leftovers(folder: Path) -> None:
    """Removes what dead processes have left half-written or half-removed in `folder`, which this process holds."""
    if not folder.is_dir():
        return
    for path in folder.glob(f"{_PARTIAL}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds `folder` (made where it is not there) against other processes inside of the `with` block.

    The lock is the operating system's, which frees it when the process ends in whatever way; forked children do not
    have it. Raises `ValueError` where another process holds it. File systems without locks hold nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise ValueError(
                    f"{folder} is in use by another run (process {file.read().strip() or 'unknown'}): wait for its "
                    "end, or choose another output_dir"
                ) from error
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Waits until a file's content, or which names a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
