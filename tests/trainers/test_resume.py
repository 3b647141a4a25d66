"""Resuming: an old run's checkpoints are continued when asked, refused otherwise, never under other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_trainers.checkpoint import FORMAT
from rollout_trainers.recipe import config_from_values
from rollout_trainers.resume import find_checkpoint, run_settings
from rollout_trainers.types import Example, Task

VALUES: dict[str, Any] = {"model": "a/model", "steps": 4, "task": {"name": "sums", "parameters": {"terms": 2}}}


def first_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0] * len(prompts)


def second_reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1.0] * len(prompts)


def task(reward: Any = first_reward, size: int = 3) -> Task:
    return Task("sums", [Example("a")] * size, [], (reward,))


def find(folder: Path, *overrides: str, of: Task | None = None) -> Path | None:
    config = config_from_values({**VALUES, "output_dir": str(folder)}, overrides)
    return find_checkpoint(config, run_settings(config, of or task()))


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 2 and 3, as far as they are read here."""
    config = config_from_values({**VALUES, "output_dir": str(tmp_path)})
    for step in (2, 3):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        state = {"format": FORMAT, "files": {}, "step": step, "notes": {"settings": run_settings(config, task())}}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return tmp_path


def test_a_run_without_checkpoints_starts_from_the_model_whether_or_not_it_resumes(tmp_path: Path):
    assert find(tmp_path) is None
    assert find(tmp_path, "resume=true") is None


def test_a_fresh_run_in_the_folder_of_another_is_refused_with_the_ways_out(old_run: Path):
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run, up to step-000003") as raised:
        find(old_run)
    for words in (str(old_run / "checkpoints"), "resume=true", "another output_dir", "or delete"):
        assert words in str(raised.value)


def test_the_newest_checkpoint_of_the_same_run_is_continued(old_run: Path):
    assert find(old_run, "resume=true") == old_run / "checkpoints" / "step-000003"


@pytest.mark.parametrize(
    "override",
    [
        "steps=9",
        "name=again",
        "tracking.wandb=offline",
        "checkpoint={every: 2, keep: 5}",
        "evaluation.every=1",
        "evaluation.at_steps=[2]",
        "early_stop={metric: entropy, patience: 2}",
        "engine.sleep=false",
    ],
)
def test_what_training_does_not_depend_on_may_change(old_run: Path, override: str):
    assert find(old_run, "resume=true", override) is not None


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("steps=3", "steps was 4, is 3"),
        ("seed=1", "seed was 0, is 1"),
        ("model=b", "model was 'a/model', is 'b'"),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate was 1e-06, is 0.001"),
        ("task.parameters.terms=3", "task.parameters.terms was 2, is 3"),
        ("task.parameters.digits=1", "task.parameters.digits was None, is 1"),
    ],
)
def test_other_settings_are_refused_by_name(old_run: Path, override: str, change: str):
    with pytest.raises(ValueError, match="cannot be resumed with other settings") as raised:
        find(old_run, "resume=true", override)
    assert f"settings: {change}. Use" in str(raised.value)


def test_all_settings_that_differ_are_named_at_once(old_run: Path):
    with pytest.raises(ValueError, match=r"sampling\.temperature was 1\.0, is 0\.5; seed was 0, is 7"):
        find(old_run, "resume=true", "seed=7", "sampling.temperature=0.5")


def test_another_task_is_refused(old_run: Path):
    with pytest.raises(ValueError, match="task's rewards was"):
        find(old_run, "resume=true", of=task(reward=second_reward))
    with pytest.raises(ValueError, match="task's training examples was 3, is 2"):
        find(old_run, "resume=true", of=task(size=2))
