"""Keys that would be accepted and do nothing: each is refused where another key, or the task, makes it idle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.types import Example, Task

TRANSFORMERS = ("policy.kind=transformers", "algorithm.recompute_logprobs=true")
AHEAD = ("asynchrony.mode=one_step_off", "engine.sleep=false")
NEVER = ("evaluation.at_start=false", "evaluation.at_end=false")


def recipe(*overrides: str, **values: Any) -> RunConfig:
    return config_from_values({"model": "nowhere", "steps": 4, **values}, overrides)


@pytest.mark.parametrize(
    ("idle", "message", "awake"),
    [
        (["checkpoint.keep=5"], "checkpoint.keep=5", ["checkpoint.every=2"]),
        (["checkpoint.keep=5"], "checkpoint.keep=5", ["checkpoint.best_metric=eval/accuracy"]),
        (
            ["tracking.diagnose_every=3", "tracking.diagnose_above=null"],
            "tracking.diagnose_every=3",
            ["tracking.diagnose_above=0.1"],
        ),
        (["tracking.sample_every=2", "tracking.samples=0"], "tracking.sample_every=2", ["tracking.samples=3"]),
        (
            ["early_stop={metric: reward, threshold: 1, min_delta: 0.1}"],
            "early_stop.min_delta=0.1",
            ["early_stop.patience=2"],
        ),
        (["task.parameters={source: rows.jsonl}"], "task.name=''", ["task.name=dataset"]),
        (["loss.clip_high=0.3"], "loss.clip_high=0.3", ["algorithm.minibatches=2"]),
        (["loss.algorithm=dapo", "loss.clip_low=0.1"], "loss.clip_low=0.1", [*AHEAD]),
        (["loss.dual_clip=3"], "loss.dual_clip=3.0", ["algorithm.epochs=2"]),
        (["loss.clip_high=0.3"], "loss.clip_high=0.3", [*TRANSFORMERS]),
        (["loss.algorithm=ppo", "critic.value_clip=0.1"], "critic.value_clip=0.1", ["algorithm.minibatches=2"]),
        (
            [*TRANSFORMERS, "distributed.kind=fsdp2", "tracking.diagnose_above=0.1"],
            "tracking.diagnose_above=0.1",
            ["distributed.kind=ddp"],
        ),
        (["alerts.mismatch=0.1"], "alerts.mismatch=0.1", ["algorithm.recompute_logprobs=true"]),
        (
            ["alerts.mismatch_exact=0.1", "algorithm.recompute_logprobs=true"],
            "alerts.mismatch_exact=0.1",
            ["algorithm.recompute_logprobs=false"],
        ),
        (["alerts.kl=2"], "alerts.kl=2.0", ["loss.kl_coefficient=0.01"]),
        (["alerts.ppo_kl=2"], "alerts.ppo_kl=2.0", ["algorithm.minibatches=2"]),
        (["alerts.ppo_kl=2"], "alerts.ppo_kl=2.0", ["asynchrony.over_sampling=0.5"]),
        (["alerts.staleness=2"], "alerts.staleness=2.0", ["asynchrony.over_sampling=0.5"]),
        (["alerts.held_out_drop=0.1", *NEVER], "alerts.held_out_drop=0.1", ["evaluation.every=1"]),
        (
            ["alerts.no_learning_signal=0.5", "teacher.model=elsewhere"],
            "alerts.no_learning_signal=0.5",
            ["teacher.reward_weight=1"],
        ),
    ],
)  # fmt: skip
def test_a_key_that_another_makes_idle_is_refused_and_taken_where_it_acts(
    idle: list[str], message: str, awake: list[str]
):
    with pytest.raises(
        ValueError, match=f"^{re.escape(message)} is not valid: it must be .*(left out|a task's name|at most)"
    ):
        recipe(*idle)
    recipe(*idle, *awake)


def test_what_is_switched_off_as_a_whole_keeps_its_keys():
    recipe(
        "tracking.wandb=disabled",
        "tracking.project=other",
        "alerts.enabled=false",
        "alerts.window=3",
        "alerts.staleness=2",
    )
    recipe(
        "evaluation.every=100", "checkpoint.every=100", "alerts.kl=null", "critic.value_clip=null", "loss.algorithm=ppo"
    )


def no_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.max_turns=3", "environment.max_turns=3 is not valid: it must be left out: the task has no env"),
        ("alerts.environment_errors=0.5", "alerts.environment_errors=0.5 is not valid"),
        ("evaluation.every=2", "evaluation.every=2 is not valid: it must be left out: the task has no examples"),
        ("evaluation.at_steps=[2]", "evaluation.at_steps=(2,) is not valid"),
    ],
)
def test_what_the_task_has_no_use_for_is_refused_before_the_model_is_loaded(
    tmp_path: Path, override: str, message: str
):
    task = Task("none", [Example("a", {})], [], (no_reward,))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        run(recipe(override, output_dir=str(tmp_path)), task=task)


def test_the_task_section_is_refused_where_a_script_brings_the_examples(tmp_path: Path):
    config = recipe("task.system_prompt=Be brief.", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"^task\.system_prompt='Be brief\.' is not valid: it must be left out where"):
        run(config, reward_functions=[no_reward], train=[Example("a", {})])
