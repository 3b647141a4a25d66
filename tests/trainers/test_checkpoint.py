"""Checkpoints: whole or absent, loadable by transformers, and an exact continuation of optimiser and randomness."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_trainers.checkpoint import (
    checkpoint_step,
    list_checkpoints,
    load_trainer_state,
    mark_best,
    read_state,
    save_checkpoint,
    save_model,
    save_trainer_state,
)
from rollout_trainers.config import OptimizerSection
from rollout_trainers.optimizer import MasterAdamW
from tests.support.tiny import make_tiny_llama

CONFIG = OptimizerSection(learning_rate=1e-2)


def parameters(value: float) -> dict[str, torch.nn.Parameter]:
    return {"weight": torch.nn.Parameter(torch.full((3, 2), value, dtype=torch.bfloat16))}


def trained(value: float) -> tuple[dict[str, torch.nn.Parameter], MasterAdamW]:
    named = parameters(value)
    optimizer = MasterAdamW(named.items(), CONFIG)
    named["weight"].square().sum().backward()
    optimizer.step(1e-2)
    return named, optimizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "source", tokenizer=True)


def test_a_saved_model_loads_in_transformers_with_its_tokenizer(tmp_path: Path, source: Path):
    tensors = load_file(source / "model.safetensors")
    fused = torch.cat([tensor.flatten() for tensor in tensors.values()]) + 1.0
    views = dict(zip(tensors, fused.split([tensor.numel() for tensor in tensors.values()]), strict=True))
    named = {name: views[name].view_as(tensor) for name, tensor in tensors.items()}  # all share one storage
    save_model(tmp_path / "saved", named.items(), source)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor + 1.0)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template


def saver(named: dict[str, torch.nn.Parameter], optimizer: MasterAdamW, source: Path, **state: Any) -> Any:
    """What a trainer writes into the folder of a checkpoint."""

    def write(folder: Path) -> None:
        save_model(folder / "model", named.items(), source)
        save_trainer_state(folder, {"optimizer": optimizer}, state)

    return write


def test_the_config_says_which_dtype_the_weights_have(tmp_path: Path):
    old_style = {"config_style": "rope_scaling"}  # which says torch_dtype
    for name, options in (("new", {}), ("old", old_style)):
        source = make_tiny_llama(tmp_path / name, dtype=torch.float32, **options)  # type: ignore[arg-type]
        tensors = load_file(source / "model.safetensors")
        halved = {key: tensor.bfloat16() for key, tensor in tensors.items()}
        save_model(tmp_path / f"{name}-saved", halved.items(), source)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-saved", dtype="auto")
        assert model.dtype == torch.bfloat16


def test_a_checkpoint_restores_optimizer_notes_and_random_states(tmp_path: Path, source: Path):
    named, optimizer = trained(1.0)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    write = saver(named, optimizer, source, num_tokens=11)
    save_checkpoint(tmp_path / "all", 7, write, {"settings": {"a": 1}}, keep=2)
    expected = (random.random(), np.random.standard_normal(), torch.rand(1).item())
    named["weight"].square().sum().backward()
    optimizer.step(1e-2)

    fresh = parameters(9.0)
    other = MasterAdamW(fresh.items(), CONFIG)
    folder = list_checkpoints(tmp_path / "all")[-1]
    assert (read_state(folder).step, read_state(folder).notes) == (7, {"settings": {"a": 1}})
    assert load_trainer_state(folder, {"optimizer": other}) == {"num_tokens": 11}
    assert (random.random(), np.random.standard_normal(), torch.rand(1).item()) == expected
    fresh["weight"].square().sum().backward()
    other.step(1e-2)
    assert torch.equal(fresh["weight"], named["weight"])
    assert torch.equal(other.masters["weight"], optimizer.masters["weight"])


def test_each_rank_has_a_file_of_its_own(tmp_path: Path):
    optimizers = [trained(float(rank))[1] for rank in range(2)]
    for rank, optimizer in enumerate(optimizers):
        save_trainer_state(tmp_path, {"optimizer": optimizer}, {"of": rank}, rank)
    for rank, optimizer in enumerate(optimizers):
        other = MasterAdamW(parameters(9.0).items(), CONFIG)
        assert load_trainer_state(tmp_path, {"optimizer": other}, rank, 2) == {"of": rank}
        assert torch.equal(other.masters["weight"], optimizer.masters["weight"])
    for num_ranks in (1, 3):
        with pytest.raises(ValueError, match=rf"is of a run with 2 ranks, not {num_ranks}"):
            load_trainer_state(tmp_path, {"optimizer": optimizers[0]}, 0, num_ranks)


def test_another_trainers_checkpoint_is_refused(tmp_path: Path):
    _, optimizer = trained(1.0)
    save_trainer_state(tmp_path, {"optimizer": optimizer}, {})
    with pytest.raises(ValueError, match=r"has the optimisers \['optimizer'\], not \['critic', 'optimizer'\]"):
        load_trainer_state(tmp_path, {"optimizer": optimizer, "critic": optimizer})


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


def test_only_the_newest_checkpoints_and_the_best_stay(tmp_path: Path, source: Path):
    root, write = tmp_path / "all", saver(*trained(1.0), source)
    for step, best in ((2, None), (10, None), (9, None)):
        save_checkpoint(root, step, write, {}, 2, best)
    assert names(root) == ["step-000009", "step-000010"]
    assert not (root / "best").exists()
    for step, best in ((11, 11), (12, 11), (13, 11), (14, 11)):
        save_checkpoint(root, step, write, {}, 2, best)
        assert (root / "best").resolve() == root / "step-000011"
    assert names(root) == ["step-000011", "step-000013", "step-000014"]
    save_checkpoint(root, 15, write, {}, 1, 15)
    assert names(root) == ["step-000015"]
    assert (root / "best").resolve() == root / "step-000015"
    mark_best(root, None)
    assert sorted(path.name for path in root.iterdir()) == ["step-000015"]


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path, source: Path):
    for value in (1.0, 2.0):
        named, optimizer = trained(value)
        folder = save_checkpoint(tmp_path / "all", 3, saver(named, optimizer, source), {}, keep=2)
        assert torch.equal(load_file(folder / "model" / "model.safetensors")["weight"], named["weight"])
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["step-000003"]


def test_a_save_that_fails_leaves_the_checkpoints_before_it(tmp_path: Path, source: Path):
    named, optimizer = trained(1.0)
    root, write = tmp_path / "all", saver(named, optimizer, source)

    def full_disk(folder: Path) -> None:
        write(folder)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="step 1 could not be saved: no space left on device; there is none"):
        save_checkpoint(root, 1, full_disk, {}, keep=1)
    save_checkpoint(root, 1, write, {}, keep=1)
    with pytest.raises(OSError, match="device; the newest whole one is step-000001: resume=true continues from it"):
        save_checkpoint(root, 2, full_disk, {}, keep=1)
    assert [path.name for path in root.iterdir()] == ["step-000001"]
    load_trainer_state(root / "step-000001", {"optimizer": optimizer})


@pytest.mark.parametrize("name", ["trainer.pt", "model/model.safetensors", "model/config.json"])
def test_a_copy_that_is_not_whole_is_refused_by_name(tmp_path: Path, source: Path, name: str):
    folder = save_checkpoint(tmp_path / "all", 1, saver(*trained(1.0), source), {}, keep=1)
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 1)
    with pytest.raises(ValueError, match=rf"is damaged: {name} is {size - 1} bytes, and was {size} bytes"):
        read_state(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"is damaged: {name} is missing"):
        read_state(folder)
    (folder / "state.json").unlink()
    with pytest.raises(ValueError, match="is no checkpoint"):
        read_state(folder)


def test_another_versions_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "state.json").write_text('{"step": 3, "notes": {}}')
    with pytest.raises(ValueError, match="written by another version"):
        read_state(tmp_path)


def test_without_a_folder_there_are_no_checkpoints(tmp_path: Path):
    assert list_checkpoints(tmp_path / "nothing") == []


def test_a_checkpoints_name_says_its_step(tmp_path: Path, source: Path):
    folder = save_checkpoint(tmp_path, 1234567, saver(*trained(1.0), source), {}, keep=1)
    assert checkpoint_step(folder) == 1234567
    assert list_checkpoints(tmp_path) == [folder]
