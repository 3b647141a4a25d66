"""Checks of configuration values; errors name the field, the value and what is valid."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np


def fail(section: str, name: str, value: object, valid: str) -> NoReturn:
    """Raises the `ValueError` of `section.name`."""
    raise ValueError(f"{section}.{name}={value!r} is not valid: it must be {valid}")


def as_number(value: Any) -> float:
    """A real number, a scalar of NumPy's or a tensor with one element; anything else is not a number."""
    if isinstance(value, (str, bytes, np.complexfloating)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is what a tensor of several raises
        return math.nan


def check_integer(section: str, name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        fail(section, name, value, f"an integer of at least {low}")


def check_real(section: str, name: str, value: object, low: float, *, open_low: bool = False) -> None:
    valid = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < low or (open_low and number == low):
        fail(section, name, value, valid)


def check_flag(section: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        fail(section, name, value, "true or false")


def check_choice(section: str, name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        fail(section, name, value, f"one of {', '.join(map(repr, choices))}")
