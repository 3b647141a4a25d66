"""The quickstart recipe on this engine: what `quality.py` compares with TRL's.

    .venv/bin/python scripts/bench/quality_ours.py recipes/quickstart.yaml OUTPUT_DIR steps=30 [seed=1 ...]

Trains as `rollout train` does, and writes what `quality_trl.py` writes: OUTPUT_DIR/steps.jsonl, a line a step, and the
model after every `evaluation.every` steps and the last. Saving is not in the seconds; `processor_seconds` are of all
threads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rollout import LLM
from rollout.models.pretrained import resolve_model
from rollout_trainers import RunConfig, Task
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.recipe import load_recipe
from rollout_trainers.tasks import make_task


def main() -> None:
    parser = argparse.ArgumentParser(description="the quickstart recipe on this engine")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as `rollout train` takes them")
    args = parser.parse_args()
    config = load_recipe(args.recipe, args.overrides)
    train(config, make_task(config.task), args.output_dir)


def train(config: RunConfig, task: Task, output_dir: Path) -> None:
    """The run that `config` describes, into `output_dir`, which is made."""
    output_dir.mkdir(parents=True)
    trainer = make_trainer(config, task)
    for step in range(1, config.steps + 1):
        began = (time.perf_counter(), time.process_time())
        _, metrics = trainer.step(step)
        line = {
            "step": step,
            "seconds": round(time.perf_counter() - began[0], 3),
            "processor_seconds": round(time.process_time() - began[1], 3),
            "reward": metrics["reward"],
            "mean_length": metrics["completions/mean_length"],
        }
        with (output_dir / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        every = config.evaluation.every
        if step == config.steps or (every and step % every == 0):
            folder = output_dir / f"step-{step}"
            trainer.policy.save(folder, resolve_model(config.model))


def make_trainer(config: RunConfig, task: Task) -> GRPOTrainer:
    section = config.engine
    engine = LLM(
        config.model, max_model_len=section.max_model_len, kv_cache_memory=section.kv_cache_memory, seed=config.seed
    )
    sampling = config.sampling
    producer = RolloutProducer(engine, sampling.temperature, sampling.max_tokens, config.seed)
    return GRPOTrainer(producer, SharedPolicy(engine.shared_model(), sampling.temperature), task, config)


if __name__ == "__main__":
    main()
