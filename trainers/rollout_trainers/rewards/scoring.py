"""Scores samples with reward functions: calls each once for all samples, and checks what it returned."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollout_trainers.checks import as_number
from rollout_trainers.data import RESERVED
from rollout_trainers.event_loop import EventLoopThread
from rollout_trainers.metric_catalog import own_metric
from rollout_trainers.types import Example, RewardFunction, Sample

ENVIRONMENT = "environment"  # the name of what a sample's environment gave, among its rewards
_LONGEST_SHOWN = 200  # characters of what a function returned, in an error
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a run stands, for rewards that change with it: the names are those of transformers' `TrainerState`.

    `global_step` counts the steps that are done; `epoch` how often the training examples were gone through.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(slots=True)
class _Log:
    """What reward functions log beside their values."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(own_metric(name, value))


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


def names_environments(functions: Sequence[RewardFunction]) -> bool:
    """Whether a function asks for the environments themselves, by the name of a parameter."""
    return any("environments" in inspect.signature(function).parameters for function in functions)


def check_columns(functions: Sequence[RewardFunction], examples: Sequence[Example], which: str) -> None:
    """Raises `ValueError` where a function has a parameter without a default that is neither what `score` gives nor a
    column of the examples, of which it looks at the first, or does not take all that it is given. `which` says in the
    message what the examples are for."""
    if not examples:
        return
    columns = examples[0].columns
    for name, function in zip(reward_names(functions), functions, strict=True):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(
                f"reward {name!r} has no **columns: it is called by name with prompts, completions, the examples' "
                "columns and what else is known, and must take them all"
            )
        for parameter in inspect.signature(function).parameters.values():
            is_needed = parameter.default is parameter.empty and parameter.kind in _BY_NAME
            if is_needed and parameter.name not in columns and parameter.name not in RESERVED:
                there = ", ".join(map(repr, columns)) or "no columns"
                raise ValueError(
                    f"reward {name!r} needs the column {parameter.name!r}, which the {which} examples do not have: "
                    f"they have {there}"
                )


def score(
    samples: Sequence[Sample], functions: Sequence[RewardFunction], state: TrainerState | None = None
) -> dict[str, list[float]]:
    """Fills `rewards` (by function, see `reward_names`) and `reward` (their sum) of each sample; what an environment
    gave counts among them as "environment". Returns what the functions have logged as metrics, by name.

    A function gets, by name and as TRL's trainers give them: `prompts`, `completions` (text; a list with one assistant
    message where the prompt was a chat; all messages after the prompt where an environment answered), every column
    that all examples have, `completion_ids` and, of TRL's extras, `trainer_state`, `log_extra(column, values)` for the
    table of samples, `log_metric(name, value)`, and `environments` where there are; of ours `finish_reasons`.
    Functions that are async run at once.

    None says that a function does not apply to a sample: it then has no part in the sample's reward, and none in the
    function's mean. A sample to which none applies has a reward of 0, and a warning says so; another names a function
    that applies to no sample at all.

    Raises `ValueError` naming the function, what it returned and what is valid, if it returns something else than one
    value for each completion, each None or a finite number; if it raises; and if it logs a column of another length.
    """
    log = _Log()
    arguments = _arguments(samples, state or TrainerState(), log)
    for sample in samples:
        sample.rewards = {} if sample.episode is None else {ENVIRONMENT: sample.episode.reward}
    names = reward_names(functions)
    for name, returned in zip(names, _returned(names, functions, arguments), strict=True):
        values = _checked(name, returned, samples)
        if samples and all(value is None for value in values):
            warnings.warn(f"reward {name!r} gave None for all {len(samples)} samples: it has no part", stacklevel=2)
        for sample, value in zip(samples, values, strict=True):
            if value is not None:
                sample.rewards[name] = value
    for sample in samples:
        sample.reward = sum(sample.rewards.values())
    unscored = sum(not sample.rewards for sample in samples)
    if unscored and functions:
        warnings.warn(f"no reward applies to {unscored} of {len(samples)} samples: they count as 0", stacklevel=2)
    _take_columns(samples, log)
    return log.metrics


