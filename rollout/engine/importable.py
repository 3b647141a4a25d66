"""Python objects for a worker process: what it needs to know by import must be there to import."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Refuses what pickle would name by the main module, which is another one in the worker process."""
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in the main module")
        return NotImplemented


def pickle_for_workers(value: Any, what: str) -> bytes:
    """`value` as bytes that a worker process can read. Raises `ValueError`, beginning with `what`, where it cannot."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{what} cannot be sent to a worker process ({error}): functions and classes must stand at the top of a "
            "module that can be imported (no lambda, nothing of the main module), and values must be picklable"
        ) from error
    return buffer.getvalue()
