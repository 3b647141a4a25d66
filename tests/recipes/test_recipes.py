"""Every recipe of the repository loads, is valid, and names a task that can be made."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from rollout_trainers.recipe import config_from_values, load_recipe
from rollout_trainers.tasks import make_task

RECIPES = Path(__file__).parents[2] / "recipes"
YAML_RECIPES = sorted(RECIPES.glob("*.yaml"))
PYTHON_RECIPES = sorted(RECIPES.glob("*.py"))


@pytest.mark.parametrize("path", YAML_RECIPES, ids=lambda path: path.name)
def test_yaml_recipes_load_and_their_tasks_can_be_made(path: Path):
    config = load_recipe(path, ["steps=60"])
    task = make_task(config.task)
    assert len(task.train) == config.task.train_size
    assert len(task.evaluation) == config.task.eval_size


@pytest.mark.parametrize("path", PYTHON_RECIPES, ids=lambda path: path.name)
def test_python_recipes_load_without_running_and_their_values_are_valid(path: Path):
    names = runpy.run_path(str(path), run_name="recipe")
    config = config_from_values(names["VALUES"])
    assert make_task(config.task).train


def test_there_is_a_quickstart_and_a_recipe_with_code():
    assert "quickstart.yaml" in [path.name for path in YAML_RECIPES]
    assert PYTHON_RECIPES


def test_every_recipe_is_on_the_page():
    page = (RECIPES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [path.name for path in [*YAML_RECIPES, *PYTHON_RECIPES] if f"recipes/{path.name}" not in page] == []


def test_brief_answers_earn_more():
    reward = runpy.run_path(str(RECIPES / "brief_answers.py"), run_name="recipe")["brevity_reward"]
    assert reward([""] * 3, ["7", "It is 7", "The answer to this quite long question is of course just 7"]) == [
        0.5,
        pytest.approx(0.4),
        0.0,
    ]
