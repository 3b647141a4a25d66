"""PPO end to end with the real engine on a tiny random model: on-policy, its critic learns, and it resumes exactly."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.worker.ledger import process_resident_bytes
from rollout_trainers.critic import SeparateCritic
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.optimizer import MasterAdamW
from rollout_trainers.ppo import PPOTrainer
from rollout_trainers.recipe import config_from_values, load_recipe
from rollout_trainers.run import run, train_from_recipe
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.reward_models import make_reward_model
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
RECIPE = Path(__file__).parents[2] / "recipes" / "ppo_critic.yaml"
MIB = 1 << 20
KINDS = ("critic.kind=value_head", "critic.kind=separate")


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


def always_1(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1.0] * len(prompts)


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
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 1, "prompts_per_step": 6, "micro_batch_tokens": 40},
        "loss": {"algorithm": "ppo"},
        "optimizer": {"learning_rate": 1e-2},
        "tracking": {"wandb": "disabled", "diagnose_above": None},
    }
    run(config_from_values(values, overrides), reward_functions=[reward], train=TRAIN)
    return step_metrics(output)


def step_metrics(output: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# case TR-06
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_starts_on_policy_and_reports_its_critic(kind: str, model: Path, tmp_path: Path):
    rows = train(model, tmp_path, kind, "sampling.temperature=0.7", "loss.kl_coefficient=0.1")
    for row in rows:
        assert row["sampling/logp_difference/num_tokens"] == row["completions/mean_length"] * 6
        assert row["sampling/logp_difference/max"] == row["ppo_kl"] == row["clip_ratio/region_mean"] == 0.0
        assert row["grad_norm"] > 0 < row["critic/grad_norm"]
        assert row["critic/vf_loss"] > 0
        assert row["critic/vf_clipfrac"] == 0.0  # one update: the values are the old ones
        assert row["critic/vpred_mean"] == pytest.approx(row["critic/values/mean"], abs=1e-3)
        assert row["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-5)
        assert row["critic/values/min"] <= row["critic/values/mean"] <= row["critic/values/max"]
        assert row["critic/vf_explained_var"] < 1
        assert row["objective/kl_coef"] == 0.1
    assert rows[0]["critic/returns/mean"] != 0
    assert (rows[0]["objective/kl"], rows[0]["kl"]) == (0.0, 0.0)
    assert rows[1]["objective/kl"] != 0.0
    assert rows[0]["critic/lr"] == {"value_head": 1e-3, "separate": 1e-5}[kind.partition("=")[2]]


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_warm_up_only_the_critic_learns(kind: str, model: Path, tmp_path: Path):
    rate = ("critic.learning_rate=1e-2", "loss.gae_lambda=1")
    warm_up = ("steps=4", "critic.warmup_steps=4", "algorithm.epochs=4")
    rows = train(model, tmp_path, kind, *rate, *warm_up, reward=always_1)
    original = load_file(model / "model.safetensors")
    assert same(weights(tmp_path), original)
    assert all(row["grad_norm"] == row["learning_rate"] == row["ppo_kl"] == 0.0 for row in rows)
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in rows)
    assert rows[-1]["critic/vf_loss"] < rows[0]["critic/vf_loss"] / 2
    trained = train(model, tmp_path / "on", kind, *rate, "steps=2", "critic.warmup_steps=1")
    assert trained[0]["grad_norm"] == 0.0 < trained[1]["grad_norm"]
    assert not same(weights(tmp_path / "on"), original)


def of_short_prompts(prompts: list[str], completions: Any, **columns: Any) -> list[float]:
    return [float(len(prompt) < 5) for prompt in prompts]


@pytest.mark.parametrize("options", [(KINDS[0], "critic.learning_rate=3e-2"), (KINDS[1], "critic.learning_rate=3e-3")])
def test_a_critic_learns_to_explain_what_rewards_depend_on(options: tuple[str, ...], model: Path, tmp_path: Path):
    """One token each, so that all states that there are are those after the six prompts."""
    still = ("steps=8", "critic.warmup_steps=8", "sampling.max_tokens=1", "critic.value_clip=null")
    rows = train(model, tmp_path, *options, *still, "algorithm.epochs=8", reward=of_short_prompts)
    assert rows[0]["critic/vf_explained_var"] < 0.5
    assert rows[-1]["critic/vf_explained_var"] > 0.9


def test_several_updates_clip_ratios_and_values(model: Path, tmp_path: Path):
    narrow = ("loss.clip_low=1e-3", "loss.clip_high=1e-3", "critic.value_clip=1e-3", "critic.learning_rate=1e-2")
    row = train(model, tmp_path, "steps=1", "algorithm.epochs=3", "algorithm.minibatches=2", *narrow)[0]
    assert row["clip_ratio/region_mean"] > 0
    assert 0 < row["critic/vf_clipfrac"] < 1
    assert row["ppo_kl"] != 0.0
    assert row["sampling/logp_difference/max"] == 0.0


def test_a_value_heads_loss_reaches_the_policy_by_its_policy_gradient_alone(model: Path, tmp_path: Path):
    """The first step's advantages are the same in all runs; nothing but the critic's loss can make a difference."""

    def first_gradient_norm(name: str, *options: str) -> float:
        return train(model, tmp_path / name, "steps=1", "critic.value_clip=null", *options)[0]["grad_norm"]

    reads = first_gradient_norm("reads", "critic.policy_gradient=0")
    assert first_gradient_norm("slow", "critic.policy_gradient=0", "critic.learning_rate=0") == reads
    assert first_gradient_norm("moves", "critic.policy_gradient=10") != reads


def test_a_sampler_in_int8_is_corrected_and_truncated_samples_can_be_left_out(model: Path, tmp_path: Path):
    int8 = ("steps=1", "engine.quantization=int8", "algorithm.recompute_logprobs=true")
    row = train(model, tmp_path / "int8", *int8)[0]
    assert row["sampling/logp_difference/max"] > 0
    assert row["rollout_corr/k3_kl"] > 0
    assert row["grad_norm"] > 0 < row["critic/grad_norm"]
    dropped = train(model, tmp_path / "dropped", "steps=1", "loss.drop_truncated=true")[0]
    assert dropped["completions/clipped_ratio"] == 1.0  # nothing is left to learn from
    assert dropped["grad_norm"] == dropped["critic/grad_norm"] == dropped["critic/vf_loss"] == 0.0


def test_sampler_policy_and_critic_share_one_memory_budget(model: Path, tmp_path: Path):
    budget = process_resident_bytes() // MIB + 400
    pool = ("engine.kv_cache_memory=null", f"engine.memory_budget={budget}MiB")
    rows = train(model, tmp_path, "critic.kind=separate", *pool)
    assert [row["memory/budget_bytes"] for row in rows] == [budget * MIB] * 2
    assert all(0 < row["memory/kv_pool_bytes"] < 400 * MIB for row in rows)


def test_a_critic_of_its_own_holds_gradients_and_activations_only_while_it_learns(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between the wake-up and the next sleep the critic's gradients hold no page, as the policy's; its passes recompute
    their layers where the policy's do, which changes no bit."""
    held: list[int] = []
    recomputes: list[bool] = []

    def resume_engine(trainer: PPOTrainer) -> None:
        optimizers = trainer.optimizers
        assert set(optimizers) == {"optimizer", "critic"}
        for optimizer in optimizers.values():
            assert isinstance(optimizer, MasterAdamW) and optimizer.gradient_memory is not None
            assert all(master.grad is None for master in optimizer.masters.values())
            held.append(optimizer.gradient_memory.resident_bytes())
        assert isinstance(trainer.critic, SeparateCritic)
        recomputes.append(trainer.critic.gradient_checkpointing)
        GRPOTrainer.resume_engine(trainer)

    monkeypatch.setattr(PPOTrainer, "resume_engine", resume_engine)
    updates = ("critic.kind=separate", "algorithm.minibatches=2", "critic.learning_rate=1e-2")
    plain = train(model, tmp_path / "plain", *updates)
    saving = train(model, tmp_path / "saving", *updates, "policy.gradient_checkpointing=true")
    assert held == [0] * 8
    assert recomputes == [False] * 2 + [True] * 2
    assert [row["critic/vf_loss"] for row in saving] == [row["critic/vf_loss"] for row in plain]
    assert same(weights(tmp_path / "saving"), weights(tmp_path / "plain"))


