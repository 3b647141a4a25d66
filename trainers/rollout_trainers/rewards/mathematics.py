"""Mathematical answers, compared as what they mean: 1/2 is 0.5 is \\boxed{\\frac{1}{2}}."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from rollout_trainers.rewards.answers import Completion, completion_text

_PARSE_SECONDS = 5
_VERIFY_SECONDS = 5


def math_verify_reward(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[str], **columns: Any
) -> list[float | None]:
    """1 where the completion's answer equals the column `answer`, by math-verify; 0 elsewhere; None where math-verify
    cannot read the column's.

    `answer` is LaTeX, with or without its dollars or box, or a plain expression. A completion's answer is what stands
    in its last box, else its last expression. Needs the package math-verify (`pip install "rollout-rl[math]"`).

    What takes more than 5 s to read or to compare is not the answer. Limits need signals, which Python has in its main
    thread only: elsewhere there are none.
    """
    import math_verify  # type: ignore[import-not-found] - an optional part: only tasks that use it need it

    is_main = threading.current_thread() is threading.main_thread()
    parse_limit: Any = _PARSE_SECONDS if is_main else None  # None is right, though its type hint says int
    verify_limit = _VERIFY_SECONDS if is_main else None
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        gold = math_verify.parse(_in_dollars(expected), parsing_timeout=parse_limit)
        if not gold:
            rewards.append(None)
            continue
        given = math_verify.parse(completion_text(completion), parsing_timeout=parse_limit)
        rewards.append(float(math_verify.verify(gold, given, timeout_seconds=verify_limit)))
    return rewards


def _in_dollars(expression: str) -> str:
    has_environment = any(mark in expression for mark in ("$", "\\boxed", "\\(", "\\["))
    return expression if has_environment else f"${expression}$"
