"""Messages that name what is wrong and the nearest thing that is right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(field: str, name: object, known: Iterable[str]) -> str:
    """Says that `name` is no valid value of `field`, which valid one is nearest, and which there are."""
    choices = sorted(known)
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(choices[:12]) + (", …" if len(choices) > 12 else "")
    return f"{field}: unknown name {name!r}{guess} (known: {shown})"
