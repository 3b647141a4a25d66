"""This project's GRPO step on the task of `peer_trl.py`: seconds a step, and by phase.

    .venv/bin/python scripts/bench/grpo_step.py [MODEL] [--dtype float32] [--steps 3]

The same questions in the order in which TRL shuffles them, 8 prompts of 8 samples a step, at most 64 new tokens, the
same reward, loss aggregation, clipping and learning rate, no KL term. Prints one JSON line a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import reasoning_gym
import torch

from rollout import LLM
from rollout.models.pretrained import SMOLLM2
from rollout_trainers import Example, RunConfig, Sample, Task
from rollout_trainers.config import AlgorithmSection, OptimizerSection, SamplingSection
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer
from rollout_trainers.rewards import completion_text
from rollout_trainers.tasks import chat_example

PROMPTS, SAMPLES, MAX_TOKENS = 8, 8, 64
QUESTIONS, TASK_SEED, SHUFFLE_SEED = 64, 1, 42  # the last is the default seed of TRL's trainer
PHASES = ("gen", "train", "sync", "sleep", "wake")


class InOrder(GRPOTrainer):
    """Takes the task's examples as they stand, so that the peer's prompts are met."""

    def rollouts(self, step: int) -> list[Sample]:
        examples = self.task.train[(step - 1) * PROMPTS : step * PROMPTS]
        return self.producer.produce(step, examples, SAMPLES)


def main() -> None:
    args = parse_arguments()
    config = RunConfig(
        model=args.model,
        steps=args.steps,
        sampling=SamplingSection(temperature=1.0, max_tokens=MAX_TOKENS),
        algorithm=AlgorithmSection(group_size=SAMPLES, prompts_per_step=PROMPTS),
        optimizer=OptimizerSection(learning_rate=1e-6, schedule="linear"),
    )
    engine = LLM(args.model, dtype=args.dtype, max_model_len=512, kv_cache_memory="512 MiB")
    producer = RolloutProducer(engine, config.sampling.temperature, MAX_TOKENS, config.seed)
    policy = SharedPolicy(engine.shared_model(), config.sampling.temperature)
    task = Task("chain_sum", one_digit_sums(), (), (answer_stands_in_it,))
    trainer = InOrder(producer, policy, task, config)
    for step in range(1, args.steps + 1):
        _, metrics = trainer.step(step)
        line = {
            "engine": "rollout",
            "workload": "grpo_step",
            "step": step,
            "seconds": round(metrics["timing_s/step"], 2),
            "reward": metrics["reward"],
            "mean_length": metrics["completions/mean_length"],
            "dtype": args.dtype,
        }
        print(json.dumps(line | {phase: round(metrics[f"timing_s/{phase}"], 3) for phase in PHASES}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="seconds of a GRPO step, by phase")
    parser.add_argument("model", nargs="?", default=SMOLLM2, help=f"a folder or a known name (default: {SMOLLM2})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="TRL's on a CPU is float32")
    parser.add_argument("--steps", type=int, choices=range(1, QUESTIONS // PROMPTS + 1), default=3, metavar="N")
    return parser.parse_args()


def one_digit_sums() -> list[Example]:
    """The peer's questions, shuffled as its sampler does."""
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym.create_dataset("chain_sum", size=QUESTIONS, seed=TASK_SEED, **digits)
    examples = [chat_example(row["question"], None, {"answer": row["answer"]}) for row in rows]
    order = torch.randperm(QUESTIONS, generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    return [examples[index] for index in order.tolist()]


def answer_stands_in_it(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the answer stands anywhere in the completion."""
    return [float(right in completion_text(text)) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    main()
