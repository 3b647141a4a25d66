"""A GRPO run with `engine.memory_budget`: the pool follows the training's needs, and the process stays within it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM
from rollout.errors import MemoryBudgetError
from rollout.memory_treaty import MemoryTreaty
from rollout.worker.ledger import process_resident_bytes, trim_heap
from rollout_trainers.config import EngineSection, RunConfig
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.metrics import LearnStatistics
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example, Sample, Task
from tests.support.tiny import make_tiny_llama

MIB = 1 << 20
SLACK = 32 * MIB
TEXTS = ("abc", "hello", "what", "two and two")


def low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")  # 32 KiB of KV a token
    return make_tiny_llama(folder, tokenizer=True, dtype=torch.bfloat16, num_layers=8, num_kv_heads=4, head_dim=256)


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    values = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 3,
        "engine": {"max_model_len": 64, "max_num_batched_tokens": 256},
        "sampling": {"max_tokens": 16},
        "algorithm": {"group_size": 4, "prompts_per_step": 2, "micro_batch_tokens": 60},
        "tracking": {"wandb": "disabled"},
    }
    return config_from_values(values, overrides)


class HungryTrainer(GRPOTrainer):
    """Holds so much more while it learns, of which it keeps a part."""

    extra, kept = 0, 0

    def learn(self, step: int, samples: Sequence[Sample]) -> LearnStatistics:
        self.state = None
        self.state = torch.ones(max(self.kept, 1), dtype=torch.uint8)
        torch.ones(self.extra, dtype=torch.uint8)
        return super().learn(step, samples)


def make_trainer(config: RunConfig, budget: int) -> HungryTrainer:
    engine = LLM(config.model, max_model_len=64, max_num_batched_tokens=256, kv_cache_memory="8MiB")
    task = Task("low ids", [Example(text) for text in TEXTS], [], (low_ids,))
    policy = SharedPolicy(engine.shared_model(), config.sampling.temperature)
    producer = RolloutProducer(engine, config.sampling.temperature, config.sampling.max_tokens, config.seed)
    return HungryTrainer(producer, policy, task, config, MemoryTreaty(engine, budget))


def test_the_pool_follows_the_trainer_and_the_process_stays_within_the_budget(model: Path, tmp_path: Path) -> None:
    gc.collect()
    trim_heap()
    budget = process_resident_bytes() + 450 * MIB  # some 100 MiB are the libraries that a first step loads
    trainer = make_trainer(configuration(model, tmp_path), budget)
    assert trainer.plan is not None
    first = trainer.plan.kv_cache
    trainer.extra, trainer.kept = 80 * MIB, 100 * MIB
    sizes = []
    for step in (1, 2, 3):
        _, metrics = trainer.step(step)
        sizes.append(metrics["memory/kv_pool_bytes"])
        assert metrics["memory/budget_bytes"] == budget
        assert metrics["sampling/logp_difference/max"] == 0.0
        for phase in ("sampling", "sleeping", "training", "update"):
            assert metrics[f"memory/{phase}_peak_bytes"] <= budget + SLACK
    assert first - sizes[0] > 100 * MIB - SLACK  # what the trainer keeps is not the pool's
    assert sizes[1] == pytest.approx(sizes[0], abs=SLACK)
    assert trainer.memory.largest <= budget + SLACK
    trainer.kept = 0
    trainer.step(4)
    assert trainer.plan.kv_cache - sizes[2] > 100 * MIB - 2 * SLACK


def test_a_training_phase_beyond_the_budget_ends_the_run_with_numbers(model: Path, tmp_path: Path) -> None:
    gc.collect()
    trim_heap()
    trainer = make_trainer(configuration(model, tmp_path), process_resident_bytes() + 200 * MIB)
    trainer.extra = 300 * MIB
    with pytest.raises(MemoryBudgetError, match=r"too small for training"):
        trainer.step(1)


def test_a_recipe_gives_the_budget_as_text(model: Path, tmp_path: Path) -> None:
    budget = process_resident_bytes() // MIB + 400
    config = configuration(model, tmp_path, "steps=1", f"engine.memory_budget={budget}MiB")
    run(config, reward_functions=[low_ids], train=[Example(text) for text in TEXTS])
    (row,) = [row for row in read_json_lines(tmp_path / "metrics.jsonl") if "reward" in row]
    assert row["memory/budget_bytes"] == budget * MIB
    assert 0 < row["memory/kv_pool_bytes"] < 400 * MIB
    with pytest.raises(ValueError, match=r"engine\.memory_budget='1GiB' is not valid"):
        EngineSection(memory_budget="1GiB", kv_cache_memory="1GiB")
    with pytest.raises(ValueError, match=r"engine\.memory_budget=0 is not valid"):
        EngineSection(memory_budget=0)
