"""Over a file system: every policy is a checkpoint of its own, published whole or not at all.

    folder/
      policy-000000007/                 written under another name, flushed to disk, then renamed
        model-00001-of-00002.safetensors …  model.safetensors.index.json      what transformers reads
        policy.json                     version, names in order, fingerprints
        config.json …                   copies of what `files_from` holds, so that from_pretrained works
      LATEST                            "policy-000000007", replaced in one step

A receiver reads the version that its update asks for, from the files as they are at that moment: nothing is cached.
Whatever was cut short or altered is found before the engine's first byte is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rollout.errors import TransportError
from rollout.weights.buckets import Entry, Tally, only_consumed, to_the_end
from rollout.weights.receipt import fingerprint_of
from rollout.weights.safetensors_file import SafetensorsWriter, flush_folder
from rollout.weights.transport import HeldPolicy, NamedTensor, Sender, SendReport, Transport

_VERSION = re.compile(r"policy-(\d+)")
_MANIFEST = "policy.json"
_LATEST = "LATEST"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_RETRY_SECONDS = 0.05


class SafetensorsFolderSender(Sender):
    """Writes policies below `folder`, and keeps the newest `keep` of them.

    `files_from` is a model's folder: its configuration and tokenizer are copied beside each policy's weights, which
    makes it a checkpoint for `from_pretrained`. A file of weights ends at `max_file_bytes` (a larger tensor has one of
    its own). `dtype` casts floating-point tensors. One process writes below a folder; `sends=False` is for ranks of a
    trainer that only take part in gathering.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        files_from: str | Path | None = None,
        keep: int = 2,
        max_file_bytes: int = 4 << 30,
        dtype: torch.dtype | None = None,
        sends: bool = True,
    ) -> None:
        for name, value in (("keep", keep), ("max_file_bytes", max_file_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value!r} is not valid: it must be at least 1")
        self._folder = Path(folder)
        self._files_from = None if files_from is None else Path(files_from)
        if self._files_from is not None and not (self._files_from / "config.json").is_file():
            raise ValueError(f"files_from={str(files_from)!r} is not valid: there is no config.json in it")
        self._keep = keep
        self._max_file_bytes = max_file_bytes
        self._dtype = dtype
        self._sends = sends

    def send(self, version: int, named: Iterable[NamedTensor]) -> SendReport:
        """See `Sender`. Returns when the policy is on disk. Raises `TransportError` for a version that is there."""
        if not self._sends:
            return only_consumed(named)
        tally = Tally()
        with to_the_end(named) as source:
            try:
                self._publish(version, source, tally)
            except OSError as error:
                raise TransportError(
                    f"policy {version} could not be written to {str(self._folder)!r}: {error}"
                ) from error
        return tally.report()

    def _publish(self, version: int, named: Iterator[NamedTensor], tally: Tally) -> None:
        target = self._folder / policy_name(version)
        if target.exists():
            raise TransportError(f"policy {version} is in {str(self._folder)!r} already: versions only rise")
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in [*self._folder.glob(".unfinished-*"), *self._folder.glob(".pruned-*")]:  # by a sender that died
            shutil.rmtree(left, ignore_errors=True)
        unfinished = self._folder / f".unfinished-{version}"
        unfinished.mkdir()
        try:
            self._write(unfinished, version, named, tally)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _write_flushed(self._folder / f".{_LATEST}", target.name)
        (self._folder / f".{_LATEST}").rename(self._folder / _LATEST)
        flush_folder(self._folder)
        self._prune()

    def _write(self, folder: Path, version: int, named: Iterator[NamedTensor], tally: Tally) -> None:
        files: list[tuple[Path, list[Entry]]] = []
        writer: SafetensorsWriter | None = None
        try:
            for name, tensor in named:
                if writer is None or not writer.has_room(name, tensor, self._dtype, self._max_file_bytes):
                    if writer is not None:
                        writer.close()
                    writer = SafetensorsWriter(folder / f"part-{len(files) + 1}")
                    files.append((writer.path, writer.entries))
                writer.add(name, tensor, self._dtype)
        finally:
            if writer is not None:
                writer.close()
        for _, entries in files:
            tally.add_bucket(entries, sum(entry.num_bytes for entry in entries))
        weight_map = _name_files(folder, files)
        self._write_index(folder, weight_map, tally)
        tensors = [[*entry.as_json()[:3], entry.fingerprint] for _, entries in files for entry in entries]
        manifest = {"version": version, "files": weight_map, "tensors": tensors, "end": tally.end()}
        _write_flushed(folder / _MANIFEST, json.dumps(manifest))
        self._copy_files(folder)
        flush_folder(folder)

    def _write_index(self, folder: Path, weight_map: Mapping[str, str], tally: Tally) -> None:
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": tally.num_bytes}, "weight_map": weight_map}
            _write_flushed(folder / "model.safetensors.index.json", json.dumps(index, indent=2))

    def _copy_files(self, folder: Path) -> None:
        for path in sorted(self._files_from.iterdir()) if self._files_from is not None else ():
            if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != _MANIFEST:
                shutil.copyfile(path, folder / path.name)

    def _prune(self) -> None:
        """Removes all but the newest. Who has opened an old one can read it to its end."""
        for version in versions(self._folder)[: -self._keep]:
            gone = self._folder / f".pruned-{version}"
            (self._folder / policy_name(version)).rename(gone)  # nobody sees it half removed
            shutil.rmtree(gone, ignore_errors=True)


class SafetensorsFolderReceiver(Transport):
    """Reads the policy of the update's version from `folder`, waiting up to `timeout` seconds for it to be there."""

    def __init__(self, folder: str | Path, *, timeout: float = 120.0) -> None:
        self._folder = Path(folder).absolute()
        self._timeout = timeout
        self._version: int | None = None
        self._fingerprints: dict[str, int] = {}

    def prepare(self, version: int, held: HeldPolicy) -> None:
        self._version = version
        self._timeout = held.limit(self._timeout)

    def tensors(self) -> Iterator[NamedTensor]:
        """See `Transport`. Everything is read once and compared with the manifest before the first tensor is given."""
        folder = self._wait()
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
            with ExitStack() as opened:
                names = sorted(set(manifest["files"].values()))
                files = {name: opened.enter_context(safe_open(folder / name, framework="pt")) for name in names}
                self._check(folder, manifest, files)
                for name, _, _, fingerprint in manifest["tensors"]:
                    self._fingerprints[name] = fingerprint
                    yield name, files[manifest["files"][name]].get_tensor(name)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise TransportError(f"{str(folder)!r} is not a whole policy: {type(error).__name__}: {error}") from error

    def sent_fingerprints(self) -> Mapping[str, int]:
        return self._fingerprints

    def _wait(self) -> Path:
        """The folder of the version asked for. Raises `TransportError` where it does not come, or is gone already."""
        version = self._version
        assert version is not None, "prepare() says which version"
        deadline = time.monotonic() + self._timeout
        while True:
            folder = self._folder / policy_name(version)
            if folder.is_dir():
                return folder
            there = versions(self._folder)
            if there and there[-1] > version:
                raise TransportError(f"policy {version} is not in {str(self._folder)!r}: the newest is {there[-1]}")
            if time.monotonic() > deadline:
                found = f"the newest is {there[-1]}" if there else "there is none"
                raise TransportError(
                    f"policy {version} did not come to {str(self._folder)!r} in {self._timeout} s: {found}"
                )
            time.sleep(_RETRY_SECONDS)

    def _check(self, folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        if manifest["version"] != self._version:
            raise TransportError(f"{str(folder)!r} holds policy {manifest['version']}, not {self._version}")
        tally = Tally()
        for name, dtype, shape, fingerprint in manifest["tensors"]:
            tensor = files[manifest["files"][name]].get_tensor(name)
            entry = Entry.from_json([name, dtype, shape, 0, fingerprint])
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape) or fingerprint_of(
                tensor
            ) != fingerprint:
                raise TransportError(f"{name!r} in {str(folder)!r} is not what was written there: the file was altered")
            tally.add(name, tensor.dtype, tensor.shape, fingerprint)
        tally.check_end(manifest["end"])


def policy_name(version: int) -> str:
    """The name of a policy's folder: sorted by name is sorted by version, up to nine digits."""
    return f"policy-{version:09d}"


def versions(folder: Path) -> list[int]:
    """The versions that are published below `folder`, in order."""
    matches = (_VERSION.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match is not None)


def _name_files(folder: Path, files: list[tuple[Path, list[Entry]]]) -> dict[str, str]:
    """Gives the parts the names that transformers expects, and returns where each tensor is."""
    weight_map = {}
    for number, (path, entries) in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        weight_map |= {entry.name: name for entry in entries}
    return weight_map


def _write_flushed(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
