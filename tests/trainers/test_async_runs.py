"""Whole runs whose engine samples ahead of the trainer: they learn, within the bound, and end as others do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end")]

AHEAD = ("engine.sleep=false",)
MODES = {
    "one step off": ("asynchrony.mode=one_step_off", *AHEAD),
    "one step off, over-sampled": ("asynchrony.mode=one_step_off", "asynchrony.over_sampling=0.5", *AHEAD),
    "in flight": ("asynchrony.mode=in_flight", "asynchrony.max_staleness=2", *AHEAD),
    "in flight, recomputed": ("asynchrony.mode=in_flight", "asynchrony.held_cache=recompute", *AHEAD),
    "partial rollouts": ("asynchrony.step_tokens=30", "algorithm.group_size=2", "algorithm.prompts_per_step=4"),
    "over-sampled": ("asynchrony.over_sampling=0.5",),
}
BOUNDS = {"one step off": 1, "in flight, recomputed": 1, "partial rollouts": 1, "over-sampled": 1}  # others: 2


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """What the tiny model is to learn: token ids below 60."""
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ends: Any = list(range(100, 110))  # so that lengths differ
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_llama(folder, tokenizer=True, dtype=torch.bfloat16, eos_token_id=ends)


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    values = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 3,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 12},
        "algorithm": {"group_size": 4, "prompts_per_step": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "tracking": {"wandb": "disabled"},
    }
    return config_from_values(values, overrides)


def train(model: Path, output: Path, *overrides: str, reward: Any = share_of_low_ids) -> list[dict[str, Any]]:
    run(configuration(model, output, *overrides), reward_functions=[reward], train=TRAIN, evaluation=TRAIN[:2])
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rollout-sampler"]


@pytest.mark.parametrize("name", MODES)
def test_a_run_learns_from_samples_within_the_bound(name: str, model: Path, tmp_path: Path):
    rows = train(model, tmp_path, "steps=7", "evaluation.every=3", *MODES[name])
    assert [row["policy_version"] for row in rows] == list(range(1, 8))
    assert all(row["staleness/max"] <= BOUNDS.get(name, 2) for row in rows)
    assert max(row["staleness/max"] for row in rows) >= 1
    own = [row for row in rows if row["sampling/logp_difference/num_tokens"] > 0]
    assert own[0]["step"] == 1  # nothing is behind the first policy
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in own)  # the others are not compared
    assert any(row["ppo_kl"] != 0 for row in rows)  # the loss has a ratio to correct what is behind
    ahead = [row for row in rows if "async/idle_seconds/trainer" in row]
    assert len(ahead) == (7 if "engine.sleep=false" in MODES[name] else 0)
    assert all(row["async/idle_seconds/trainer"] >= 0 <= row["async/idle_seconds/sampler"] for row in ahead)
    assert all(row["perf/gen_tokens_per_s"] >= 0 for row in rows)
    assert rows[-1]["async/groups_waiting"] == rows[-1]["async/groups_in_flight"] == 0
    assert not samplers()


@pytest.mark.parametrize("mode", ["one step off", "in flight"])
def test_stale_samples_are_corrected_by_importance_weights_where_the_recipe_asks_for_it(
    mode: str, model: Path, tmp_path: Path
):
    rows = train(model, tmp_path, "algorithm.recompute_logprobs=true", "loss.correction=tis", *MODES[mode])
    assert rows[0]["sampling/importance_sampling_ratio/min"] == rows[0]["sampling/importance_sampling_ratio/max"] == 1
    assert rows[2]["sampling/importance_sampling_ratio/min"] < 1
    assert rows[2]["sampling/importance_sampling_ratio/max"] <= 2
    assert rows[2]["sampling/logp_difference/num_tokens"] == 0  # a distance between policies is no mismatch
    assert all(row["ppo_kl"] == 0 for row in rows)  # the ratio's denominator is now the step's first policy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one step off", "in flight, recomputed"])
def test_the_reward_rises(name: str, model: Path, tmp_path: Path):
    options = ("steps=25", "algorithm.prompts_per_step=6", "optimizer.learning_rate=5e-3")
    rows = train(model, tmp_path, *options, *MODES[name])
    first, last = (sum(row["reward"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.1, (first, last)


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        ("one step off", "loss.algorithm=ppo"),
        ("one step off, over-sampled", "loss.algorithm=dapo"),
        ("in flight", "loss.algorithm=dapo"),
        ("over-sampled", "loss.kl_coefficient=0.1"),
    ],
)
def test_other_algorithms_run_ahead_as_well(mode: str, option: str, model: Path, tmp_path: Path):
    rows = train(model, tmp_path, option, *MODES[mode])
    assert len(rows) == 3
    assert all(row["staleness/max"] <= BOUNDS.get(mode, 2) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    if option == "loss.algorithm=dapo":
        assert all(row["dynamic_sampling/groups_sampled"] >= 2 for row in rows)


@pytest.mark.parametrize("kind", [("policy.kind=transformers",), ("policy.kind=transformers", "policy.lora.rank=4")])
def test_a_policy_of_transformers_learns_while_the_engine_samples(kind: tuple[str, ...], model: Path, tmp_path: Path):
    rows = train(model, tmp_path, *kind, "algorithm.recompute_logprobs=true", *MODES["one step off"])
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1]
    assert 0 < rows[0]["sampling/logp_difference/max"] < 0.2  # bfloat16 in another implementation
    assert rows[2]["sampling/logp_difference/num_tokens"] == 0
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one step off, over-sampled", "in flight", "over-sampled"])
def test_a_resumed_run_goes_on_with_what_was_on_its_way(mode: str, model: Path, tmp_path: Path):
    """Where the clock has no say, it is the unbroken run: a step ahead, and with over-sampling."""
    options = ("steps=6", "checkpoint.every=2", *MODES[mode])
    unbroken = train(model, tmp_path / "unbroken", *options)
    left = iter(range(5))

    def interrupted(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        if next(left, None) is None:  # in step 4 or 5
            raise KeyboardInterrupt
        return share_of_low_ids(prompts, completions, completion_ids)

    interrupted.__name__ = share_of_low_ids.__name__  # the rewards are a setting of the run
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "broken", *options, reward=interrupted)
    assert len(list((tmp_path / "broken" / "checkpoints").glob("step-*"))) >= 1
    resumed = train(model, tmp_path / "broken", *options, "resume=true")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert all(row["staleness/max"] <= BOUNDS.get(mode, 2) for row in resumed)
    assert resumed[-1]["async/groups_waiting"] == resumed[-1]["async/groups_in_flight"] == 0
    if mode != "in flight":
        kept = ("reward", "loss", "grad_norm", "entropy", "num_tokens", "staleness/mean", "async/steps_waited/mean")
        assert [[row[name] for name in kept] for row in resumed] == [[row[name] for name in kept] for row in unbroken]
        ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("broken", "unbroken"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("mode", ["one step off", "in flight"])
def test_a_run_that_breaks_off_leaves_no_sampler_behind(mode: str, model: Path, tmp_path: Path):
    calls = iter(range(3))

    def interrupted(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return [0.5] * len(prompts)

    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path, *MODES[mode], reward=interrupted)
    assert not samplers()
