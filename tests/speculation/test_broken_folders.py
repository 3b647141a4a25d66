"""A drafter's folder that cannot be used is refused by name, with what is wrong in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import LLM, SpeculativeConfig
from rollout.models.causal_lm import CausalLM
from rollout.speculation.checkpoint import load_drafter
from rollout.speculation.eagle import read_eagle
from rollout.speculation.medusa import MedusaHeads, read_medusa
from tests.support.drafters import make_eagle, make_medusa
from tests.support.tiny import make_tiny_llama

Change = Callable[[Path], object]
EAGLE, MEDUSA = "pytorch_model.bin", "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(model: Path) -> CausalLM:
    loaded: CausalLM = LLM(model, kv_cache_memory="1MiB").collective_rpc(lambda worker: worker.model)[0]
    return loaded


def cut(name: str) -> Change:
    """Leaves half of the file."""
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def config(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def text(content: bytes) -> Change:
    return lambda folder: (folder / "config.json").write_bytes(content)


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Another content of the PyTorch file, made of what it held."""
    return lambda folder: torch.save(change(torch.load(folder / EAGLE)), folder / EAGLE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cut(EAGLE), f"{EAGLE}' cannot be read as a PyTorch file"),
        (lambda folder: (folder / EAGLE).write_bytes(b""), f"{EAGLE}' cannot be read"),
        (stored(lambda tensors: Path("/")), f"{EAGLE}' cannot be read"),  # an object that torch does not trust
        (stored(lambda tensors: list(tensors.values())), f"{EAGLE}' holds a list, not tensors by name"),
        (stored(lambda tensors: tensors | {"fc.weight": 3}), f"{EAGLE}' holds a int by the name 'fc.weight'"),
        (stored(lambda tensors: {1: tensors["fc.weight"]}), "by the name 1"),
        (
            stored(lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}),
            "bias=True in .*eagle.* there is no tensor 'fc.bias'",
        ),
        (config(bias=False), "bias=False in .*eagle.* there is a tensor 'fc.bias'"),
        (text(b'{"a": '), "eagle.* config.json is no JSON"),
        (text(b"\xff\xfe{}"), "eagle.* config.json is no JSON"),
        (config(num_attention_heads=0), "eagle.* config.json cannot be read"),
        (config(num_attention_heads=5), "eagle.* not a multiple of the number of attention heads"),
        (config(num_attention_heads=-4, num_key_value_heads=-4), "num_attention_heads=-4 in .*eagle"),
        (config(num_key_value_heads=3), "eagle.* not a multiple of num_key_value_heads=3"),
        (config(intermediate_size=0), "intermediate_size=0 in .*eagle"),
        (config(rms_norm_eps=None), "eagle.* config.json cannot be read.*rms_norm_eps"),
        (config(rms_norm_eps=float("inf")), "rms_norm_eps=inf in .*eagle"),
        (config(hidden_act="gelu"), "eagle.* hidden_act='gelu'"),
        (config(medusa_num_heads=2), "eagle.* not valid with method='eagle': it holds heads of Medusa"),
    ],
)
def test_folders_of_eagle(target: CausalLM, tmp_path: Path, change: Change, named: str) -> None:
    folder = make_eagle(tmp_path / "eagle")
    change(folder)
    with pytest.raises(ValueError, match=f"(?s){named}"):
        read_eagle(folder, target)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cut(MEDUSA), f"{MEDUSA}' is no whole file of safetensors"),
        (text(b"[]"), "heads.* is no object"),
        (text(b"{}"), "heads.* not valid with method='medusa'"),
    ],
)
def test_folders_of_medusa(target: CausalLM, tmp_path: Path, change: Change, named: str) -> None:
    folder = make_medusa(tmp_path / "heads")
    change(folder)
    with pytest.raises(ValueError, match=named):
        read_medusa(folder, target)


def test_weights_that_are_integers(target: CausalLM, tmp_path: Path) -> None:
    folder = make_medusa(tmp_path / "heads")
    whole = {name: tensor.to(torch.int8) for name, tensor in load_file(folder / MEDUSA).items()}
    save_file(whole, folder / MEDUSA)
    heads, tensors = read_medusa(folder, target)
    with pytest.raises(ValueError, match=r"tensor '0.0.linear.* in '.*heads' is torch.int8: quantised"):
        load_drafter(MedusaHeads(heads, torch.float32), tensors, folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cut("model.safetensors"), r"draft/model\.safetensors' is no whole file of safetensors"),
        (text(b'{"a": '), r"draft' is not valid: its config\.json cannot be read"),
        (
            lambda folder: save_file({"fc.weight": torch.zeros(2)}, folder / "model.safetensors"),
            "draft' cannot be used: checkpoint tensor 'fc.weight' has no place",
        ),
    ],
)
def test_folders_of_draft_models(model: Path, tmp_path: Path, change: Change, named: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    change(make_tiny_llama(folder))
    with pytest.raises(ValueError, match=f"speculative_config: .*{named}"):
        LLM(model, kv_cache_memory="1MiB", speculative_config={"method": "draft_model", "model": str(folder)})


@pytest.mark.parametrize("size", [1.5, "1.5", "4096.25 B"])
def test_a_part_of_a_byte_is_no_memory(size: Any) -> None:
    with pytest.raises(ValueError, match=f"draft_kv_cache_memory={size!r} is not valid: it must be a whole number"):
        SpeculativeConfig("draft_model", model="folder", draft_kv_cache_memory=size)
