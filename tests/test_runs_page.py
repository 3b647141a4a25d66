"""docs/runs.md: its recipes are valid, its commands do what stands beside them, and a run's folder is as it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rollout.cli import main
from rollout_trainers.recipe import config_from_values
from tests.support.tiny import make_tiny_llama

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "runs.md").read_text(encoding="utf-8")
RECIPES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            inner = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = merged(result[name], value) if inner else value
    return result


def test_every_recipe_of_the_page_is_valid():
    assert len(RECIPES) == 5
    for recipe in RECIPES:
        config_from_values({"model": "m", **recipe})


def test_the_commands_do_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    make_tiny_llama(tmp_path / "tiny", tokenizer=True, dtype=torch.bfloat16)
    for name, count in (("train", 30), ("hard", 4)):
        rows = [{"prompt": f"{name} {i}?", "answer": str(i)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    small = {
        "model": "tiny",
        "output_dir": "runs/quickstart",
        "steps": 2,
        "task": {"train_size": 8, "eval_size": 4},
        "sampling": {"max_tokens": 4},
        "engine": {"max_model_len": 256, "kv_cache_memory": "4 MiB"},
        "algorithm": {"group_size": 2, "prompts_per_step": 2},
    }
    recipe = merged(*RECIPES, small, {"evaluation": {"every": 1, "at_steps": []}, "early_stop": {"threshold": 2.0}})
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    commands = [line.partition("#")[0] for line in re.findall(r"^    (rollout .*)$", PAGE, re.MULTILINE)]
    training = [shlex.split(command)[1:] for command in commands if command.startswith("rollout train")]
    exports = [shlex.split(command)[1:] for command in commands if command.startswith("rollout export")]
    assert (len(training), len(exports)) == (2, 4)
    for command in training:
        assert main(command) == 0
    listed = set(re.findall(r"^        ([\w.]+)", PAGE.split("Only one process")[0], re.MULTILINE))
    found = {path.name for path in (tmp_path / "runs" / "quickstart").iterdir()}
    optional = {"wandb", "reward.png"}
    assert listed - optional <= found
    assert {name for name in found if not name.startswith(".")} - optional <= listed
    for command in exports:  # of the page's step 40, where this run has two
        of_this_run = [part.replace("000040", "000002").replace("40", "2") for part in command]
        assert main([*of_this_run, "--force"]) == 0
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    assert names["model"].dtype == torch.bfloat16
