"""GRPO and its relatives on episodes, end to end: every step starts on policy, resumes exactly, and learns."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_trainers.config import RunConfig
from rollout_trainers.environments import Action, StepResult, ToolEnvironment
from rollout_trainers.loss_config import PRESETS
from rollout_trainers.run import run
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.episode_runs import TRAIN, LowIds, episode_run, make_talkative_llama

RECIPE = Path(__file__).parents[3] / "recipes" / "tool_use.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative_llama(tmp_path_factory.mktemp("model"))


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    sections = {
        "engine": {"max_model_len": 128, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 20},
        "algorithm": {"group_size": 3, "prompts_per_step": 3, "micro_batch_tokens": 200},
    }
    return episode_run(model, output, *overrides, **sections)


def train(model: Path, output: Path, *overrides: str, environment: Any = LowIds) -> list[dict[str, Any]]:
    run(configuration(model, output, *overrides), train=TRAIN, evaluation=TRAIN[:2], environment=environment)
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


@pytest.mark.slow
def test_training_on_episodes_raises_their_reward_and_is_on_policy_in_every_turn(model: Path, tmp_path: Path) -> None:
    rows = train(model, tmp_path, "steps=14", "algorithm.prompts_per_step=5", "optimizer.learning_rate=1e-2")
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in rows)
    assert all(row["clip_ratio/region_mean"] == 0.0 for row in rows)
    assert max(row["num_turns/mean"] for row in rows) > 1.3
    assert rows[0]["rewards/environment/mean"] == rows[0]["reward"]
    assert rows[0]["environment/error_frequency"] == 0.0 and rows[0]["length"] > 0
    first, last = (sum(row["reward"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > first + 0.1, (first, last)
    samples = read_json_lines(tmp_path / "samples.jsonl")
    assert any("\nuser: " in sample["completion"] for sample in samples)


# cases TR-03, TR-06
@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_every_algorithm_learns_from_episodes_on_policy_whatever_the_micro_batches(
    algorithm: str, model: Path, tmp_path: Path
) -> None:
    options = ("steps=1", f"loss.algorithm={algorithm}", "loss.kl_coefficient=0.01", "sampling.temperature=0.7")
    found = []
    for tokens in (200, 2000):
        (row,) = train(model, tmp_path / str(tokens), *options, f"algorithm.micro_batch_tokens={tokens}")
        assert row["sampling/logp_difference/max"] == 0.0 and row["sampling/logp_difference/num_tokens"] > 0
        assert row["ppo_kl"] == row["clip_ratio/region_mean"] == 0.0
        assert row["kl"] == 0.0  # the reference is the policy still
        assert row["num_turns/max"] > 1
        assert row["grad_norm"] > 0
        found.append((row["loss"], row["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=2e-2, abs=1e-6)  # sums in bfloat16


@pytest.mark.parametrize("kind", ["value_head", "separate"])
def test_a_critic_learns_from_episodes(kind: str, model: Path, tmp_path: Path) -> None:
    options = ("steps=2", "loss.algorithm=ppo", f"critic.kind={kind}", "algorithm.recompute_logprobs=true")
    for row in train(model, tmp_path, *options):
        assert row["sampling/logp_difference/max"] == 0.0
        assert row["critic/vf_explained_var"] <= 1.0 and row["critic/grad_norm"] > 0


def test_a_sampler_that_is_not_the_trainer_is_corrected_in_episodes_too(model: Path, tmp_path: Path) -> None:
    options = ("steps=1", "engine.quantization=int8", "algorithm.recompute_logprobs=true")
    (row,) = train(model, tmp_path, *options)
    assert 0 < row["sampling/logp_difference/max"] < 0.1
    assert 0.9 < row["sampling/importance_sampling_ratio/mean"] < 1.1


def test_a_resumed_run_of_episodes_is_the_unbroken_one(model: Path, tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    options = ("algorithm.minibatches=2", "checkpoint.every=1")
    whole = train(model, unbroken, *options)
    train(model, broken, *options, "steps=2")
    train(model, broken, *options, "resume=true", "environment.max_concurrent=2")
    rows = [row for row in read_json_lines(broken / "metrics.jsonl") if "reward" in row]
    kept = ("step", "reward", "loss", "grad_norm", "num_tokens", "num_turns/mean")
    assert [[row[name] for name in kept] for row in rows] == [[row[name] for name in kept] for row in whole]
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (broken, unbroken))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_episode_that_fails_does_not_stop_the_training(model: Path, tmp_path: Path) -> None:
    class Unlucky(LowIds):
        async def step(self, action: Action) -> StepResult:
            if len(action.token_ids) % 3 == 0:
                raise OSError("no route")
            return await super().step(action)

    rows = train(model, tmp_path, environment=Unlucky)
    assert any(row["environment/error_frequency"] > 0 for row in rows)
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in rows)


def test_the_tool_use_recipe_runs_several_turns_on_a_tiny_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        f"model={model}",
        f"output_dir={tmp_path}",
        "steps=2",
        "optimizer.warmup_steps=0",
        "tracking.wandb=disabled",
        "algorithm.group_size=2",
        "algorithm.prompts_per_step=2",
        "task.eval_size=2",
        "sampling.max_tokens=12",
        "engine.max_model_len=1024",  # its tokens are letters
        "engine.kv_cache_memory=4 MiB",
    ]
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *overrides])
    runpy.run_path(str(RECIPE), run_name="__main__")
    rows = [row for row in read_json_lines(tmp_path / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["num_turns/max"] for row in rows) > 1
    assert "tools/call_frequency" in rows[0] and "rewards/final_number_reward/mean" in rows[0]


async def turns(environment: ToolEnvironment, *texts: str) -> list[StepResult]:
    prompt = [{"role": "system", "content": "Use it."}, {"role": "user", "content": "12 * 34"}]
    seen = await environment.reset(Example(prompt, {"answer": "408"}))
    assert [seen[0], seen[-1]] == prompt and len(seen) == 6  # a worked example stands between them
    return [await environment.step(Action(text, [5], "stop")) for text in texts]


def test_the_recipes_calculator_computes_and_earns_its_use_once() -> None:
    names = runpy.run_path(str(RECIPE), run_name="recipe")
    make = names["Calculator"]
    used = asyncio.run(turns(make(), "<calc>12 * 34</calc>", "<calc>(1+2)/-4</calc>", "It is 408."))
    assert used[0].observation == [{"role": "tool", "content": "408"}]
    assert used[1].observation == [{"role": "tool", "content": "-0.75"}]
    assert [result.reward for result in used] == [0.2, 0.0, 0.0] and [result.done for result in used] == [
        False,
        False,
        True,
    ]
    never = asyncio.run(turns(make(), "400", "about 400"))
    assert never[0].observation == names["REMINDER"] and never[1].done
    assert [result.reward for result in never] == [0.0, 0.0]
    wrong = asyncio.run(turns(make(), "<calc>__import__('os')</calc>", "<calc>2 ** 9</calc>", "<calc>1/0</calc>"))
    assert all(result.reward == 0.0 and "error" in str(result.observation) for result in wrong)
