"""Whole runs on episodes that the engine samples ahead of the trainer, or keeps from one step to the next."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_trainers.config import RunConfig
from rollout_trainers.run import run
from rollout_trainers.tracking import read_json_lines
from tests.support.episode_runs import TRAIN, LowIds, episode_run, make_talkative_llama

AHEAD = ("engine.sleep=false",)
MODES = {
    "one step off": ("asynchrony.mode=one_step_off", *AHEAD),
    "in flight": ("asynchrony.mode=in_flight", "asynchrony.max_staleness=2", *AHEAD),
    "partial rollouts": ("asynchrony.step_tokens=80",),
    "over-sampled": ("asynchrony.over_sampling=0.5",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative_llama(tmp_path_factory.mktemp("model"))


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    sections = {
        "engine": {"max_model_len": 160, "kv_cache_memory": "4 MiB"},
        "sampling": {"max_tokens": 30},
        "algorithm": {"group_size": 3, "prompts_per_step": 2, "micro_batch_tokens": 300},
    }
    return episode_run(model, output, *overrides, **sections)


def train(
    model: Path, output: Path, *overrides: str, environment: Any = LowIds, rewards: Any = ()
) -> list[dict[str, Any]]:
    config = configuration(model, output, *overrides)
    run(config, train=TRAIN, evaluation=TRAIN[:2], environment=environment, reward_functions=rewards)
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def threads_of_a_run() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name in ("rollout-sampler", "rollout-event-loop")]


# case TR-06
@pytest.mark.parametrize("mode", MODES)
def test_a_run_learns_from_episodes_within_the_bound_and_from_the_samplers_own_logprobs(
    mode: str, model: Path, tmp_path: Path
) -> None:
    rows = train(model, tmp_path, "steps=6", "evaluation.every=3", *MODES[mode])
    assert [row["policy_version"] for row in rows] == list(range(1, 7))
    bound = 2 if mode == "in flight" else 1
    assert 1 <= max(row["staleness/max"] for row in rows) <= bound
    own = [row for row in rows if row["sampling/logp_difference/num_tokens"] > 0]
    assert own[0]["step"] == 1
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in own)  # bit for bit, in every turn
    assert any(row["ppo_kl"] != 0 for row in rows)
    assert all(row["grad_norm"] > 0 and row["num_turns/mean"] >= 1 for row in rows)
    assert all(row["environment/error_frequency"] == 0.0 for row in rows)
    assert rows[-1]["async/groups_waiting"] == rows[-1]["async/groups_in_flight"] == 0
    assert not threads_of_a_run()


def test_a_critic_learns_from_episodes_of_older_policies(model: Path, tmp_path: Path) -> None:
    rows = train(model, tmp_path, "loss.algorithm=ppo", *MODES["one step off"])
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1]
    assert all(row["critic/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one step off", "in flight"])
def test_a_resumed_run_has_every_group_once_and_a_step_ahead_it_is_the_unbroken_one(
    mode: str, model: Path, tmp_path: Path
) -> None:
    options = ("steps=5", "checkpoint.every=2", *MODES[mode])
    taken: list[int] = []
    limit = 5 if mode == "in flight" else 4

    def interrupted(prompts: Any, trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step + 1 >= limit:
            raise KeyboardInterrupt
        return [0.0] * len(prompts)

    def watched(prompts: Any, trainer_state: Any, **columns: Any) -> list[float]:
        taken.extend([trainer_state.global_step + 1] * len(prompts))
        return [0.0] * len(prompts)

    interrupted.__name__ = watched.__name__  # the rewards are a setting of the run
    evaluation = ("evaluation.at_start=false", "evaluation.at_end=false")
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "broken", *options, *evaluation, rewards=[interrupted])
    assert not threads_of_a_run()
    resumed = train(model, tmp_path / "broken", *options, *evaluation, "resume=true", rewards=[watched])
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5]
    first = 5 if mode == "in flight" else 3
    assert taken == [step for step in range(first, 6) for _ in range(6)]
    assert resumed[-1]["async/groups_waiting"] == resumed[-1]["async/groups_in_flight"] == 0
    assert all(row["staleness/max"] <= 2 for row in resumed)
    if mode == "one step off":
        unbroken = train(model, tmp_path / "unbroken", *options, *evaluation, rewards=[watched])
        kept = ("reward", "loss", "grad_norm", "num_tokens", "num_turns/mean", "length", "staleness/mean")
        assert [[row[name] for name in kept] for row in resumed] == [[row[name] for name in kept] for row in unbroken]
        ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("broken", "unbroken"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("mode", ["one step off", "in flight", "partial rollouts"])
def test_a_run_that_breaks_off_closes_every_environment(mode: str, model: Path, tmp_path: Path) -> None:
    made: list[LowIds] = []

    def make() -> LowIds:
        made.append(LowIds())
        return made[-1]

    def interrupted(prompts: Any, trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step == 1:
            raise KeyboardInterrupt
        return [0.0] * len(prompts)

    with pytest.raises(KeyboardInterrupt):
        options = ("steps=6", "evaluation.at_start=false", *MODES[mode])
        train(model, tmp_path, *options, environment=make, rewards=[interrupted])
    assert made and all(environment.is_closed for environment in made)
    assert not threads_of_a_run()


def test_rewards_that_ask_for_environments_get_them_after_a_break_too(model: Path, tmp_path: Path) -> None:
    stops = True

    def turns(prompts: Any, environments: list[LowIds], trainer_state: Any, **columns: Any) -> list[float]:
        if stops and trainer_state.global_step == 2:
            raise KeyboardInterrupt
        return [float(len(environment.actions)) for environment in environments]

    options = ("steps=4", "checkpoint.every=1", "evaluation.at_start=false", *MODES["one step off"])
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path, *options, rewards=[turns])
    stops = False
    rows = train(model, tmp_path, *options, "resume=true", rewards=[turns])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["rewards/turns/mean"] == row["num_turns/mean"] for row in rows)