def _checked(name: str, returned: Any, samples: Sequence[Sample]) -> list[float | None]:
    """One value for each sample. Raises `ValueError` for whatever else a function has returned."""
    valid = f"it must return a list of {len(samples)} values, one for each completion: a finite number, or None"
    if isinstance(returned, (str, bytes, Mapping, Set)) or not isinstance(returned, Iterable):
        raise ValueError(f"reward {name!r} returned {_shown(returned)} for {len(samples)} completions: {valid}")
    if isinstance(returned, (np.ndarray, torch.Tensor)) and returned.ndim != 1:
        raise ValueError(f"reward {name!r} returned an array of the shape {tuple(returned.shape)}: {valid}")
    try:
        values = list(returned)
    except Exception as error:  # a generator runs only here
        raise ValueError(_raised(name, error)) from error
    if len(values) != len(samples):
        raise ValueError(f"reward {name!r} returned {len(values)} values for {len(samples)} completions: {valid}")
    numbers: list[float | None] = []
    for index, (sample, value) in enumerate(zip(samples, values, strict=True)):
        number = None if value is None else as_number(value)
        if number is not None and not math.isfinite(number):
            which = f"completion {index}: {_shown(sample.text)}"
            why = "a finite number, or None where the reward does not apply"
            raise ValueError(f"reward {name!r} returned {_shown(value)} for {which}: it must be {why}")
        numbers.append(number)
    return numbers


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _returned(names: Sequence[str], functions: Sequence[RewardFunction], arguments: dict[str, Any]) -> list[Any]:
    """What each function returned: those that are async are begun first and awaited together."""
    returned = [_called(name, function, arguments) for name, function in zip(names, functions, strict=True)]
    awaited = {index: value for index, value in enumerate(returned) if isinstance(value, Awaitable)}
    if not awaited:
        return returned
    named = [_awaited(names[index], value) for index, value in awaited.items()]
    with EventLoopThread() as loop:
        done = dict(zip(awaited, loop.submit(_all_of(named)).result(), strict=True))
    return [done.get(index, value) for index, value in enumerate(returned)]


def _called(name: str, function: RewardFunction, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except Exception as error:
        raise ValueError(_raised(name, error)) from error


async def _awaited(name: str, value: Awaitable[Any]) -> Any:
    try:
        return await value
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # the last three pass by a loop
        raise ValueError(_raised(name, error)) from error


def _raised(name: str, error: BaseException) -> str:
    called = "reward functions are called by name: reward(prompts, completions, **columns)"
    hint = f" ({called})" if isinstance(error, TypeError) and "argument" in str(error) else ""
    return f"reward {name!r} raised {type(error).__name__}: {error}{hint}"


async def _all_of(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables)


def _arguments(samples: Sequence[Sample], state: TrainerState, log: _Log) -> dict[str, Any]:
    """Tokens and messages are copies: what a function does to them does not become what is trained on."""
    common = set.intersection(*(set(sample.example.columns) for sample in samples)) if samples else set()
    arguments: dict[str, Any] = {name: [sample.example.columns[name] for sample in samples] for name in sorted(common)}
    arguments["prompts"] = copy.deepcopy([sample.example.prompt for sample in samples])
    arguments["completions"] = copy.deepcopy([_completion(sample) for sample in samples])
    arguments["completion_ids"] = [list(sample.completion_token_ids) for sample in samples]
    arguments["finish_reasons"] = [sample.finish_reason for sample in samples]
    if samples and all(sample.episode is not None for sample in samples):
        arguments["environments"] = [sample.episode.environment for sample in samples if sample.episode is not None]
    return arguments | {"trainer_state": state, "log_extra": log.extra, "log_metric": log.metric}


def _completion(sample: Sample) -> str | list[dict[str, Any]]:
    prompt = sample.example.prompt
    is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)
    if not is_chat:
        return sample.text
    if sample.episode is not None:
        return sample.episode.messages or [{"role": "assistant", "content": ""}]  # it broke off before its first turn
    return [{"role": "assistant", "content": sample.text}]


def _take_columns(samples: Sequence[Sample], log: _Log) -> None:
    for column, values in log.columns.items():
        if len(values) != len(samples):
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {len(samples)} completions")
        for sample, value in zip(samples, values, strict=True):
            sample.logged[column] = value
