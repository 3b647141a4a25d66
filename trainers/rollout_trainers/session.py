"""The course of a run around the trainer's steps: resume, evaluate, log, save, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.models.pretrained import resolve_model
from rollout_trainers.checkpoint import load_checkpoint, save_checkpoint
from rollout_trainers.config import RunConfig
from rollout_trainers.evaluation import Evaluation, mcnemar_p_value
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.mismatch import Finding
from rollout_trainers.report import write_report
from rollout_trainers.resume import CHECKPOINTS, run_settings
from rollout_trainers.tracking import ProgressLine, Tracker
from rollout_trainers.types import Sample, SampleRow


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run ended with. `base` is the untrained policy on the held-out prompts, `trained` the final one."""

    directory: Path
    report: Path
    base: Evaluation | None
    trained: Evaluation | None
    p_value: float | None
    seconds: float


class Session:
    """The course of a run around the trainer's steps: resume, evaluate, log, save, report.

    It continues from `checkpoint`, where there is one.
    """

    def __init__(
        self, config: RunConfig, trainer: GRPOTrainer, progress: ProgressLine, checkpoint: Path | None = None
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.progress = progress
        self.directory = Path(config.output_dir)
        self.evaluations: dict[int, Evaluation] = {}  # by step; 0 is the untrained policy
        self.last_step = 0
        for name in ("report.html", "reward.png"):  # of an earlier run: it must not pass for this one's
            (self.directory / name).unlink(missing_ok=True)
        wandb_id = None
        if checkpoint is not None:
            self.last_step, wandb_id = self._resume(checkpoint)
        self.tracker = Tracker(
            config.tracking,
            self.directory,
            config.name,
            asdict(config),
            first_step=self.last_step + 1 if self.last_step else 0,
            wandb_id=wandb_id,
        )

    def _resume(self, checkpoint: Path) -> tuple[int, str | None]:
        """Restores a checkpoint and makes it the engine's policy. Returns its step and the run's id in W&B."""
        restored = load_checkpoint(checkpoint, self.trainer.optimizers)
        for step, saved in restored.notes["evaluations"].items():
            self.evaluations[int(step)] = Evaluation(**{**saved, "successes": tuple(saved["successes"])})
        self.trainer.num_tokens = restored.notes["num_tokens"]
        self.trainer.kl_control.coefficient = restored.notes["kl_coefficient"]
        self.trainer.update_engine(restored.step)
        self.progress.say(f"{self.config.name}: resumed after step {restored.step}")
        return restored.step, restored.notes["wandb_id"]

    def train(self) -> None:
        """All steps that are left, with the evaluations and checkpoints that the recipe asks for."""
        config = self.config
        if self.last_step == 0:
            self._evaluate(0)
        for step in range(self.last_step + 1, config.steps + 1):
            samples, metrics = self.trainer.step(step)
            self.tracker.log(step, metrics)
            self.tracker.log_memory(step, self.trainer.memory.measured.values())
            if step % config.tracking.sample_every == 0 or step in (1, config.steps):
                self.tracker.log_samples(step, self._rows(step, samples, "train"))
            self.progress.update(step, _progress_fields(metrics))
            if self.trainer.finding is not None:
                self._tell(self.trainer.finding)
            self.last_step = step
            every = config.evaluation.every
            if step == config.steps or (every and step % every == 0):
                self._evaluate(step)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                self._save(step)

    def finish(self, started: float) -> RunResult:
        """Saves the trained model, closes the trackers, writes the report."""
        config = self.config
        self.trainer.policy.save(self.directory / "model", resolve_model(config.model))
        base, trained = self.evaluations.get(0), self.evaluations.get(config.steps)
        p_value = None
        if base is not None and trained is not None and config.steps > 0:
            p_value = mcnemar_p_value(base.successes, trained.successes)
        summary = {
            "name": config.name,
            "task": self.trainer.task.name,
            "config": asdict(config),
            "base": asdict(base) if base else None,
            "trained": asdict(trained) if trained else None,
            "p_value": p_value,
            "receipt": str(self.trainer.receipt),
            "seconds": time.perf_counter() - started,
        }
        self.tracker.finish({key: value for key, value in summary.items() if key != "config"})
        report = write_report(self.directory, summary)
        for label, result in (("untrained", base), ("trained", trained)):
            if result:
                self.progress.say(f"{config.name}: {label} held-out accuracy {result}")
        self.progress.say(f"{config.name}: model, metrics and report.html are in {self.directory}")
        return RunResult(self.directory, report, base, trained, p_value, time.perf_counter() - started)

    def _evaluate(self, step: int) -> None:
        if not self.trainer.task.evaluation:
            return
        samples, self.evaluations[step] = self.trainer.evaluate(step)
        self.tracker.log(step, self.evaluations[step].metrics())
        self.tracker.log_samples(step, self._rows(step, samples, "held out"))
        self.progress.say(f"{self.config.name}: step {step}: held-out accuracy {self.evaluations[step]}")

    def _tell(self, finding: Finding) -> None:
        self.tracker.log_diagnosis(finding)
        self.progress.say(
            f"{self.config.name}: step {finding.step}: logprobs of sampler and trainer differ by up to "
            f"{finding.difference:.3g}: {finding.text.splitlines()[0]}"
        )

    def _save(self, step: int) -> None:
        notes = {
            "evaluations": {key: asdict(value) for key, value in self.evaluations.items()},
            "num_tokens": self.trainer.num_tokens,
            "kl_coefficient": self.trainer.kl_control.coefficient,
            "settings": run_settings(self.config, self.trainer.task),
            "wandb_id": self.tracker.wandb_id,
        }
        save_checkpoint(
            self.directory / CHECKPOINTS,
            step,
            lambda folder: self.trainer.policy.save(folder, resolve_model(self.config.model)),
            self.trainer.optimizers,
            notes,
            self.config.checkpoint.keep,
        )

    def _rows(self, step: int, samples: Sequence[Sample], split: str) -> list[SampleRow]:
        return [
            SampleRow(
                step=step,
                prompt=_prompt_text(sample),
                completion=sample.text,
                reward=sample.reward,
                advantage=sample.advantage,
                num_tokens=sample.num_tokens,
                finish_reason=sample.finish_reason,
                columns={**sample.example.columns, **sample.logged},
                split=split,
            )
            for sample in samples[: self.config.tracking.samples]
        ]


def _prompt_text(sample: Sample) -> str:
    prompt: Any = sample.example.prompt
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], dict):
        return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return " ".join(map(str, prompt))


def _progress_fields(metrics: dict[str, float]) -> dict[str, str]:
    difference = metrics.get("sampling/logp_difference/max")  # not there where no token was compared
    return {
        "reward": f"{metrics['reward']:.3f}",
        "length": f"{metrics['completions/mean_length']:.0f}",
        "entropy": f"{metrics.get('entropy', 0.0):.2f}",
        "logp-diff": "-" if difference is None else f"{difference:g}",
        "gen": f"{metrics['timing_s/gen']:.1f}s",
        "train": f"{metrics['timing_s/train']:.1f}s",
    }
