"""GRPO end to end with the real engine on a tiny random model: it learns, resumes exactly, and is on-policy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import RunResult, run, train_from_recipe
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
HELD_OUT = [Example(text, {"answer": text}) for text in ("xyz", "another", "more", "words")]


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """What the tiny model is to learn: token ids below 60."""
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


def indifferent(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1.0] * len(prompts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, dtype=torch.bfloat16)


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    values = {
        "model": str(model),
        "name": "tiny",
        "output_dir": str(output),
        "steps": 4,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 12},
        "algorithm": {"group_size": 4, "prompts_per_step": 3, "micro_batch_tokens": 100},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "evaluation": {"temperature": 1.0, "success_threshold": 0.6},
        "tracking": {"wandb": "disabled"},
    }
    return config_from_values(values, overrides)


def train(model: Path, output: Path, *overrides: str, reward: Any = share_of_low_ids) -> RunResult:
    config = configuration(model, output, *overrides)
    return run(config, reward_functions=[reward], train=TRAIN, evaluation=HELD_OUT)


def step_metrics(output: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def test_training_raises_the_reward_and_every_step_starts_on_policy(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=25", "algorithm.prompts_per_step=6")
    rows = step_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 26))
    compared = [row for row in rows if row["sampling/logp_difference/num_tokens"] > 0]
    assert compared == [row for row in rows if row["frac_reward_zero_std"] < 1.0]
    assert compared[:5] == rows[:5]  # in the end every sample may be perfect, and nothing is left to learn
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in compared)
    assert all(row["clip_ratio/region_mean"] == 0.0 for row in rows)
    assert [row["policy_version"] for row in rows] == list(range(1, 26))
    first, last = [sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:])]
    assert last > first + 0.2, (first, last)
    assert all(row["perf/sleep_released_gb"] > 0 for row in rows)
    for name in ("gen", "reward", "sleep", "train", "sync", "wake", "step"):
        assert rows[0][f"timing_s/{name}"] >= 0
    for phase in ("sampling", "sleeping", "training", "update"):
        assert all(row[f"memory/{phase}_peak_bytes"] >= row[f"memory/{phase}_bytes"] > 0 for row in rows)
    assert all(row["memory/sleeping_bytes"] < row["memory/sampling_bytes"] for row in rows)
    held = {(row["step"], row["phase"]): row["owners"] for row in read_json_lines(tmp_path / "memory.jsonl")}
    assert len(held) == 25 * 4
    assert held[25, "sampling"]["kv_cache"] > 0 == held[25, "sleeping"]["kv_cache"]
    assert held[25, "training"]["weights"] == held[25, "sampling"]["weights"] > 0
    for name in ("entropy", "grad_norm", "loss", "completions/mean_length", "engine/prefix_cache_hit_rate"):
        assert name in rows[0]
    assert rows[-1]["rewards/share_of_low_ids/mean"] == rows[-1]["reward"]


@pytest.mark.parametrize("option", ["engine.quantization=int8", "engine.kv_cache_dtype=int8"])
def test_a_sampler_in_int8_is_corrected_by_importance_weights(model: Path, tmp_path: Path, option: str):
    with pytest.raises(ValueError, match=r"recompute_logprobs.*int8"):
        configuration(model, tmp_path, option)
    train(model, tmp_path, "steps=2", option, "algorithm.recompute_logprobs=true")
    for row in step_metrics(tmp_path):
        assert row["sampling/logp_difference/max"] > 0
        low, high = (row[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "max"))
        assert low < 1 < high
        assert row["grad_norm"] > 0


@pytest.mark.parametrize("algorithm", ["grpo_token", "dapo", "reinforce_pp"])
def test_a_resumed_run_has_the_rewards_and_weights_of_an_unbroken_one(algorithm: str, model: Path, tmp_path: Path):
    loss = (f"loss.algorithm={algorithm}", "loss.kl_coefficient=0.01")  # the reference is the model, not the checkpoint
    options = ("algorithm.minibatches=2", "checkpoint.every=2", "evaluation.every=2", *loss)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    train(model, unbroken, *options)
    whole_schedule = "steps=4"
    interrupted = interrupted_after(2 + 2 + 1)  # evaluations at 0 and 2, steps 1, 2 and 3
    with pytest.raises(KeyboardInterrupt):
        train(model, broken, *options, whole_schedule, reward=interrupted)
    resumed = train(model, broken, *options, whole_schedule, "resume=true")
    kept = ("step", "reward", "loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "completions/mean_length")
    assert [[row[name] for name in kept] for row in step_metrics(broken)] == [
        [row[name] for name in kept] for row in step_metrics(unbroken)
    ]
    ours, theirs = weights(broken), weights(unbroken)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert resumed.base is not None  # from before the break


def interrupted_after(calls: int) -> Any:
    """`share_of_low_ids` until it has been called so often; then the run is interrupted in the middle of a step."""
    left = iter(range(calls))

    @functools.wraps(share_of_low_ids)
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return share_of_low_ids(prompts, completions, **columns)

    return reward


def test_a_run_that_breaks_off_leaves_no_report_of_the_run_before(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=1")
    assert (tmp_path / "report.html").exists()
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path, "steps=2", reward=interrupted_after(0))
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "reward.png").exists()


def test_an_old_runs_files_are_neither_resumed_nor_appended_to_unless_asked_for(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=3")
    train(model, tmp_path, "steps=1", "checkpoint.every=1")  # as the quickstart, repeated: no checkpoints were there
    assert [row["step"] for row in step_metrics(tmp_path)] == [1]
    assert {row["step"] for row in read_json_lines(tmp_path / "samples.jsonl")} == {0, 1}
    before = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        train(model, tmp_path, "steps=1", "checkpoint.every=1")
    with pytest.raises(ValueError, match=r"loss\.kl_coefficient was 0\.0, is 0\.1"):
        train(model, tmp_path, "steps=2", "resume=true", "algorithm.kl_coefficient=0.1")
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == before
    train(model, tmp_path, "steps=2", "resume=true")
    assert [row["step"] for row in step_metrics(tmp_path)] == [1, 2]


def test_sleep_and_the_micro_batch_budget_do_not_change_what_is_sampled_first(model: Path, tmp_path: Path):
    train(model, tmp_path / "asleep", "steps=2")
    train(model, tmp_path / "awake", "steps=2", "engine.sleep=false")
    asleep, awake = step_metrics(tmp_path / "asleep"), step_metrics(tmp_path / "awake")
    assert [row["reward"] for row in asleep] == [row["reward"] for row in awake]
    ours, theirs = weights(tmp_path / "asleep"), weights(tmp_path / "awake")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_trained_model_loads_in_transformers_and_is_not_the_old_one(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=2")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    saved, original = weights(tmp_path), load_file(model / "model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(saved[name], original[name]) for name in saved)


def test_rewards_that_do_not_differ_move_nothing(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=2", reward=indifferent)
    saved, original = weights(tmp_path), load_file(model / "model.safetensors")
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    assert [row["frac_reward_zero_std"] for row in step_metrics(tmp_path)] == [1.0, 1.0]
    assert [row["grad_norm"] for row in step_metrics(tmp_path)] == [0.0, 0.0]
    for row in step_metrics(tmp_path):  # nothing was compared, and nothing is claimed
        assert row["sampling/logp_difference/num_tokens"] == 0
        assert "sampling/logp_difference/max" not in row


def test_the_kl_to_the_reference_is_zero_at_first_and_not_later(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=3", "algorithm.kl_coefficient=0.1")
    kl = [row["kl"] for row in step_metrics(tmp_path)]
    assert kl[0] == 0.0
    assert kl[2] > 0.0
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in step_metrics(tmp_path))


def test_several_updates_a_step_leave_the_policy_and_are_clipped(model: Path, tmp_path: Path):
    options = ("algorithm.minibatches=2", "algorithm.epochs=3", "algorithm.clip_low=0.01", "algorithm.clip_high=0.01")
    train(model, tmp_path, "steps=2", *options)
    rows = step_metrics(tmp_path)
    assert all(row["clip_ratio/region_mean"] > 0.0 for row in rows)
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in rows)


def test_recomputed_logprobs_of_a_shared_policy_have_importance_weights_of_exactly_one(model: Path, tmp_path: Path):
    train(model, tmp_path / "recomputed", "steps=2", "algorithm.recompute_logprobs=true")
    train(model, tmp_path / "plain", "steps=2")
    for row in step_metrics(tmp_path / "recomputed"):
        assert row["sampling/importance_sampling_ratio/min"] == 1.0
        assert row["sampling/importance_sampling_ratio/max"] == 1.0
    ours, theirs = weights(tmp_path / "recomputed"), weights(tmp_path / "plain")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_yaml_recipe_runs_from_the_file_to_the_report(model: Path, tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
model: {model}
name: sums
output_dir: {tmp_path / "run"}
steps: 2
task:
  name: reasoning_gym
  parameters: {{dataset: chain_sum, reward: final_number, min_terms: 2, max_terms: 2}}
  train_size: 8
  eval_size: 4
sampling: {{max_tokens: 6}}
algorithm: {{group_size: 2, prompts_per_step: 2}}
engine: {{kv_cache_memory: 4 MiB}}
tracking: {{wandb: offline}}
""",
        encoding="utf-8",
    )
    assert train_from_recipe(str(recipe), ["optimizer.learning_rate=1e-3"]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Untrained, held out" in page
    assert "final_number" in page
    samples = read_json_lines(tmp_path / "run" / "samples.jsonl")
    assert {(sample["step"], sample["split"]) for sample in samples} == {
        (0, "held out"),
        (1, "train"),
        (2, "train"),
        (2, "held out"),
    }
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / "run" / "reward.png").is_file()
    with pytest.raises(ValueError, match=r"unknown name 'stepz'; did you mean 'steps'"):
        train_from_recipe(str(recipe), ["stepz=1"])


