"""Checkpoints: whole or absent, loadable by transformers, and an exact continuation of optimiser and randomness."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_trainers import checkpoint
from rollout_trainers.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint, save_model
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


def saving(named: dict[str, torch.nn.Parameter], source: Path) -> Callable[[Path], None]:
    return lambda folder: save_model(folder, named.items(), source)


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


def test_a_checkpoint_restores_optimizer_notes_and_random_states(tmp_path: Path, source: Path):
    named, optimizer = trained(1.0)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    save_checkpoint(tmp_path / "all", 7, saving(named, source), {"optimizer": optimizer}, {"num_tokens": 11}, keep=2)
    expected = (random.random(), np.random.standard_normal(), torch.rand(1).item())
    named["weight"].square().sum().backward()
    optimizer.step(1e-2)

    fresh = parameters(9.0)
    other = MasterAdamW(fresh.items(), CONFIG)
    restored = load_checkpoint(list_checkpoints(tmp_path / "all")[-1], {"optimizer": other})
    assert (restored.step, restored.notes) == (7, {"num_tokens": 11})
    assert (random.random(), np.random.standard_normal(), torch.rand(1).item()) == expected
    fresh["weight"].square().sum().backward()
    other.step(1e-2)
    assert torch.equal(fresh["weight"], named["weight"])
    assert torch.equal(other.masters["weight"], optimizer.masters["weight"])


def test_only_the_newest_checkpoints_stay(tmp_path: Path, source: Path):
    named, optimizer = trained(1.0)
    for step in (2, 10, 9):
        save_checkpoint(tmp_path / "all", step, saving(named, source), {"optimizer": optimizer}, {}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path / "all")] == ["step-000009", "step-000010"]


def test_a_save_that_fails_leaves_the_checkpoints_before_it(tmp_path: Path, source: Path, monkeypatch):
    named, optimizer = trained(1.0)
    root = tmp_path / "all"
    save_checkpoint(root, 1, saving(named, source), {"optimizer": optimizer}, {}, keep=1)

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(root, 2, saving(named, source), {"optimizer": optimizer}, {}, keep=1)
    assert [path.name for path in list_checkpoints(root)] == ["step-000001"]
    load_checkpoint(root / "step-000001", {"optimizer": optimizer})


def test_without_a_folder_there_are_no_checkpoints(tmp_path: Path):
    assert list_checkpoints(tmp_path / "nothing") == []
