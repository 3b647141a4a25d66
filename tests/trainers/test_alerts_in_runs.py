"""A run that goes wrong tells it on the terminal, in its files and in its report, once, also where it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.run_files import RunFiles, read_run
from rollout_trainers.types import Example

TRAIN = [Example(text) for text in ("abc", "hello", "what", "two and two")]


def indifferent(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1.0] * len(prompts)


def train(model: Path, folder: Path, *overrides: str) -> RunFiles:
    values = {
        "model": str(model),
        "name": "tiny",
        "output_dir": str(folder),
        "steps": 4,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 6},
        "algorithm": {"group_size": 2, "prompts_per_step": 2},
        "checkpoint": {"every": 2},
        "tracking": {"wandb": "disabled"},
        "alerts": {"window": 2, "truncation": None},  # an untrained model never stops by itself
    }
    run(config_from_values(values, overrides), reward_functions=[indifferent], train=TRAIN)
    return read_run(folder)


def test_a_run_without_anything_to_learn_tells_it_once(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tiny_model(tokenizer=True)
    whole = train(model, tmp_path / "whole")
    lines = [line for line in capsys.readouterr().err.splitlines() if "WARN" in line]
    assert len(lines) == 1
    assert lines[0].startswith("tiny: step 2: WARN: Nothing to learn from. The rewards of 100% of the groups")
    (alert,) = whole.alerts
    assert (alert["name"], alert["step"], alert["level"]) == ("no_learning_signal", 2, "WARN")
    page = (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    assert "Nothing to learn from" in page and "since step 2" in page

    train(model, tmp_path / "broken", "steps=2")
    capsys.readouterr()
    resumed = train(model, tmp_path / "broken", "resume=true")
    assert "WARN" not in capsys.readouterr().err
    assert resumed.alerts == whole.alerts
    assert resumed.histograms == whole.histograms