def test_a_python_recipe_gets_the_overrides(model: Path, tmp_path: Path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        f"""
import sys
from rollout_trainers import Example
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run

VALUES = {{
    "model": {str(model)!r},
    "output_dir": {str(tmp_path / "run")!r},
    "engine": {{"max_model_len": 64, "kv_cache_memory": "2 MiB"}},
    "sampling": {{"max_tokens": 4}},
    "algorithm": {{"group_size": 2, "prompts_per_step": 1}},
    "tracking": {{"wandb": "disabled"}},
}}

def length_reward(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

run(config_from_values(VALUES, sys.argv[1:]), reward_functions=[length_reward], train=[Example("abc")])
""",
        encoding="utf-8",
    )
    assert train_from_recipe(str(recipe), ["steps=1"]) == 0
    assert len(step_metrics(tmp_path / "run")) == 1
    with pytest.raises(ValueError, match="there is no such recipe"):
        train_from_recipe(str(tmp_path / "missing.py"))


def test_a_run_needs_rewards_for_its_examples(model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="reward_functions is empty"):
        run(configuration(model, tmp_path), train=TRAIN)
    with_model = configuration(model, tmp_path, "reward_model.model=nowhere")
    with pytest.raises(ValueError, match="nowhere"):  # of the reward model, which is enough
        run(with_model, train=TRAIN)
