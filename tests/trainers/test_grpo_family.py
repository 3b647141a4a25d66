"""Every algorithm with the real engine on a tiny random model: on-policy at first, and it does what it says later."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_trainers.loss_config import PRESETS
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
MAX_TOKENS = 8


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, dtype=torch.bfloat16)


def train(model: Path, output: Path, *overrides: str, reward: Any = share_of_low_ids) -> list[dict[str, Any]]:
    """The metrics of each step."""
    values = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 2,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": MAX_TOKENS, "temperature": 0.7},
        "algorithm": {"group_size": 3, "prompts_per_step": 2, "micro_batch_tokens": 40},
        "optimizer": {"learning_rate": 1e-2},
        "tracking": {"wandb": "disabled", "diagnose_above": None},
    }
    run(config_from_values(values, overrides), reward_functions=[reward], train=TRAIN)
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


# case TR-06
@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_algorithm_starts_each_step_on_policy_at_the_sampling_temperature(
    algorithm: str, model: Path, tmp_path: Path
):
    rows = train(model, tmp_path, f"loss.algorithm={algorithm}", "loss.kl_coefficient=0.1")
    for row in rows:
        assert row["sampling/logp_difference/num_tokens"] > 0
        assert row["sampling/logp_difference/max"] == 0.0
        assert row["ppo_kl"] == 0.0
        for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"):
            assert row[f"clip_ratio/{name}"] == 0.0
        assert row["grad_norm"] > 0
        assert math.isfinite(row["loss"])
    assert rows[0]["kl"] == 0.0
    assert rows[1]["kl"] > 0.0


@pytest.mark.parametrize("algorithm", ["gspo", "cispo", "rloo", "reinforce_pp"])
def test_several_updates_a_step_compare_with_the_policy_that_sampled(algorithm: str, model: Path, tmp_path: Path):
    choices = ("loss.clip_low=1e-3", "loss.clip_high=1e-3", "algorithm.epochs=3", "algorithm.minibatches=2")
    rows = train(model, tmp_path, "steps=1", f"loss.algorithm={algorithm}", *choices)
    assert rows[0]["sampling/logp_difference/max"] == 0.0
    assert rows[0]["ppo_kl"] != 0.0
    low, high = rows[0]["clip_ratio/low_mean"], rows[0]["clip_ratio/high_mean"]
    assert low + high > 0
    assert rows[0]["clip_ratio/high_max"] >= high  # the first update clips nothing, later ones more than the mean
    assert rows[0]["clip_ratio/low_min"] == 0.0


def test_minibatches_and_epochs_are_repeated_exactly(model: Path, tmp_path: Path):
    options = ("steps=1", "loss.algorithm=gspo", "algorithm.epochs=2", "algorithm.minibatches=3")
    train(model, tmp_path / "one", *options)
    train(model, tmp_path / "other", *options)
    train(model, tmp_path / "seed", *options, "seed=1")
    one, other, seed = (weights(tmp_path / name) for name in ("one", "other", "seed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], seed[name]) for name in one)


def test_groups_of_one_learn_from_the_other_prompts(model: Path, tmp_path: Path):
    groups = ("algorithm.group_size=1", "algorithm.prompts_per_step=6")
    rows = train(model, tmp_path, "steps=1", "loss.algorithm=reinforce_pp", "loss.kl_coefficient=0.1", *groups)
    assert rows[0]["grad_norm"] > 0
    assert rows[0]["sampling/logp_difference/num_tokens"] == rows[0]["num_tokens"]
    assert "frac_reward_zero_std" not in rows[0]  # says nothing about groups of one


def first_of_each_prompt(asked: list[str]) -> Any:
    """Equal rewards for all samples of the prompts that were asked for first, unequal ones for later prompts."""

    def reward(prompts: list[str], completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        asked.extend(prompts[::3])
        dull = len(asked) <= 2
        return [1.0 if dull else sum(ids) / 1000 / len(ids) for ids in completion_ids]

    return reward


def test_dynamic_sampling_learns_from_further_prompts_and_counts_them(model: Path, tmp_path: Path):
    asked: list[str] = []
    rows = train(model, tmp_path, "steps=1", "loss.dynamic_sampling=true", reward=first_of_each_prompt(asked))
    assert len(asked) == len(set(asked)) == 4
    row = rows[0]
    assert row["dynamic_sampling/rounds"] == 2
    assert (row["dynamic_sampling/groups_sampled"], row["dynamic_sampling/groups_dropped"]) == (4, 2)
    assert row["dynamic_filtering_pass_rate"] == row["frac_reward_zero_std"] == 0.5
    assert row["grad_norm"] > 0
    assert row["sampling/logp_difference/max"] == 0.0
    samples = [row for row in read_json_lines(tmp_path / "samples.jsonl") if row["split"] == "train"]
    assert len(samples) == row["num_tokens"] / row["completions/mean_length"] == 4 * 3
    assert all(sample["advantage"] == 0.0 for sample in samples[:6])


def test_a_step_whose_groups_all_stay_dull_updates_nothing(model: Path, tmp_path: Path):
    rows = train(
        model,
        tmp_path,
        *("steps=1", "loss.algorithm=dapo", "loss.max_sampling_rounds=2"),
        reward=lambda prompts, completions, **columns: [0.5] * len(prompts),
    )
    assert (rows[0]["dynamic_sampling/rounds"], rows[0]["dynamic_filtering_pass_rate"]) == (2, 0.0)
    assert rows[0]["grad_norm"] == 0.0
    assert rows[0]["overlong_penalty/mean"] <= 0.0
    original = load_file(model / "model.safetensors")
    assert all(torch.equal(tensor, original[name]) for name, tensor in weights(tmp_path).items())


def test_the_entropy_bonus_raises_the_entropy_where_no_reward_does_anything(model: Path, tmp_path: Path):
    options = ("steps=4", "loss.entropy_coefficient=1.0", "algorithm.prompts_per_step=6")  # the same prompts each step
    rows = train(model, tmp_path, *options, reward=lambda prompts, completions, **columns: [1.0] * len(prompts))
    assert all(row["sampling/logp_difference/num_tokens"] > 0 for row in rows)
    assert all(row["loss"] == pytest.approx(-row["entropy"], rel=1e-5) for row in rows)
    assert rows[-1]["entropy"] > rows[0]["entropy"] + 0.1


CORRECTIONS = {
    "sequence_tis": (),
    "mis": (),
    "icepop": (),
    "geometric_mask": ("loss.mask_low=0.9", "loss.mask_high=1.1"),  # a tiny model is rounded coarsely
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_sampler_in_int8_is_corrected_and_the_difference_is_logged(correction: str, model: Path, tmp_path: Path):
    options = ("steps=1", "engine.quantization=int8", "algorithm.recompute_logprobs=true", *CORRECTIONS[correction])
    row = train(model, tmp_path, *options, f"loss.correction={correction}")[0]
    assert row["sampling/logp_difference/max"] > 0
    assert row["rollout_corr/k3_kl"] > 0
    assert row["rollout_corr/rollout_ppl"] != row["rollout_corr/training_ppl"] > 1
    assert 0 <= row["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert row["rollout_corr/rollout_is_std"] > 0
    assert row["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_algorithm_raises_the_reward(algorithm: str, model: Path, tmp_path: Path):
    updates = () if algorithm == "reinforce" else ("algorithm.minibatches=2", "algorithm.epochs=2")
    sampling = ("sampling.temperature=1.0", "algorithm.prompts_per_step=6", "algorithm.group_size=4")
    options = ("steps=20", "optimizer.learning_rate=5e-3", *sampling, *updates)
    rewards = [row["reward"] for row in train(model, tmp_path, f"loss.algorithm={algorithm}", *options)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards
