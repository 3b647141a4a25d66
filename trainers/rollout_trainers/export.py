"""A trained model as a Hugging Face folder of its own, which transformers and vLLM load. Nothing goes over a network.

out/
    config.json, generation_config.json, tokenizer          with the dtype that the weights have
    model.safetensors                                       or model-00001-of-00003.safetensors, … and an index
    README.md                                               the model card: recipe, scores, versions
    LICENSE*, NOTICE*                                       of the base model, where its folder has them
    rollout_export.json                                     the names of all these: what `--force` may replace
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from rollout.models.loader import build_model, iterate_checkpoint, read_config, read_tensors
from rollout_trainers.checkpoint import (
    BEST_LINK,
    EXPORT_FILE,
    MODEL_FOLDER,
    checkpoint_step,
    copy_model_files,
    is_checkpoint,
    list_checkpoints,
    read_state,
    save_tensors,
    set_dtype,
)
from rollout_trainers.durable import new_folder
from rollout_trainers.lora import make_base_absolute
from rollout_trainers.model_card import Facts, model_card
from rollout_trainers.resume import CHECKPOINTS
from rollout_trainers.run_record import RUN_FILE, read_record
from rollout_trainers.transformers_policy import ADAPTER

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Source:
    """The folder of a model, and what is known of where it comes from."""

    folder: Path
    facts: Facts


@dataclass(frozen=True, slots=True)
class Exported:
    """What has been written. `num_parameters` counts tied weights once."""

    folder: Path
    files: tuple[str, ...]  # with weights
    num_parameters: int
    dtype: str


def find_source(path: Path, *, best: bool = False, step: int | None = None) -> Source:
    """The model of a run's folder (its trained one, or that of its `best` checkpoint, or of the one of `step`) or of a
    checkpoint's. Raises `ValueError` where there is none, or not yet."""
    path = path.resolve()  # `checkpoints/best` is a link
    if is_checkpoint(path):
        if best or step is not None:
            raise ValueError(f"{path} is a checkpoint: --best and --step choose one of a run's folder")
        return _checkpoint_source(path, read_record(path.parent.parent))
    record, checkpoints = read_record(path), list_checkpoints(path / CHECKPOINTS)
    if record is None and not checkpoints:
        raise ValueError(f"{path} is neither the folder of a run nor a checkpoint")
    names = ", ".join(str(checkpoint_step(each)) for each in checkpoints) or "none"
    if best:
        link = path / CHECKPOINTS / BEST_LINK
        if not link.exists():
            raise ValueError(f"{path} has no best checkpoint: a recipe with checkpoint.best_metric keeps one")
        return _checkpoint_source(link.resolve(), record)
    if step is not None:
        found = [each for each in checkpoints if checkpoint_step(each) == step]
        if not found:
            raise ValueError(f"--step {step} is not valid: {path} has checkpoints of the steps {names}")
        return _checkpoint_source(found[0], record)
    if record is None or record["status"] != "finished":
        raise ValueError(
            f"the run in {path} has not finished, so that it has no trained model yet: resume it, or export one of its "
            f"checkpoints with --step (there are: {names})"
        )
    facts = Facts(record["model_step"], record["config"], record["task"], record["base"], record["trained"])
    return Source(path / MODEL_FOLDER, facts)


def _checkpoint_source(folder: Path, record: Mapping[str, Any] | None) -> Source:
    state = read_state(folder)
    evaluations = state.notes["evaluations"]
    config, task = (record["config"], record["task"]) if record else (None, state.notes["settings"]["task.name"])
    facts = Facts(state.step, config, task, evaluations.get("0"), evaluations.get(str(state.step)))
    return Source(folder / MODEL_FOLDER, facts)


def export_model(source: Source, target: Path, *, dtype: str | None, shard_bytes: int, force: bool = False) -> Exported:
    """Writes the model to `target`, in `dtype` (None: as it is) and in files of at most `shard_bytes` (a larger tensor
    has one of its own).

    Raises `ValueError` where `target` holds something already and not `force`, or something else than what an export
    wrote, and for weights that are not those that the configuration describes; `OSError` where it cannot be written.
    Whatever happens, `target` is whole or what it was.
    """
    _check_target(target, force)
    tensors = _check_weights(source.folder, dtype)
    shards = plan_shards({name: _num_bytes(tensor) for name, tensor in tensors.items()}, shard_bytes)
    largest = max((tensor.dtype for tensor in tensors.values()), key=lambda each: each.itemsize)
    with new_folder(target) as folder:
        copy_model_files(source.folder, folder)
        set_dtype(folder, largest)
        if not (folder / "generation_config.json").is_file():
            GenerationConfig.from_model_config(read_config(folder)).save_pretrained(folder)
        files = _write_shards(source.folder, folder, shards, tensors)
        num_parameters = sum(tensor.numel() for tensor in tensors.values())
        exported = Exported(target, files, num_parameters, str(largest).removeprefix("torch."))
        _copy_license(source.facts, folder)
        card = model_card(source.facts, exported.num_parameters, exported.dtype)
        (folder / "README.md").write_text(card, encoding="utf-8")
        _mark(folder)
    return exported


