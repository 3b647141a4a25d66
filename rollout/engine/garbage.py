"""Keeps Python's garbage collector from running over objects that live for one step only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection inside the block. What is made in it and dropped by its end is never looked at.

    A step makes some objects for each sequence, and drops them. To the collector they look like a growing heap, and it
    would go through all objects of the process, hundreds of thousands of them beside a trainer, again and again. Cycles
    that are dropped meanwhile are found afterwards. Where it is off, or paused by another thread, nothing is done.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