def interrupted_after(calls: int) -> Any:
    """`share_of_low_ids` until it has been called so often; then the run is interrupted in the middle of a step."""
    left = iter(range(calls))

    @functools.wraps(share_of_low_ids)
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return share_of_low_ids(prompts, completions, **columns)

    return reward


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_critic_and_the_kl_coefficient_of_an_unbroken_one(kind: str, model: Path, tmp_path: Path):
    control = ("loss.kl_coefficient=0.05", "loss.kl_target=0.5", "loss.kl_gain=1.0")
    updates = ("algorithm.minibatches=2", "checkpoint.every=2", "critic.learning_rate_warmup=3", "steps=4")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = train(model, unbroken, kind, *control, *updates)
    with pytest.raises(KeyboardInterrupt):
        train(model, broken, kind, *control, *updates, reward=interrupted_after(3))
    resumed = train(model, broken, kind, *control, *updates, "resume=true")
    times = ("timing_s/", "perf/", "memory/", "engine/")
    plain = [[{k: v for k, v in row.items() if not k.startswith(times)} for row in rows] for rows in (whole, resumed)]
    assert plain[0] == plain[1]
    assert len({row["objective/kl_coef"] for row in whole}) == 4
    assert same(weights(broken), weights(unbroken))
    states = [
        torch.load(output / "checkpoints" / "step-000004" / "trainer.pt")["optimizers"]["critic"]
        for output in (unbroken, broken)
    ]
    assert same(states[0]["masters"], states[1]["masters"])
    for name, moments in states[0]["moments"].items():
        assert moments["step"] > 0 and same(moments, states[1]["moments"][name])
    with pytest.raises(ValueError, match=r"critic\.value_clip was 0\.2, is 0\.5"):
        train(model, broken, kind, *control, *updates, "resume=true", "critic.value_clip=0.5")