def export_adapter(source: Source, target: Path, *, force: bool = False) -> Exported:
    """Writes the LoRA adapter alone to `target`, as PEFT and vLLM load it. Raises as `export_model`, and `ValueError`
    where the model was not trained with LoRA."""
    adapter = source.folder / ADAPTER
    if not adapter.is_dir():
        raise ValueError(f"{source.folder} has no adapter: the model was not trained with LoRA. Leave out --adapter")
    _check_target(target, force)
    with new_folder(target) as folder:
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
        base = make_base_absolute(folder)
        file = "adapter_model.safetensors"
        tensors = [tensor for _, tensor in read_tensors(folder / file)]
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        exported = Exported(target, (file,), sum(tensor.numel() for tensor in tensors), dtype)
        card = model_card(source.facts, exported.num_parameters, dtype, adapter_of=base)
        (folder / "README.md").write_text(card, encoding="utf-8")
        _mark(folder)
    return exported


def plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, in files of at most `limit` bytes; a larger tensor has a file of its own."""
    shards: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not shards or used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _check_target(target: Path, force: bool) -> None:
    """Raises `ValueError` where `target` may not be replaced: only an export's own files are."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file: choose another folder")
    entries = sorted(target.iterdir())
    if not entries:
        return
    if not force:
        raise ValueError(f"{target} is not empty: choose another folder, or replace what is there with --force")
    whole = target.resolve()
    run = next((folder for folder in (whole, *whole.parents) if (folder / RUN_FILE).is_file()), None)
    if run is not None:
        raise ValueError(f"{target} is in the folder of the run {run}: --force replaces nothing there")
    written = _marked_files(target)
    foreign = [path for path in entries if path.name not in written or path.is_symlink() or not path.is_file()]
    if foreign:
        why = "" if written else f" (there is no {EXPORT_FILE} in it)"
        raise ValueError(
            f"{target} holds something else than an exported model: {foreign[0].name!r} was not written by an "
            f"export{why}, and --force does not replace that"
        )


def _mark(folder: Path) -> None:
    """Writes which files the export consists of."""
    names = sorted([EXPORT_FILE, *(path.name for path in folder.iterdir())])
    (folder / EXPORT_FILE).write_text(json.dumps({"files": names}, indent=2) + "\n", encoding="utf-8")


def _marked_files(folder: Path) -> list[str]:
    """The names of the files that an export has written to `folder`; none where it is no export's."""
    path = folder / EXPORT_FILE
    return json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else []


def _check_weights(folder: Path, dtype: str | None) -> dict[str, torch.Tensor]:
    """The tensors to be written, by name, on the meta device and in the dtype that they are to have.

    Copies of tied weights are left out, as transformers does: both it and vLLM tie them again.
    """
    model = build_model(read_config(folder), torch.float32)
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in iterate_checkpoint(folder):
        if name in model.tied_names:
            continue
        if name not in expected or tensor.shape != expected[name]:
            raise ValueError(f"{folder} is not whole: the model has no {name!r} of the shape {tuple(tensor.shape)}")
        tensors[name] = torch.empty_like(tensor, dtype=DTYPES[dtype] if dtype else None, device="meta")
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{folder} is not whole: {len(missing)} tensors are missing: {', '.join(missing[:8])}")
    return tensors


def _write_shards(
    source: Path, folder: Path, shards: Sequence[Sequence[str]], tensors: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Writes the files, with one of them in memory at a time, and the index where there are several."""
    count = len(shards)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    for file, names in zip(files, shards, strict=True):
        wanted = set(names)
        held = {name: tensor.to(tensors[name].dtype) for name, tensor in iterate_checkpoint(source) if name in wanted}
        save_tensors(held, folder / file)
    if count > 1:
        total = sum(_num_bytes(tensor) for tensor in tensors.values())
        parameters = sum(tensor.numel() for tensor in tensors.values())
        index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": places}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return tuple(files)


def _copy_license(facts: Facts, folder: Path) -> None:
    base = None if facts.config is None else Path(facts.config["model"]).expanduser()
    if base is None or not base.is_dir():
        return
    for file in base.iterdir():
        if file.is_file() and file.name.upper().startswith(("LICENSE", "NOTICE")):
            shutil.copyfile(file, folder / file.name)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
