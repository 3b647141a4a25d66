"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str, field: str) -> int:
    """A number of bytes from `4096`, `"512 MiB"` or `"4GiB"`. Raises `ValueError` naming `field`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)?\s*", str(value), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{field}={value!r} is not valid: it must be bytes as an integer or text such as '4GiB'")
    unit = _UNITS[(match[2] or "").upper()]
    number = float(match[1]) * unit
    if unit == 1 and not number.is_integer():
        raise ValueError(f"{field}={value!r} is not valid: it must be a whole number of bytes")
    return int(number)
