"""Which checkpoint a run continues from, and whether it is this run's: an old folder is never mixed with a new run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout_trainers.checkpoint import list_checkpoints, read_state
from rollout_trainers.config import RunConfig
from rollout_trainers.durable import exclusive, remove_leftovers
from rollout_trainers.rewards import reward_names
from rollout_trainers.types import Task

CHECKPOINTS = "checkpoints"  # folder in the run's own

# What a resumed run may change: where it writes, how often, and what neither samples nor updates depend on.
_FREE = {
    "name",
    "output_dir",
    "resume",
    "checkpoint",
    "tracking",
    "distributed",
    "alerts",
    "early_stop",
    "evaluation.every",
    "evaluation.at_start",
    "evaluation.at_end",
    "evaluation.at_steps",
    "evaluation.every_seconds",
    "algorithm.micro_batch_tokens",
    "engine.device",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.kv_cache_memory",
    "engine.memory_budget",
    "engine.enable_prefix_caching",
    "engine.sleep",
    "teacher.sleep",
    "policy.gradient_checkpointing",
    "policy.offload",
    "environment.max_concurrent",
}


def run_settings(config: RunConfig, task: Task) -> dict[str, Any]:
    """What makes a run the run it is, by dotted name as in a recipe, in plain values that JSON gives back unchanged."""
    settings = {name: value for name, value in _flat(asdict(config), "") if name not in _FREE}
    settings["task.name"] = task.name
    settings["task's rewards"] = reward_names(task.rewards)
    settings["task's training examples"] = len(task.train)
    settings["task's evaluation examples"] = len(task.evaluation)
    settings["task's further evaluation examples"] = {k: len(each) for k, each in task.further_evaluations.items()}
    return json.loads(json.dumps(settings, default=str))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in _FREE:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


@contextmanager
def open_run(config: RunConfig, settings: Mapping[str, Any]) -> Iterator[Path | None]:
    """Holds the run's folder for this process, removes what dead ones have left half-written in it, and gives the
    checkpoint to continue from (see `find_checkpoint`). Raises `ValueError` where it is no folder, or as those do."""
    directory = Path(config.output_dir)
    file = next((path for path in (directory, *directory.parents) if path.is_file()), None)
    if file is not None:
        raise ValueError(f"output_dir={config.output_dir!r} is not valid: {file} is a file, and it must be a folder")
    with exclusive(directory):
        for folder in (directory, directory / CHECKPOINTS):
            remove_leftovers(folder)
        yield find_checkpoint(config, settings)


def find_checkpoint(config: RunConfig, settings: Mapping[str, Any]) -> Path | None:
    """The newest checkpoint in the run's folder; None where there is none, and the run starts from the model.

    Raises `ValueError` if there is one and `resume` is false, or if it was written under other settings than
    `run_settings` gives now. `steps` may be raised.
    """
    root = Path(config.output_dir) / CHECKPOINTS
    found = list_checkpoints(root)
    if not found:
        return None
    newest = found[-1]
    if not config.resume:
        raise ValueError(
            f"{root} holds checkpoints of an earlier run, up to {newest.name}: continue that run with resume=true, or "
            f"start afresh in another output_dir, or delete {root}"
        )
    saved = read_state(newest).notes["settings"]
    differing = [name for name in sorted(saved.keys() | settings.keys()) if _differs(name, saved, settings)]
    if differing:
        changes = "; ".join(f"{name} was {saved.get(name)!r}, is {settings.get(name)!r}" for name in differing)
        raise ValueError(
            f"{newest} cannot be resumed with other settings: {changes}. Use the old ones, or another output_dir"
        )
    return newest


def _differs(name: str, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    if name == "steps":
        return settings[name] < saved[name]
    return saved.get(name) != settings.get(name)
