"""Errors on their way from a worker process to the process that called it."""

from __future__ import annotations

import pickle
import traceback

import msgspec

# Errors of these packages are raised in the calling process as what they are; it may not know the types of others.
_RAISED_AS_THEY_ARE = ("builtins", "rollout", "torch")


class Fault(msgspec.Struct, frozen=True):
    """An error of a worker process: as it was where its type is a builtin or the engine's own, else in words."""

    text: str  # type and message
    trace: str
    pickled: bytes = b""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        pickled = b""
        if kind.__module__.split(".")[0] in _RAISED_AS_THEY_ARE:
            try:
                pickled = pickle.dumps(error)
                pickle.loads(pickled)  # a type may ask for more arguments than it keeps
            except (pickle.PickleError, TypeError, AttributeError, ValueError):
                pickled = b""
        return cls(f"{name}: {error}", "".join(traceback.format_exception(error)), pickled)

    def error(self, rank: int) -> BaseException:
        """The error to raise here, with the traceback of rank `rank` in a note.

        What ends a process (`SystemExit`, `KeyboardInterrupt`) was meant for the worker's: it becomes a `RuntimeError`.
        """
        error = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.text)
        if not isinstance(error, Exception):
            error = RuntimeError(self.text)
        error.add_note(f"raised by the worker process of rank {rank}:\n{self.trace.rstrip()}")
        return error
