"""The course of a run around the trainer's steps: resume, evaluate, log, stop, save, report."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rollout.errors import RolloutError
from rollout_trainers.alert_rules import RunFacts
from rollout_trainers.alerts import AlertWatch
from rollout_trainers.best import Best, BestWatch
from rollout_trainers.checkpoint import (
    BEST_LINK,
    MODEL_FOLDER,
    checkpoint_folder,
    mark_best,
    read_state,
    save_checkpoint,
)
from rollout_trainers.config import RunConfig
from rollout_trainers.durable import new_folder
from rollout_trainers.early_stop import EarlyStop, Stop
from rollout_trainers.evaluation import Evaluation, mcnemar_p_value
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.mismatch import Finding
from rollout_trainers.report import write_report
from rollout_trainers.resume import CHECKPOINTS, run_settings
from rollout_trainers.run_record import read_record, write_record
from rollout_trainers.tracking import METRICS_FILE, ProgressLine, Tracker, read_json_lines
from rollout_trainers.types import Sample, SampleRow, messages_text
from rollout_trainers.workspace import write_workspace


class DivergedError(RolloutError):
    """A gradient was not finite: the run cannot go on."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run ended with. `base` is the untrained policy on the held-out prompts, `trained` the one that is saved as
    the run's model. `stopped` says why the run ended early, if it did, and `best` which checkpoint is the best, where
    the recipe asks for it."""

    directory: Path
    report: Path
    base: Evaluation | None
    trained: Evaluation | None
    p_value: float | None
    seconds: float
    stopped: Stop | None = None
    best: Best | None = None


class Session:
    """The course of a run around the trainer's steps: resume, evaluate, log, stop, save, report.

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
        self.early_stop = EarlyStop(config.early_stop)
        self.best = BestWatch(config.checkpoint)
        self.last_step = 0
        for name in ("report.html", "reward.png"):  # of an earlier run: it must not pass for this one's
            (self.directory / name).unlink(missing_ok=True)
        earlier = read_record(self.directory) if config.resume else None
        wandb_id = earlier["wandb_id"] if earlier else None
        if checkpoint is not None:
            self._resume(checkpoint)
        self.tracker = Tracker(
            config.tracking,
            self.directory,
            config.name,
            asdict(config),
            first_step=self.last_step + 1 if self.last_step else 0,
            wandb_id=wandb_id,
        )
        self.alerts = AlertWatch(config.alerts, RunFacts.of(config))
        self.alerts.replay(read_json_lines(self.directory / METRICS_FILE))  # of a run that is resumed
        self.wandb_id = self.tracker.wandb_id or wandb_id
        write_record(self.directory, self._identity(), is_finished=False)
        self._evaluated_at = time.monotonic()

    def _resume(self, checkpoint: Path) -> None:
        """Restores a checkpoint and makes it the engine's policy."""
        restored = read_state(checkpoint)
        self.trainer.restore(checkpoint, restored.step)
        for step, saved in restored.notes["evaluations"].items():
            self.evaluations[int(step)] = Evaluation(**{**saved, "successes": tuple(saved["successes"])})
        self.early_stop.load_state_dict(restored.notes["early_stop"])
        self.best.load_state_dict(restored.notes["best"])
        root, best = checkpoint.parent, self.best.step
        if best is not None and not checkpoint_folder(root, best).is_dir():  # somebody has removed it
            self.best = BestWatch(self.config.checkpoint)
        mark_best(root, self.best.step)  # the process may have ended before it did
        self.last_step = restored.step
        self.progress.say(f"{self.config.name}: resumed after step {restored.step}")

    def train(self) -> None:
        """All steps that are left, with the evaluations and checkpoints that the recipe asks for."""
        if self.last_step == 0 and self.config.evaluation.at_start:
            self.early_stop.observe(0, self._evaluate(0))
            self.tracker.commit()
        while self.last_step < self.config.steps and self.early_stop.stopped is None:
            self._step(self.last_step + 1)

    def _step(self, step: int) -> None:
        config = self.config
        try:
            samples, metrics = self.trainer.step(step)
        except FloatingPointError as error:
            self._log_metrics(step, {"grad_norm": math.nan})
            raise DivergedError(
                f"step {step} broke off, since {error}. The weights are those of step {step - 1}, which may be bad "
                "already: go back to an earlier checkpoint, with a lower optimizer.learning_rate or max_grad_norm"
            ) from error
        self.last_step = step
        self._log(step, samples, metrics)
        missing = self.early_stop.missing(metrics)
        if missing is not None:
            self.progress.say(f"{config.name}: step {step}: {missing}")
        self.early_stop.observe(step, metrics)
        is_better = False
        seconds = time.monotonic() - self._evaluated_at
        if (self._is_last and config.evaluation.at_end) or config.evaluation.is_due(step, seconds):
            measured = self._evaluate(step)
            self.early_stop.observe(step, measured)
            is_better = self.best.observe(step, measured)
        every = config.checkpoint.every
        if is_better or (every and (self._is_last or step % every == 0)):
            self._save(step)
        self.tracker.commit()

    @property
    def _is_last(self) -> bool:
        """Whether the step that has been done is the run's last."""
        return self.last_step == self.config.steps or self.early_stop.stopped is not None

    def _log(self, step: int, samples: Sequence[Sample], metrics: dict[str, float]) -> None:
        self._log_metrics(step, metrics)
        self.tracker.log_histograms(step, self.trainer.histograms)
        self.tracker.log_memory(step, self.trainer.memory.measured.values())
        if step % self.config.tracking.sample_every == 0 or step in (1, self.config.steps):
            self.tracker.log_samples(step, self._rows(step, samples, "train"))
        self.progress.update(step, _progress_fields(metrics))
        if self.trainer.finding is not None:
            self._tell(self.trainer.finding)

    def finish(self, started: float) -> RunResult:
        """Saves the trained model, closes the trackers, writes the report."""
        config = self.config
        step = self._save_model()
        base, trained = self.evaluations.get(0), self.evaluations.get(step)
        p_value = None
        if base is not None and trained is not None and step > 0:
            p_value = mcnemar_p_value(base.successes, trained.successes)
        stopped, best = self.early_stop.stopped, self.best.best
        summary = {
            "name": config.name,
            "task": self.trainer.task.name,
            "config": asdict(config),
            "base": asdict(base) if base else None,
            "trained": asdict(trained) if trained else None,
            "p_value": p_value,
            "last_step": self.last_step,
            "model_step": step,
            "stopped": asdict(stopped) if stopped else None,
            "best": asdict(best) if best else None,
            "receipt": str(self.trainer.receipt),
            "seconds": time.perf_counter() - started,
        }
        self.tracker.finish({key: value for key, value in summary.items() if key != "config"})
        write_record(self.directory, {**self._identity(), **summary}, is_finished=True)  # whatever a page needs yet
        report = write_report(self.directory, summary)
        write_workspace(self.directory)
        for what in (stopped, best):
            if what:
                self.progress.say(f"{config.name}: {what}")
        for label, result in (("untrained", base), ("trained", trained)):
            if result:
                self.progress.say(f"{config.name}: {label} held-out accuracy {result}")
        self.progress.say(f"{config.name}: model, metrics and report.html are in {self.directory}")
        seconds = time.perf_counter() - started
        return RunResult(self.directory, report, base, trained, p_value, seconds, stopped, best)

    def break_off(self) -> None:
        """Closes the trackers of a run that has failed."""
        self.tracker.break_off()

    def _save_model(self) -> int:
        """Writes the run's trained model: the last step's, or the best one's. Returns its step."""
        best = self.best.step if self.config.checkpoint.load_best else None
        target = self.directory / MODEL_FOLDER
        try:
            with new_folder(target) as folder:
                if best is None or best == self.last_step:
                    self.trainer.save_policy(folder)
                    return self.last_step
                shutil.copytree(self.directory / CHECKPOINTS / BEST_LINK / MODEL_FOLDER, folder, dirs_exist_ok=True)
                return best
        except OSError as error:
            left = "its checkpoints stay: resume=true goes on from the newest"
            raise OSError(f"the run's model could not be saved, {target} cannot be written: {error}; {left}") from error

    def _identity(self) -> dict[str, Any]:
        """What is known of the run from the beginning."""
        return {
            "name": self.config.name,
            "task": self.trainer.task.name,
            "rollout_version": metadata.version("rollout-rl"),
            "config": asdict(self.config),
            "wandb_id": self.wandb_id,
        }

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluates all held-out sets. Returns the metrics; there are none without held-out prompts."""
        metrics: dict[str, float] = {}
        for name in self.trainer.task.held_out:
            samples, evaluation = self.trainer.evaluate(step, name)
            metrics |= evaluation.metrics(name)
            if not name:
                self.evaluations[step] = evaluation
            self.tracker.log_samples(step, self._rows(step, samples, f"held out {name}".rstrip()))
            of = f" on {name}" if name else ""
            self.progress.say(f"{self.config.name}: step {step}: held-out accuracy{of} {evaluation}")
        if metrics:
            self._log_metrics(step, metrics)
        self._evaluated_at = time.monotonic()
        return metrics

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """To the trackers, with the alerts that are due."""
        self.tracker.log(step, metrics)
        alerts = self.alerts.observe(step, metrics)
        self.tracker.log_alerts(alerts)
        for alert in alerts:
            self.progress.say(f"{self.config.name}: step {step}: {alert.level}: {alert.title}. {alert.text}")

    def _tell(self, finding: Finding) -> None:
        self.tracker.log_diagnosis(finding)
        self.progress.say(
            f"{self.config.name}: step {finding.step}: logprobs of sampler and trainer differ by up to "
            f"{finding.difference:.3g}: {finding.text.splitlines()[0]}"
        )

    def _save(self, step: int) -> None:
        notes = {
            "evaluations": {key: asdict(value) for key, value in self.evaluations.items()},
            "early_stop": self.early_stop.state_dict(),
            "best": self.best.state_dict(),
            "settings": run_settings(self.config, self.trainer.task),
        }
        self.tracker.sync()
        save_checkpoint(
            self.directory / CHECKPOINTS, step, self.trainer.save, notes, self.config.checkpoint.keep, self.best.step
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
                logprob=float(sample.raw_logprobs.mean()) if sample.num_tokens else None,
                entropy=float(sample.entropy.mean()) if sample.num_tokens else None,
            )
            for sample in samples[: self.config.tracking.samples]
        ]


def _prompt_text(sample: Sample) -> str:
    prompt: Any = sample.example.prompt
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], dict):
        return messages_text(prompt)
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
