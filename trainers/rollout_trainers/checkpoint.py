"""Checkpoints: whole directories that appear atomically, hold everything a run needs, and load in transformers.

checkpoints/step-000010/
    model/           config.json, model.safetensors, tokenizer: `AutoModelForCausalLM.from_pretrained` takes it
    trainer.pt       master weights and AdamW's moments (of a critic, too), random-number states
    state.json       step, and the run's own notes (settings, evaluations)
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rollout_trainers.optimizer import MasterAdamW

_STEP = re.compile(r"step-(\d{6,})")
_MODEL_FILES = (".json", ".jinja", ".model", ".txt")  # configuration and tokenizer; never weights


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says besides the weights: the steps done, and the run's own notes."""

    step: int
    notes: dict[str, Any]


def save_model(folder: Path, named_parameters: Iterable[tuple[str, torch.Tensor]], source: Path) -> None:
    """Writes a Hugging Face folder: the parameters under their names, and the configuration files of `source`.

    Storage that names share (views of a fused tensor) is written out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix in _MODEL_FILES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    tensors = {
        name: parameter.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        for name, parameter in named_parameters
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_checkpoint(
    root: Path,
    step: int,
    save_policy: Callable[[Path], None],
    optimizers: Mapping[str, MasterAdamW],
    notes: Mapping[str, Any],
    keep: int,
) -> Path:
    """Writes `root/step-…`, with the model that `save_policy` writes into the folder it is given and the state of
    `optimizers` by name, and removes all but the newest `keep`.

    An interrupted save leaves the older ones alone."""
    final = root / f"step-{step:06d}"
    partial = root / f".partial-{step:06d}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_policy(partial / "model")
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    torch.save({**states, "random": _random_states()}, partial / "trainer.pt")
    (partial / "state.json").write_text(json.dumps({"step": step, "notes": dict(notes)}), encoding="utf-8")
    _sync_to_disk(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load_checkpoint(folder: Path, optimizers: Mapping[str, MasterAdamW]) -> Restored:
    """Restores the optimisers, their parameters (from the masters) and the random states.

    Raises `ValueError` if the checkpoint's optimisers or parameters are others.
    """
    saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)
    if saved.keys() - {"random"} != optimizers.keys():
        raise ValueError(f"{folder} has the optimisers {sorted(saved.keys() - {'random'})}, not {sorted(optimizers)}")
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(saved[name])
    _set_random_states(saved["random"])
    return read_state(folder)


def read_state(folder: Path) -> Restored:
    """What a checkpoint says besides the weights, without loading them."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return Restored(state["step"], state["notes"])


def _random_states() -> dict[str, Any]:
    """Of the generators that reward functions may use; rollouts and data order depend on (seed, step) alone."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    plain = {**numpy_state, "state": {"key": torch.from_numpy(inner["key"].astype(np.int64)), "pos": inner["pos"]}}
    return {"python": random.getstate(), "numpy": plain, "torch": torch.get_rng_state()}


def _set_random_states(states: Mapping[str, Any]) -> None:
    inner = states["numpy"]["state"]
    np.random.set_state(
        {**states["numpy"], "state": {"key": inner["key"].numpy().astype(np.uint32), "pos": inner["pos"]}}
    )
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"].clone())


def _sync_to_disk(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
