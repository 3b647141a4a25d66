"""A GRPO run whose sampler and trainer differ says why: in the report, the metrics and on the terminal, once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import LLM
from rollout_trainers.config import RunConfig, TrackingSection
from rollout_trainers.corrections import Mismatch
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.mismatch import Finding, MismatchWatch
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import Session, run
from rollout_trainers.tracking import ProgressLine, read_json_lines
from rollout_trainers.types import Example, Task
from tests.support.tiny import make_tiny_llama

TEXTS = ("abc", "hello", "what", "two and two")
NAME = "model.layers.1.mlp.up_proj.weight"
NEVER = ("tracking.diagnose_above=null", "tracking.diagnose_every=50")


def low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, dtype=torch.bfloat16)


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    values = {
        "model": str(model),
        "name": "tiny",
        "output_dir": str(output),
        "steps": 4,
        "engine": {"max_model_len": 64},
        "sampling": {"max_tokens": 10, "temperature": 0.7},
        "algorithm": {"group_size": 4, "prompts_per_step": 2, "micro_batch_tokens": 60},
        "optimizer": {"learning_rate": 1e-3},
        "tracking": {"wandb": "disabled", "diagnose_every": 3},
    }
    return config_from_values(values, overrides)


def run_with_fault(
    config: RunConfig,
    *,
    trainer_temperature: float = 0.7,
    after_sampling: Callable[[LLM], None] | None = None,
    progress: ProgressLine | None = None,
) -> list[dict[str, Any]]:
    """A whole run. `after_sampling` runs while the rewards of a step are computed. Returns what was diagnosed."""
    engine = LLM(config.model, max_model_len=64, kv_cache_memory="2MiB", block_size=4)

    def reward(*args: Any, **columns: Any) -> list[float]:
        if after_sampling is not None:
            after_sampling(engine)
        return low_ids(*args, **columns)

    task = Task("low ids", [Example(text) for text in TEXTS], [], (reward,))
    producer = RolloutProducer(engine, config.sampling.temperature, config.sampling.max_tokens, config.seed)
    policy = SharedPolicy(engine.shared_model(), trainer_temperature)
    trainer = GRPOTrainer(producer, policy, task, config)
    session = Session(config, trainer, progress or ProgressLine(config.steps))
    session.train()
    session.finish(0.0)
    return read_json_lines(Path(config.output_dir) / "diagnoses.jsonl")


def steps(output: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def test_a_trainer_that_forgets_the_temperature_is_told_so_in_the_report_once_in_n_steps(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_with_fault(configuration(model, tmp_path), trainer_temperature=1.0)
    assert [row["step"] for row in found] == [1, 4]  # diagnose_every=3
    assert all(row["verdict"] == "sampling semantics" for row in found)
    assert "temperature 1" in found[0]["text"]
    rows = steps(tmp_path)
    assert [row["step"] for row in rows if "diagnosis/sampling_semantics" in row] == [1, 4]
    assert all(row["sampling/logp_difference/max"] > 1e-3 for row in rows)
    assert found[0]["difference"] == rows[0]["sampling/logp_difference/max"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Why sampler and trainer differed" in page
    assert "step 4: sampling semantics" in page
    assert "step 1: logprobs of sampler and trainer differ by up to" in capsys.readouterr().err


@pytest.mark.parametrize("sleep", ["true", "false"])
def test_weights_that_change_between_sampling_and_training_are_named(model: Path, tmp_path: Path, sleep: str) -> None:
    def edit(engine: LLM) -> None:  # as code that keeps a reference to the policy might, past torch's counters
        engine.shared_model().get_parameter(NAME).data.mul_(1.5)

    config = configuration(model, tmp_path, "steps=1", f"engine.sleep={sleep}")
    found = run_with_fault(config, after_sampling=edit)
    assert [row["verdict"] for row in found] == ["wrong weights"]
    assert NAME in found[0]["text"]


def test_weights_that_change_in_the_open_make_the_engine_refuse_and_are_named(model: Path, tmp_path: Path) -> None:
    def edit(engine: LLM) -> None:
        with torch.no_grad():
            engine.shared_model().get_parameter(NAME).mul_(1.5)

    found = run_with_fault(configuration(model, tmp_path, "steps=1"), after_sampling=edit)
    assert [row["verdict"] for row in found] == ["wrong weights"]


def test_a_healthy_run_diagnoses_nothing_and_a_threshold_of_none_never_does(model: Path, tmp_path: Path) -> None:
    assert run_with_fault(configuration(model, tmp_path / "healthy", "steps=2")) == []
    assert "Why sampler and trainer differed" not in (tmp_path / "healthy" / "report.html").read_text(encoding="utf-8")
    off = configuration(model, tmp_path / "off", "steps=1", *NEVER)
    assert run_with_fault(off, trainer_temperature=1.0) == []


def test_an_int8_engine_is_told_to_round_and_not_asked_about_again(model: Path, tmp_path: Path) -> None:
    int8 = ("engine.kv_cache_dtype=int8", "algorithm.recompute_logprobs=true")
    config = configuration(model, tmp_path, "steps=3", "tracking.diagnose_every=1", *int8)
    run(config, reward_functions=[low_ids], train=[Example(text) for text in TEXTS])
    found = read_json_lines(tmp_path / "diagnoses.jsonl")
    assert found[0]["verdict"] == "precision"
    differences = [row["difference"] for row in found]
    assert all(later > 2 * first for first, later in itertools.pairwise(differences))


def test_the_diagnosis_changes_nothing_that_is_learned(model: Path, tmp_path: Path) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    run_with_fault(configuration(model, with_it, "steps=2"), trainer_temperature=1.0)
    off = configuration(model, without, "steps=2", *NEVER)
    run_with_fault(off, trainer_temperature=1.0)
    kept = ("reward", "loss", "grad_norm", "entropy")
    assert [[row[name] for name in kept] for row in steps(with_it)] == [
        [row[name] for name in kept] for row in steps(without)
    ]


def test_the_watch_asks_at_most_once_in_n_steps() -> None:
    watch = MismatchWatch(TrackingSection(diagnose_above=0.1, diagnose_every=4))
    wide, narrow, nothing = Mismatch(0.2, 0.1, 0.0, 5), Mismatch(0.1, 0.1, 0.0, 5), Mismatch(0.0, 0.0, 0.0, 0)
    asked = [step for step in range(1, 12) if watch.is_due(step, wide if step != 5 else narrow)]
    assert asked == [1, 6, 10]
    assert not watch.is_due(20, nothing)
    watch.learn(Finding(10, 0.2, "precision", ""))
    assert not watch.is_due(21, Mismatch(0.4, 0.1, 0.0, 5))
    watch.learn(Finding(21, 0.4, "stale KV", ""))
    assert watch.is_due(22, Mismatch(0.5, 0.1, 0.0, 5))
    with pytest.raises(ValueError, match=r"tracking\.diagnose_every=0 is not valid"):
        TrackingSection(diagnose_every=0)
    with pytest.raises(ValueError, match=r"tracking\.diagnose_above=-1 is not valid"):
        TrackingSection(diagnose_above=-1)
