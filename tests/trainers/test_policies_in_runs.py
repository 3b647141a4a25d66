"""Whole runs with each kind of policy on a tiny model: they learn, resume exactly, and save what others load."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout import LLM
from rollout_trainers.config import RunConfig
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.optimizer import MasterAdamW
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import RunResult, run
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example, Task
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
WHOLE = ("policy.kind=transformers", "algorithm.recompute_logprobs=true")
LORA = (*WHOLE, "policy.lora.rank=8", "policy.lora.alpha=32", "optimizer.learning_rate=2e-2")


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, dtype=torch.bfloat16)


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    values = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 4,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 12},
        "algorithm": {"group_size": 4, "prompts_per_step": 3, "micro_batch_tokens": 100},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "tracking": {"wandb": "disabled"},
    }
    return config_from_values(values, overrides)


def train(model: Path, output: Path, *overrides: str, reward: Any = share_of_low_ids) -> RunResult:
    return run(configuration(model, output, *overrides), reward_functions=[reward], train=TRAIN)


def step_metrics(output: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


@pytest.mark.parametrize("policy", [WHOLE, LORA], ids=["whole", "lora"])
def test_training_raises_the_reward(policy: tuple[str, ...], model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=16", "algorithm.prompts_per_step=6", "engine.dtype=float32", *policy)
    rows = step_metrics(tmp_path)
    first, last = [sum(row["reward"] for row in part) / 4 for part in (rows[:4], rows[-4:])]
    assert last > first + 0.15, (first, last)
    for row in rows:  # case TR-06
        assert 0 < row["sampling/logp_difference/max"] < 1e-3
        assert row["clip_ratio/region_mean"] == 0.0
    assert [row["policy_version"] for row in rows] == list(range(1, 17))


def test_bfloat16_weights_follow_float32_masters_and_checkpointing_changes_no_bit(model: Path, tmp_path: Path):
    losses = []
    for name, option in (("plain", "false"), ("checkpointed", "true")):
        train(model, tmp_path / name, *WHOLE, "steps=2", f"policy.gradient_checkpointing={option}")
        saved = load_file(tmp_path / name / "model" / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
        losses.append([(row["loss"], row["grad_norm"]) for row in step_metrics(tmp_path / name)])
    assert losses[0] == losses[1]
    assert all(norm > 0 for _, norm in losses[0])


@pytest.mark.parametrize(
    "policy",
    [WHOLE, (*LORA, "policy.lora.dropout=0.1"), ("policy.gradient_checkpointing=true",)],
    ids=["whole", "lora", "shared"],
)
def test_a_resumed_run_has_the_rewards_and_weights_of_an_unbroken_one(
    policy: tuple[str, ...], model: Path, tmp_path: Path
):
    options = ("checkpoint.every=2", "loss.kl_coefficient=0.01", "algorithm.minibatches=2", *policy)
    train(model, tmp_path / "unbroken", *options)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "broken", *options, reward=interrupted_after(3))
    train(model, tmp_path / "broken", *options, "resume=true")
    kept = ("step", "reward", "loss", "grad_norm", "kl", "entropy")
    rows = [[[row[name] for name in kept] for row in step_metrics(tmp_path / run)] for run in ("unbroken", "broken")]
    assert rows[0] == rows[1]
    ours, theirs = [load_file(tmp_path / run / "model" / "model.safetensors") for run in ("unbroken", "broken")]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def interrupted_after(calls: int) -> Any:
    left = iter(range(calls))

    @functools.wraps(share_of_low_ids)
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return share_of_low_ids(prompts, completions, **columns)

    return reward


def test_a_run_with_lora_leaves_its_base_alone_and_saves_merged_weights_and_the_adapter(model: Path, tmp_path: Path):
    train(model, tmp_path, "steps=2", "engine.dtype=float32", *LORA)
    saved = tmp_path / "model"
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        before = base(ids).logits
        with_adapter = PeftModel.from_pretrained(base, str(saved / "adapter"))(ids).logits
    torch.testing.assert_close(merged, with_adapter, rtol=1e-4, atol=1e-4)
    assert (merged - before).abs().max() > 1e-2
    changed = load_file(saved / "model.safetensors")
    kept = load_file(model / "model.safetensors")
    untouched = [name for name in kept if torch.equal(changed[name], kept[name].float())]
    assert sorted(untouched) == sorted(name for name in kept if "proj" not in name)


@pytest.mark.parametrize("policy", [WHOLE, LORA], ids=["whole", "lora"])
def test_a_critics_head_learns_on_the_hidden_states_of_such_a_policy(
    policy: tuple[str, ...], model: Path, tmp_path: Path
):
    train(model, tmp_path, "steps=3", "loss.algorithm=ppo", "critic.learning_rate=1e-2", *policy)
    rows = step_metrics(tmp_path)
    assert all(row["grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    assert rows[-1]["critic/vpred_mean"] > rows[0]["critic/vpred_mean"]  # from about 0 towards the rewards


def test_optimiser_states_that_are_away_while_the_engine_samples_change_no_bit(model: Path, tmp_path: Path):
    def trained(offload: str) -> dict[str, torch.Tensor]:
        llm = LLM(model, max_model_len=64, kv_cache_memory="2 MiB")
        config = configuration(model, tmp_path, f"policy.offload={offload}")
        policy = SharedPolicy(llm.shared_model(), temperature=1.0)
        task = Task("low ids", TRAIN, [], (share_of_low_ids,))
        trainer = GRPOTrainer(RolloutProducer(llm, 1.0, 12, seed=0), policy, task, config)
        optimizer = trainer.optimizers["optimizer"]
        assert isinstance(optimizer, MasterAdamW)
        for step in (1, 2):
            before = {name: master.data_ptr() for name, master in optimizer.masters.items()}
            trainer.step(step)
            after = {name: master.data_ptr() for name, master in optimizer.masters.items()}
            moved = {name for name in before if after[name] != before[name]}
            assert moved == (before.keys() if offload == "true" else set())
        return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}

    away, there = trained("true"), trained("false")
    assert all(torch.equal(away[name], there[name]) for name in there)
    with pytest.raises(ValueError, match=r"policy.offload=True.*CPU"):  # of a whole run: they are on the host already
        train(model, tmp_path, "policy.offload=true")
