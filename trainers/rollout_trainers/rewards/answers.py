"""Rewards for tasks with one right answer, which stands in the column `answer`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?")

Completion = str | Sequence[dict[str, str]]


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the content of its last message where the prompt was a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_number(text: str) -> str | None:
    """The last number of a text, plainly written: "so 4 + 5 = 1,009." gives "1009". None where there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "").replace("−", "-") if numbers else None


def final_number_reward(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the last number of the completion is the answer, 0 elsewhere. Naming several numbers does not help."""
    return [
        float(final_number(completion_text(completion)) == expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def exact_answer_reward(
    prompts: Sequence[Any], completions: Sequence[Completion], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the completion is the answer and nothing else (white space around it and a final full stop aside)."""
    return [
        float(completion_text(completion).strip().removesuffix(".").rstrip() == expected.strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]
