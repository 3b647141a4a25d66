"""Every recipe runs for a few steps, from the file to the report, on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_trainers.run import train_from_recipe
from rollout_trainers.tracking import read_json_lines
from tests.support.tiny import make_tiny_llama

RECIPES = Path(__file__).parents[2] / "recipes"

# Sizes that replace the recipe's own; what it is about stays.
SMALL = (
    "steps=2",
    "optimizer.warmup_steps=0",
    "tracking.wandb=disabled",
    "algorithm.prompts_per_step=4",
    "task.eval_size=2",
    "task.train_size=8",
    "sampling.max_tokens=8",
    "engine.max_model_len=1024",  # the tiny model's tokens are letters
    "engine.kv_cache_memory=4 MiB",
)
# What a recipe needs besides, and a metric that only what it is about logs.
RUNS: dict[str, tuple[tuple[str, ...], str]] = {
    "brief_answers.py": (("algorithm.group_size=2",), "rewards/brevity_reward/mean"),
    "dapo.yaml": ((), "dynamic_sampling/rounds"),
    "distillation.yaml": ((), "teacher/kl"),
    "ppo_critic.yaml": ((), "critic/vf_loss"),
    "quickstart.yaml": ((), "frac_reward_zero_std"),
    "tool_use.py": (("algorithm.group_size=2", "algorithm.prompts_per_step=2"), "tools/call_frequency"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, max_position_embeddings=1024)


def test_no_recipe_is_left_out():
    assert sorted(RUNS) == sorted(path.name for path in RECIPES.iterdir() if path.suffix in (".yaml", ".py"))


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_runs_from_the_file_to_the_report(name: str, model: Path, tmp_path: Path):
    sizes, metric = RUNS[name]
    overrides = [f"model={model}", f"output_dir={tmp_path / 'run'}", *SMALL, *sizes]
    if name == "distillation.yaml":
        teacher = make_tiny_llama(tmp_path / "teacher", tokenizer=True, max_position_embeddings=1024, seed=1)
        overrides.append(f"teacher.model={teacher}")
    assert train_from_recipe(str(RECIPES / name), overrides) == 0
    rows = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(metric in row for row in steps)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert all(row.get("sampling/logp_difference/max", 0.0) == 0.0 for row in steps)
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert "held-out accuracy" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8").lower()
