"""Checkpoints: whole folders that appear in one step, hold everything a run needs, and load in transformers.

checkpoints/step-000010/
    model/              config.json, model.safetensors, tokenizer: `AutoModelForCausalLM.from_pretrained` takes it
    trainer.pt          master weights and AdamW's moments (of a critic, too), random-number states, the trainer's own
                        state (tokens so far, KL coefficient, ...); of each further rank a `trainer-rank-1.pt`, ...
    state.json          format, step, the run's own notes (settings, evaluations, early stop, best), sizes of all files
checkpoints/best        a link to the checkpoint whose evaluation was best, where the recipe asks for one

Nothing of this is ever half-written under these names (`durable.py`). What a copy has lost is noticed by the sizes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollout_trainers.durable import new_folder, put_link, remove_folder
from rollout_trainers.optimizer import Optimizer
from rollout_trainers.random_states import random_states, set_random_states

MODEL_FOLDER = "model"  # of a checkpoint, and of a run
BEST_LINK = "best"
EXPORT_FILE = "rollout_export.json"  # the mark of a folder that `export.py` has written

FORMAT = 2  # of the folder, as described above

_STATE_FILE = "state.json"
_STEP = re.compile(r"step-(\d{6,})")
_MODEL_FILES = (".json", ".jinja", ".model", ".txt")  # configuration and tokenizer; never weights


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says besides the weights: the steps done, and the run's own notes."""

    step: int
    notes: dict[str, Any]


def save_model(folder: Path, named_parameters: Iterable[tuple[str, torch.Tensor]], source: Path) -> None:
    """Writes a Hugging Face folder: the parameters under their names, and the configuration files of `source`, which
    then say which dtype the parameters have.

    Storage that names share (views of a fused tensor) is written out.
    """
    tensors = {
        name: parameter.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        for name, parameter in named_parameters
    }
    copy_model_files(source, folder)
    set_dtype(folder, max((tensor.dtype for tensor in tensors.values()), key=lambda dtype: dtype.itemsize))
    save_tensors(tensors, folder / "model.safetensors")


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a file of safetensors as transformers has them. Raises `OSError` where that is not possible."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error


def copy_model_files(source: Path, folder: Path) -> None:
    """Copies what a Hugging Face folder holds beside its weights: configuration and tokenizer. The mark of an exported
    folder is not copied: the new one is none."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_wanted = file.suffix in _MODEL_FILES and not file.name.endswith(".index.json") and file.name != EXPORT_FILE
        if file.is_file() and is_wanted:
            shutil.copyfile(file, folder / file.name)


def set_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Makes a folder's config.json say that its weights are of `dtype`, by each name that it has for this."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    if "torch_dtype" not in config:  # as older versions of transformers call it
        config["dtype"] = name
    for values in (config, *(value for value in config.values() if isinstance(value, dict))):
        values.update({key: name for key in ("dtype", "torch_dtype") if key in values})
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    notes: Mapping[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    """Makes `root/step-…` of what `write` writes into the folder that it is given, and of `notes`; then removes all
    checkpoints but the newest `keep` and that of the step `best`, to which the link points.

    Raises `OSError`, saying what is left, where it cannot be written: the older ones stay.
    """
    final = checkpoint_folder(root, step)
    try:
        with new_folder(final) as folder:
            write(folder)
            files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            state = {"format": FORMAT, "step": step, "notes": dict(notes), "files": files}
            (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    except OSError as error:
        whole = list_checkpoints(root)
        left = f"the newest whole one is {whole[-1].name}: resume=true continues from it" if whole else "there is none"
        raise OSError(f"the checkpoint of step {step} could not be saved: {error}; {left}") from error
    mark_best(root, best)
    prune_checkpoints(root, keep, best)
    return final


def mark_best(root: Path, step: int | None) -> None:
    """Makes the link `best` point to the checkpoint of a step; None: there is no best one."""
    link = root / BEST_LINK
    if step is None:
        link.unlink(missing_ok=True)
        return
    name = checkpoint_folder(root, step).name
    if not link.is_symlink() or link.readlink() != Path(name):
        put_link(link, name)


def prune_checkpoints(root: Path, keep: int, best: int | None = None) -> None:
    """Removes all checkpoints but the newest `keep` and that of the step `best`."""
    for old in list_checkpoints(root)[:-keep]:
        if checkpoint_step(old) != best:
            remove_folder(old)


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return root / f"step-{step:06d}"


def checkpoint_step(folder: Path) -> int:
    """The step that a folder of `list_checkpoints` is of."""
    return int(folder.name.partition("-")[2])


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is one of a checkpoint."""
    return (folder / _STATE_FILE).is_file()


def read_state(folder: Path) -> Restored:
    """What a checkpoint says besides the weights, without loading them.

    Raises `ValueError` where files are missing or have another size than they had (of a copy that is not whole), and
    for another version's checkpoint.
    """
    path = folder / _STATE_FILE
    if not is_checkpoint(folder):
        raise ValueError(f"{folder} is no checkpoint: there is no {_STATE_FILE} in it")
    state = json.loads(path.read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{folder} was written by another version of rollout, whose checkpoints this one does not read"
        )
    for name, size in state["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
            raise ValueError(f"{folder} is damaged: {name} is {found}, and was {size} bytes. Remove this checkpoint")
    return Restored(state["step"], state["notes"])


def save_trainer_state(
    folder: Path, optimizers: Mapping[str, Optimizer], state: Mapping[str, Any], rank: int = 0
) -> None:
    """Writes a rank's own file: its optimisers by name, its random states, and `state`, of plain values and tensors.

    Raises `OSError` where that is not possible.
    """
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    path = _rank_file(folder, rank)
    try:
        torch.save({"optimizers": states, "trainer": dict(state), "random": random_states()}, path)
    except RuntimeError as error:  # of a full disk, torch says "unexpected pos"
        raise OSError(f"{path.name} cannot be written (is the disk full?): {str(error).splitlines()[0]}") from error


def load_trainer_state(
    folder: Path, optimizers: Mapping[str, Optimizer], rank: int = 0, num_ranks: int = 1
) -> dict[str, Any]:
    """Restores a rank's optimisers, their parameters (from the masters) and the random states; returns its `state`.

    Raises `ValueError` if the checkpoint's optimisers or parameters are others, or it is of another number of ranks.
    """
    path, saved_ranks = _rank_file(folder, rank), len(list(folder.glob("trainer*.pt")))
    if saved_ranks != num_ranks:
        raise ValueError(f"{folder} is of a run with {saved_ranks} ranks, not {num_ranks}: start it with as many")
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if saved["optimizers"].keys() != optimizers.keys():
        raise ValueError(f"{folder} has the optimisers {sorted(saved['optimizers'])}, not {sorted(optimizers)}")
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(saved["optimizers"][name])
    set_random_states(saved["random"])
    return saved["trainer"]


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / ("trainer.pt" if rank == 0 else f"trainer-rank-{rank}.pt")
