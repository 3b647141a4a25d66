"""The quickstart recipe in TRL's GRPOTrainer, which samples with transformers: what `quality.py` compares with.

    .venv/bin/python scripts/bench/quality_trl.py recipes/quickstart.yaml OUTPUT_DIR steps=30 [seed=1 ...]

Everything that the recipe says is set to the same: the questions of every step and their order, samples, loss (TRL's
"dapo" divides by all tokens of the step, as our token mean does), AdamW, learning rate and its course. Weights are
float32 under autocast to bfloat16, TRL's default, for sampling and training alike; `--float32` leaves autocast out.
Writes OUTPUT_DIR/steps.jsonl, a line a step, and the model after every `evaluation.every` steps and the last. Saving is
not in the seconds; `processor_seconds` are of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}  # read by the libraries when they are imported

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from rollout.models.pretrained import resolve_model
from rollout_trainers import RunConfig, Task
from rollout_trainers.optimizer import learning_rate
from rollout_trainers.producer import select_examples
from rollout_trainers.recipe import load_recipe
from rollout_trainers.tasks import make_task


def main() -> None:
    args = parse_arguments()
    config = load_recipe(args.recipe, args.overrides)
    train(config, make_task(config.task), args.output_dir, not args.float32, args.batch_size)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the quickstart recipe in TRL's GRPOTrainer")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as `rollout train` takes them")
    parser.add_argument("--float32", action="store_true", help="without autocast to bfloat16")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a backward pass (default: 16)")
    return parser.parse_args()


def train(config: RunConfig, task: Task, output_dir: Path, bf16: bool, batch_size: int) -> None:
    """The run that `config` describes, into `output_dir`, which is made."""
    output_dir.mkdir(parents=True)
    folder = resolve_model(config.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=[*task.rewards],  # type: ignore[list-item] - TRL's own signature
        train_dataset=questions(config, task),
        args=arguments(config, output_dir, bf16, batch_size),
        callbacks=[Journal(output_dir, config.evaluation.every, config.steps)],
        optimizers=optimizer_of(config, model),
    )
    trainer.train()


def questions(config: RunConfig, task: Task) -> Dataset:
    """Those of all steps, in our order."""
    count = config.algorithm.prompts_per_step
    chosen = [
        example
        for step in range(1, config.steps + 1)
        for example in select_examples(task.train, step, count, config.seed)
    ]
    return Dataset.from_list([{"prompt": example.prompt, **example.columns} for example in chosen])


def arguments(config: RunConfig, output_dir: Path, bf16: bool, batch_size: int) -> GRPOConfig:
    """Raises `ValueError` for a recipe whose loss is another than the one that is set here."""
    algorithm, loss, optimizer = config.algorithm, config.loss, config.optimizer
    if (loss.algorithm, loss.aggregation, loss.advantage_scale) != ("grpo_token", "token_mean", "group_std"):
        raise ValueError(f"loss.algorithm={loss.algorithm!r} is not valid: only 'grpo_token' as it comes")
    samples = algorithm.prompts_per_step * algorithm.group_size
    return GRPOConfig(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=bf16,
        seed=config.seed,
        max_steps=config.steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=samples // batch_size,
        gradient_checkpointing=False,
        num_generations=algorithm.group_size,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        shuffle_dataset=False,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        beta=loss.kl_coefficient,
        learning_rate=optimizer.learning_rate,
        max_grad_norm=optimizer.max_grad_norm,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )


def optimizer_of(
    config: RunConfig, model: torch.nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, and the recipe's course of the learning rate: transformers' own warm-up begins with a step at zero."""
    section = config.optimizer
    if section.weight_decay:
        raise ValueError(f"optimizer.weight_decay={section.weight_decay} is not valid: only 0")
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=0.0,
        fused=True,
    )
    course = torch.optim.lr_scheduler.LambdaLR(
        adamw, lambda step: learning_rate(step, config.steps, section) / section.learning_rate
    )
    return adamw, course


class Journal(TrainerCallback):
    """Writes a line a step, and the models. A step begins where the one before ends: TRL samples before it tells."""

    def __init__(self, output_dir: Path, every: int, steps: int) -> None:
        self.output_dir = output_dir
        self.every = every
        self.steps = steps
        self.seconds = self.processor_seconds = 0.0
        self.began = (0.0, 0.0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seconds = time.perf_counter() - self.began[0]
        self.processor_seconds = time.process_time() - self.began[1]
        step = state.global_step
        if step == self.steps or (self.every and step % self.every == 0):
            folder = self.output_dir / f"step-{step}"
            given["model"].save_pretrained(folder)
            given["processing_class"].save_pretrained(folder)
        self.began = (time.perf_counter(), time.process_time())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        line = {
            "step": state.global_step,
            "seconds": round(self.seconds, 3),
            "processor_seconds": round(self.processor_seconds, 3),
            "reward": float(logs["reward"]),
            "mean_length": float(logs["completions/mean_length"]),
        }
        with (self.output_dir / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
