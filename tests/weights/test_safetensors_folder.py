"""Policies on disk: whole or not there, readable by other libraries, never taken from an earlier read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout import LLM
from rollout.errors import TransportError
from rollout.weights.safetensors_folder import SafetensorsFolderReceiver, SafetensorsFolderSender, versions
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import NamedTensor
from tests.support.recording_engine import (
    NAMES,
    RecordingEngine,
    assert_holds,
    assert_old_policy_serves,
    new_policy,
    snapshot,
)


def update(engine: RecordingEngine, folder: Path, version: int, timeout: float = 10.0) -> PolicyUpdate:
    with PolicyUpdate(engine, version) as opened:
        opened.load(SafetensorsFolderReceiver(folder, timeout=timeout))
    return opened


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_transformers_and_the_engine_load_a_published_policy(
    tiny_model: Callable[..., Path], tmp_path: Path, max_file_bytes: int, dtype: torch.dtype | None
):
    source, weights = tiny_model(tokenizer=True), load_file(tiny_model(seed=1) / "model.safetensors")
    sender = SafetensorsFolderSender(tmp_path, files_from=source, max_file_bytes=max_file_bytes, dtype=dtype)
    report = sender.send(7, weights.items())
    folder = tmp_path / "policy-000000007"
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) == 1) == (max_file_bytes == 1 << 30)
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in weights.items():
        assert torch.equal(model.get_parameter(name), tensor.to(dtype or tensor.dtype).float()), name
    llm = LLM(folder, kv_cache_memory="2MiB", dtype="bfloat16" if dtype else "float32")
    assert llm.receipt is not None
    assert llm.receipt.parameters_fingerprint == report.fingerprint
    assert llm.generate("a b c", use_tqdm=False)[0].outputs[0].token_ids  # the tokenizer came along
    assert (tmp_path / "LATEST").read_text() == folder.name


def test_every_read_is_of_the_files_as_they_are_now(tmp_path: Path):  # case WS-03
    engine = RecordingEngine()
    for seed in (1, 2, 3):
        policy = new_policy(engine, seed=seed)
        SafetensorsFolderSender(tmp_path).send(seed, policy.items())
        update(engine, tmp_path, seed)
        assert_holds(engine, policy)
        shutil.rmtree(tmp_path / f"policy-{seed:09d}")
        with pytest.raises(TransportError, match=r"did not come to .* in 0\.1 s"):
            update(engine, tmp_path, seed + 1, timeout=0.1)
    policy = new_policy(engine, seed=9)
    SafetensorsFolderSender(tmp_path).send(4, policy.items())  # same path as what was just asked for
    update(engine, tmp_path, 4)
    assert_holds(engine, policy)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def _swap(folder: Path) -> None:
    """A whole, valid file, of another policy."""
    shutil.copyfile(folder.parent / "policy-000000001" / "model.safetensors", folder / "model.safetensors")


def _remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _spoil_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "policy.json").read_text())
    manifest["tensors"][0][3] += 1
    (folder / "policy.json").write_text(json.dumps(manifest))


def _cut_manifest(folder: Path) -> None:
    (folder / "policy.json").write_text((folder / "policy.json").read_text()[:40])


def _drop_a_tensor(folder: Path) -> None:
    manifest = json.loads((folder / "policy.json").read_text())
    del manifest["tensors"][0]
    (folder / "policy.json").write_text(json.dumps(manifest))


def _other_version(folder: Path) -> None:
    shutil.copyfile(folder.parent / "policy-000000001" / "policy.json", folder / "policy.json")


@pytest.mark.parametrize(
    "spoil", [_truncate, _flip, _swap, _remove, _spoil_manifest, _cut_manifest, _drop_a_tensor, _other_version]
)
def test_a_file_that_was_altered_is_refused_before_anything_is_written(tmp_path: Path, spoil: Callable[[Path], None]):
    engine = RecordingEngine()
    old = snapshot(engine)
    sender = SafetensorsFolderSender(tmp_path)
    sender.send(1, new_policy(engine, seed=1).items())
    sender.send(2, new_policy(engine, seed=2).items())
    spoil(tmp_path / "policy-000000002")
    with pytest.raises(TransportError, match=r"policy-000000002|what arrived is not the policy that was sent"):
        update(engine, tmp_path, 2)
    assert_old_policy_serves(engine, old)
    update(engine, tmp_path, 1)
    assert_holds(engine, new_policy(engine, seed=1))


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_policies_are_kept_and_others_files_are_let_alone(tmp_path: Path, keep: int):
    engine = RecordingEngine()
    (tmp_path / "policy-notes.txt").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    sender = SafetensorsFolderSender(tmp_path, keep=keep)
    for version in (1, 2, 5, 9, 12):
        sender.send(version, new_policy(engine, seed=version).items())
    assert versions(tmp_path) == [1, 2, 5, 9, 12][-keep:]
    assert (tmp_path / "policy-notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("policy-")) == [
        "LATEST",
        "checkpoints",
    ]
    with pytest.raises(TransportError, match="the newest is 12"):
        update(engine, tmp_path, 3)


def test_what_a_dead_sender_left_is_never_read_and_goes_with_the_next_policy(tmp_path: Path):
    engine = RecordingEngine()
    left = tmp_path / ".unfinished-3"
    left.mkdir()
    (left / "part-1").write_bytes(b"half")
    with pytest.raises(TransportError, match="there is none"):
        update(engine, tmp_path, 3, timeout=0.1)
    policy = new_policy(engine)
    SafetensorsFolderSender(tmp_path).send(3, policy.items())
    assert not left.exists()
    update(engine, tmp_path, 3)
    assert_holds(engine, policy)


def test_a_version_is_published_once(tmp_path: Path):
    engine = RecordingEngine()
    policy = new_policy(engine)
    sender = SafetensorsFolderSender(tmp_path)
    sender.send(3, policy.items())
    with pytest.raises(TransportError, match=r"policy 3 is in .* already"):
        sender.send(3, new_policy(engine, seed=2).items())
    update(engine, tmp_path, 3)
    assert_holds(engine, policy)


def test_a_policy_that_is_read_while_it_is_pruned_arrives_whole(tmp_path: Path):
    engine = RecordingEngine()
    policy = new_policy(engine)
    sender = SafetensorsFolderSender(tmp_path, keep=1, max_file_bytes=1024)
    sender.send(1, policy.items())

    class Slow(SafetensorsFolderReceiver):
        """Another policy is published as soon as the first tensor was read."""

        def tensors(self) -> Iterator[NamedTensor]:
            for index, pair in enumerate(super().tensors()):
                if index == 1:
                    sender.send(2, new_policy(engine, seed=2).items())
                yield pair

    with PolicyUpdate(engine, 1) as opened:
        opened.load(Slow(tmp_path))
    assert_holds(engine, policy)
    assert versions(tmp_path) == [2]


def test_many_tensors_with_long_names_get_as_many_files_as_their_headers_need(tmp_path: Path):
    tensors = {f"model.layers.{index}.{'x' * 300}.weight": torch.full((2,), float(index)) for index in range(500)}
    SafetensorsFolderSender(tmp_path).send(1, tensors.items())
    files = sorted((tmp_path / "policy-000000001").glob("*.safetensors"))
    assert len(files) == 2
    merged = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("options", [{"keep": 0}, {"max_file_bytes": 0}, {"files_from": "/nowhere"}])
def test_options_that_make_no_sense_are_refused_by_name(tmp_path: Path, options: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(options))):
        SafetensorsFolderSender(tmp_path, **options)  # pyright: ignore[reportArgumentType]


def test_names_of_the_recording_engine_are_those_on_disk(tmp_path: Path):
    engine = RecordingEngine()
    SafetensorsFolderSender(tmp_path).send(1, new_policy(engine).items())
    assert set(load_file(tmp_path / "policy-000000001" / "model.safetensors")) == set(NAMES)
