"""Keys of one section that another one, or the task, makes idle: they are refused, so that nobody waits for what cannot
come. Each section looks after the keys that its own choices make idle.

What a switch turns off as a whole is no mistake, and keeps its numbers for the next run: `tracking.wandb` "disabled",
`alerts.enabled` false, or an evaluation neither at the start nor at the end. Nor is null, which says that something is
not wanted, or a step or an interval beyond the run's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

from rollout_trainers.checks import fail
from rollout_trainers.loss_config import LossSection

if TYPE_CHECKING:
    from rollout_trainers.config import RunConfig

_WHEN_EVALUATED = ("every", "at_steps", "every_seconds")
_CLIPS = ("clip_low", "clip_high", "dual_clip")


def check_idle_keys(config: RunConfig) -> None:
    """Raises `ValueError` for a key that other sections make idle."""
    _check_clips(config)
    _check_diagnosis(config)
    _check_alerts(config)
    if not config.task.name and config.task.parameters:
        fail("task", "name", "", "a task's name where parameters are given")


def check_keys_of_task(config: RunConfig, has_environment: bool, has_evaluation: bool) -> None:
    """Raises `ValueError` for a key that nothing of the task reads: it has no environment, or nothing to evaluate."""
    if not has_environment:
        for name, value in given(config.environment):
            fail("environment", name, value, "left out: the task has no environment")
        for name, value in given(config.alerts, ("environment_errors", "environment_timeouts")):
            fail("alerts", name, value, "left out: the task has no environment")
    if not has_evaluation:
        for name, value in given(config.evaluation, _WHEN_EVALUATED):
            fail("evaluation", name, value, "left out: the task has no examples for evaluation")


def check_task_is_read(config: RunConfig) -> None:
    """Raises `ValueError` for what the section `task` says of examples, where a script brings its own."""
    for name, value in given(config.task):
        if name != "name":
            fail("task", name, value, "left out where run() is given the training examples")


def given(section: Any, names: Iterable[str] | None = None) -> Iterator[tuple[str, Any]]:
    """The fields of a section, of those with `names`, that ask for something else than their defaults."""
    for field in fields(section):
        value = getattr(section, field.name)
        if (names is None or field.name in names) and value is not None and value != _default(field):
            yield field.name, value


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _check_clips(config: RunConfig) -> None:
    """Ratios and values differ from those of the step's start only after an optimiser step, or an older policy's."""
    algorithm, loss = config.algorithm, config.loss
    if algorithm.minibatches * algorithm.epochs > 1 or config.asynchrony.is_active or not config.policy.is_exact:
        return
    why = "with one optimiser step for each step's samples (algorithm.minibatches * algorithm.epochs is 1)"
    preset = LossSection(algorithm=loss.algorithm)
    for name in _CLIPS:
        value = getattr(loss, name)
        if value is not None and value != getattr(preset, name):
            fail("loss", name, value, f"left out {why}, where all ratios are 1")
    for name, value in given(config.critic, ("value_clip",)):
        fail("critic", name, value, f"left out {why}, where no value has changed")


def _check_diagnosis(config: RunConfig) -> None:
    for name, value in given(config.tracking, ("diagnose_above", "diagnose_every")):
        if config.distributed.is_sharded:
            kind = config.distributed.kind
            fail("tracking", name, value, f"left out with distributed.kind {kind!r}: one rank alone cannot diagnose")
        if config.policy.sent_adapter is not None:
            fail("tracking", name, value, "left out with policy.lora.send 'adapter', whose samples are not diagnosed")


def _check_alerts(config: RunConfig) -> None:
    if not config.alerts.enabled:
        return
    algorithm, evaluation = config.algorithm, config.evaluation
    is_stale = config.asynchrony.is_active
    is_compared = evaluation.is_repeated or (evaluation.at_start and evaluation.at_end)
    watched = {
        "mismatch": (algorithm.recompute_logprobs or is_stale, "algorithm.recompute_logprobs, or asynchrony"),
        "mismatch_exact": (not algorithm.recompute_logprobs, "the sampler's own logprobs (recompute_logprobs false)"),
        "kl": (config.loss.uses_kl, "a loss.kl_coefficient"),
        "ppo_kl": (
            algorithm.minibatches * algorithm.epochs > 1 or is_stale or config.policy.lora.dropout > 0,
            "several optimiser steps for a step's samples, asynchrony, or dropout",
        ),
        "no_learning_signal": (config.teacher.uses_rewards, "rewards that are learned from"),
        "held_out_drop": (is_compared, "at least two evaluations"),
        "staleness": (is_stale, "asynchrony"),
    }
    for name, value in given(config.alerts, watched):
        is_there, needed = watched[name]
        if not is_there:
            fail("alerts", name, value, f"left out without {needed}: its number is never there")
