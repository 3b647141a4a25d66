"""Every recipe runs for a few steps, from the file to the report, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollout_trainers.recipe import load_recipe
from rollout_trainers.run import train_from_recipe
from rollout_trainers.tracking import read_json_lines
from tests.support.distributed import run_ranks
from tests.support.recipe_ranks import ARGUMENTS
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
    "lora.yaml": ((), "rollout_corr/k3_kl"),
    "ppo_critic.yaml": ((), "critic/vf_loss"),
    "quickstart.yaml": ((), "frac_reward_zero_std"),
    "tool_use.py": (("algorithm.group_size=2", "algorithm.prompts_per_step=2"), "tools/call_frequency"),
}
OF_TWO_PROCESSES = ("zero3.yaml",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, max_position_embeddings=1024)


def test_no_recipe_is_left_out():
    assert sorted([*RUNS, *OF_TWO_PROCESSES]) == sorted(
        path.name for path in RECIPES.iterdir() if path.suffix in (".yaml", ".py")
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_runs_from_the_file_to_the_report(name: str, model: Path, tmp_path: Path):
    sizes, metric = RUNS[name]
    overrides = [f"model={model}", f"output_dir={tmp_path / 'run'}", *SMALL, *sizes]
    if name == "distillation.yaml":
        teacher = make_tiny_llama(tmp_path / "teacher", tokenizer=True, max_position_embeddings=1024, seed=1)
        overrides.append(f"teacher.model={teacher}")
    assert train_from_recipe(str(RECIPES / name), overrides) == 0
    rounding = 0.0 if load_policy_kind(name) == "shared" else 1e-4
    steps = check_run(tmp_path / "run", rounding)
    assert all(metric in row for row in steps)


def load_policy_kind(name: str) -> str:
    """Whose module is trained: the engine's own, whose logprobs are the sampler's bit for bit, or transformers'."""
    if name.endswith(".py"):
        return "shared"
    return load_recipe(RECIPES / name, ["steps=60"]).policy.kind


def check_run(output: Path, rounding: float) -> list[dict[str, Any]]:
    """What is there at the end of a run of two steps. Returns their metrics."""
    rows = read_json_lines(output / "metrics.jsonl")
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert all(row.get("sampling/logp_difference/max", 0.0) <= rounding for row in steps)
    assert "held-out accuracy" in (output / "report.html").read_text(encoding="utf-8").lower()
    trained = AutoModelForCausalLM.from_pretrained(output / "model", local_files_only=True)
    assert all(bool(tensor.isfinite().all()) for tensor in trained.parameters())
    return steps


# case TR-03 (two ranks)
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TWO_PROCESSES)
def test_a_recipe_of_several_processes_runs_in_two_and_is_one_run(name: str, model: Path, tmp_path: Path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    arguments = [str(RECIPES / name), f"model={model}", f"output_dir={tmp_path / 'run'}", *SMALL]
    (ranks / ARGUMENTS).write_text(json.dumps(arguments), encoding="utf-8")
    run_ranks("tests.support.recipe_ranks:main", ranks)
    check_run(tmp_path / "run", 1e-4)
