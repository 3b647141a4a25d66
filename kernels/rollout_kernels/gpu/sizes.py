"""Arithmetic of launch sizes, on plain integers (Triton's own helpers are typed for use inside kernels)."""

from __future__ import annotations


def ceil_div(value: int, unit: int) -> int:
    """How many units hold the value."""
    return -(-value // unit)


def next_power_of_2(value: int) -> int:
    """The least power of two that is not below the value; 1 for values below 1."""
    return 1 << max(value - 1, 0).bit_length()