def test_a_reward_model_and_a_critic_that_begins_as_it_are_named_in_a_recipe(model: Path, tmp_path: Path):
    folder = make_reward_model(tmp_path / "rm")
    critic = ("critic.kind=separate", f"critic.model={folder}")
    rows = train(model, tmp_path / "run", f"reward_model.model={folder}", "reward_model.weight=0.5", *critic)
    for row in rows:
        both = row["rewards/share_of_low_ids/mean"] + row["rewards/RewardModel/mean"]
        assert row["reward"] == pytest.approx(both, rel=1e-5)
        assert row["rewards/RewardModel/std"] > 0
    assert abs(rows[0]["critic/values/mean"]) > 0.01  # the reward model's opinions, not a fresh head's
    with pytest.raises(ValueError, match="no sequence classifier"):
        train(model, tmp_path / "wrong", f"reward_model.model={model}")


def test_the_recipe_runs_from_the_file_to_the_report(model: Path, tmp_path: Path):
    sizes = ("steps=3", "optimizer.warmup_steps=1", "task.train_size=8", "task.eval_size=4", "sampling.max_tokens=8")
    step = ("algorithm.prompts_per_step=4", "engine.kv_cache_memory=4 MiB", "tracking.wandb=disabled")
    overrides = [f"model={model}", f"output_dir={tmp_path}", *sizes, *step]
    assert train_from_recipe(str(RECIPE), overrides) == 0
    rows = step_metrics(tmp_path)
    assert [row["grad_norm"] > 0 for row in rows] == [False, False, True]  # two steps of warm-up
    assert all(row["critic/vf_loss"] >= 0 for row in rows)
    assert [row["objective/kl_coef"] for row in rows] == pytest.approx([0.02, 0.02 * 0.98, 0.02 * 0.98**2])
    assert "Critic: loss" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.kind=separate"], "critic.kind='separate' is not valid: it must be left out with loss.baseline"),
        (["loss.algorithm=ppo", "critic.kind=tree"], "critic.kind='tree' is not valid: it must be one of 'value_head'"),
        (["loss.algorithm=ppo", "critic.model=x"], "left out where kind is not 'separate'"),
        (
            ["loss.algorithm=ppo", "critic.kind=separate", "critic.policy_gradient=1"],
            "critic.policy_gradient=1.0 is not",
        ),
        (["loss.algorithm=ppo", "critic.value_clip=0"], "critic.value_clip=0.0 is not valid: it must be a finite"),
        (["loss.algorithm=ppo", "critic.warmup_steps=101"], "critic.warmup_steps=101 is not valid: it must be at most"),
        (["loss.algorithm=ppo", "critic.learning_rate=-1"], "critic.learning_rate=-1.0 is not valid"),
        (["loss.algorithm=ppo", "loss.gae_lambda=1.5"], "loss.gae_lambda=1.5 is not valid: it must be at most 1"),
        (["loss.gae_lambda=0.9"], "loss.gae_lambda=0.9 is not valid: it must be left out with baseline 'group_mean'"),
        (["loss.algorithm=ppo", "loss.advantage_scale=batch_std"], "loss.advantage_scale='batch_std' is not valid"),
        (["loss.algorithm=ppo", "loss.ratio=sequence"], "'token' or 'gspo_token' with baseline 'critic'"),
        (["loss.algorithm=ppo", "loss.dynamic_sampling=true"], "where groups of equal rewards do teach something"),
        (["loss.kl_target=1"], "loss.kl_target=1.0 is not valid: it must be None where kl_coefficient is 0"),
        (["loss.kl_gain=1"], "loss.kl_gain=1.0 is not valid: it must be left out without a kl_target"),
        (["loss.kl_coefficient=1", "loss.kl_target=0"], "loss.kl_target=0.0 is not valid: it must be a finite number"),
        (["reward_model.weight=2"], "reward_model.model=None is not valid: it must be a folder where weight is given"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(overrides: list[str], message: str):
    with pytest.raises(ValueError, match="is not valid") as raised:
        config_from_values({"model": "x"}, overrides)
    assert message in str(raised.value)


def test_other_baselines_take_a_kl_target_and_the_recipe_says_what_it_means():
    assert config_from_values({"model": "x"}, ["loss.kl_coefficient=0.1", "loss.kl_target=2"]).loss.kl_target == 2.0
    config = load_recipe(RECIPE)
    assert (config.loss.baseline, config.critic.kind, config.loss.kl_target) == ("critic", "value_head", 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("critic.kind=value_head",), ("critic.kind=separate", "critic.learning_rate=1e-3")])
def test_it_raises_the_reward_and_its_critic_comes_to_expect_it(kind: tuple[str, ...], model: Path, tmp_path: Path):
    sampling = ("algorithm.group_size=4", "algorithm.minibatches=2", "algorithm.epochs=2")
    rows = train(model, tmp_path, "steps=20", "optimizer.learning_rate=5e-3", *kind, *sampling)
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.15, rewards
    gaps = [abs(row["critic/values/mean"] - row["critic/returns/mean"]) for row in rows]
    assert sum(gaps[-4:]) / 4 < sum(gaps[:4]) / 8, gaps
