"""Recipes: plain values in, a checked configuration out; mistakes are named with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe import config_from_values, load_recipe

RECIPE = """
model: some/folder
name: sums
steps: 12
task:
  name: reasoning_gym
  parameters: {dataset: chain_sum, min_terms: 2}
optimizer:
  learning_rate: 1e-5
  schedule: cosine
engine: {sleep: false, kv_cache_memory: 64 MiB}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recipe_fills_the_sections_it_names_and_leaves_the_rest(tmp_path: Path):
    config = load_recipe(write(tmp_path, RECIPE))
    assert (config.model, config.name, config.steps) == ("some/folder", "sums", 12)
    assert config.task.parameters == {"dataset": "chain_sum", "min_terms": 2}
    assert config.optimizer.learning_rate == 1e-5  # YAML itself reads 1e-5 as text
    assert config.engine.sleep is False
    assert config.engine.kv_cache_memory == "64 MiB"
    assert config.algorithm == RunConfig(model="x").algorithm


def test_overrides_replace_values_of_any_section(tmp_path: Path):
    overrides = ["steps=3", "optimizer.learning_rate=2e-6", "task.parameters.min_terms=4", "sampling.temperature=1"]
    config = load_recipe(write(tmp_path, RECIPE), overrides)
    assert (config.steps, config.optimizer.learning_rate, config.sampling.temperature) == (3, 2e-6, 1.0)
    assert config.task.parameters == {"dataset": "chain_sum", "min_terms": 4}
    assert isinstance(config.sampling.temperature, float)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimiser.learning_rate=1"], "a key of the recipe: unknown name 'optimiser'; did you mean 'optimizer'"),
        (
            ["optimizer.learning-rate=1"],
            "a key of optimizer: unknown name 'learning-rate'; did you mean 'learning_rate'",
        ),
        (["optimizer.learning_rate=fast"], "optimizer.learning_rate='fast' is not valid: it must be a number"),
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate=-1.0 is not valid"),
        (["optimizer.beta1=1"], "optimizer.beta1=1.0 is not valid: it must be below 1"),
        (["optimizer.schedule=step"], "must be one of 'constant', 'linear', 'cosine'"),
        (
            ["optimizer.schedule=constant", "optimizer.final_fraction=0.1"],
            "optimizer.final_fraction=0.1 is not valid: it must be left out with",
        ),
        (["optimizer=3"], "optimizer=3 is not valid: it must be a section"),
        (["steps=many"], "run.steps='many' is not valid: it must be an integer of at least 0"),
        (["steps=true"], "run.steps=True is not valid"),
        (["steps.x=1"], "'steps' is not a section"),
        (["steps"], "must read key=value"),
        (["task.parameters=["], "override 'task.parameters=[' is not valid: its value is not valid YAML"),
        (["engine.kv_cache_memory=abc"], "engine.kv_cache_memory='abc' is not valid: it must be bytes"),
        (["engine.kv_cache_memory=0"], "engine.kv_cache_memory=0 is not valid: it must be above 0"),
        (["algorithm.group_size=1"], "algorithm.group_size=1 is not valid: it must be an integer of at least 2"),
        (["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"], "the expected gradient of 'k1' is zero"),
        (["algorithm.minibatches=65"], "at most group_size * prompts_per_step"),
        (["sampling.temperature=0"], "sampling.temperature=0.0 is not valid: it must be a finite number above 0"),
        (["engine.sleep=maybe"], "engine.sleep='maybe' is not valid: it must be true or false"),
        (["task.system_prompt=7"], "task.system_prompt=7 is not valid: it must be text or null"),
        (["name=7"], "name=7 is not valid: it must be text"),
        (["task.parameters=7"], "task.parameters=7 is not valid: it must be a section"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, overrides: list[str], message: str):
    path = write(tmp_path, RECIPE)
    with pytest.raises(ValueError, match=r"recipe\.yaml") as raised:
        load_recipe(path, overrides)
    assert message in str(raised.value)


def test_files_that_are_no_recipes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such recipe"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(ValueError, match="a recipe is a mapping"):
        load_recipe(write(tmp_path, "- 1\n"))
    with pytest.raises(ValueError, match="not valid YAML"):
        load_recipe(write(tmp_path, "a: [1\n"))
    with pytest.raises(ValueError, match=r"(?s)the key 'steps' is given twice.*line 3"):
        load_recipe(write(tmp_path, "model: m\nsteps: 1\nsteps: 2\n"))
    with pytest.raises(ValueError, match=r"(?s)the key 'seed' is given twice.*line 4"):
        load_recipe(write(tmp_path, "model: m\ntask:\n  seed: 1\n  seed: 2\n"))
    with pytest.raises(ValueError, match="model is missing"):
        load_recipe(write(tmp_path, "steps: 1\n"))


def test_the_values_given_are_not_changed_by_overrides():
    values = {"model": "x", "optimizer": {"learning_rate": 1.0}}
    config_from_values(values, ["optimizer.learning_rate=2"])
    assert values == {"model": "x", "optimizer": {"learning_rate": 1.0}}
