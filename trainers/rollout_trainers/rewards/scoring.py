"""Scores samples with reward functions: calls each once for all samples, and checks what it returned."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollout_trainers.types import RewardFunction, Sample


def reward_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The names that metrics use: of functions and methods their own, of other callables that of their class. A name
    that an earlier function has gets a number: `length_reward`, `length_reward_2`."""
    names = []
    seen: Counter[str] = Counter()
    for function in functions:
        name = function.__name__ if inspect.isroutine(function) else type(function).__name__
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def score(samples: Sequence[Sample], functions: Sequence[RewardFunction]) -> None:
    """Fills `rewards` (by function, see `reward_names`) and `reward` (their sum) of each sample.

    A function gets the prompts, the completions (text, or a list with one assistant message where the prompt was a
    chat), every column that all examples have, `completion_ids` and `finish_reasons`. Raises `ValueError` naming the
    function if it returns another number of values than it was given, or one that is not a finite number.
    """
    prompts = [sample.example.prompt for sample in samples]
    completions = [_completion(sample) for sample in samples]
    columns = _columns(samples)
    for sample in samples:
        sample.rewards = {}
    for name, function in zip(reward_names(functions), functions, strict=True):
        values = function(prompts, completions, **columns)
        if len(values) != len(samples):
            raise ValueError(f"reward {name!r} returned {len(values)} values for {len(samples)} completions")
        for index, (sample, value) in enumerate(zip(samples, values, strict=True)):
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"reward {name!r} returned {value!r} for completion {index}: {sample.text!r}")
            sample.rewards[name] = number
    for sample in samples:
        sample.reward = sum(sample.rewards.values())


def _completion(sample: Sample) -> str | list[dict[str, str]]:
    prompt = sample.example.prompt
    is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)
    return [{"role": "assistant", "content": sample.text}] if is_chat else sample.text


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    common = set.intersection(*(set(sample.example.columns) for sample in samples)) if samples else set()
    columns: dict[str, list[Any]] = {
        name: [sample.example.columns[name] for sample in samples] for name in sorted(common)
    }
    columns["completion_ids"] = [sample.completion_token_ids for sample in samples]
    columns["finish_reasons"] = [sample.finish_reason for sample in samples]
    return columns
