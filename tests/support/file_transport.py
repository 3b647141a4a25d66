"""A transport for tests, read by every rank from a file, with faults for one of the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollout.errors import TransportError
from rollout.weights.receipt import fingerprint_of
from rollout.weights.transport import Transport


@dataclass
class FileTransport(Transport):
    """The tensors of a checkpoint. In process `bad_process` the way breaks after `num_good` tensors, or, where
    `other` is given, brings the tensors of that checkpoint instead."""

    folder: Path
    bad_process: int | None = None
    num_good: int = 0
    other: Path | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        is_bad = os.getpid() == self.bad_process
        for index, (name, tensor) in enumerate(self._read(is_bad).items()):
            if is_bad and self.other is None and index == self.num_good:
                raise TransportError("the trainer went away")
            yield name, tensor

    def sent_fingerprints(self) -> Mapping[str, int]:
        is_bad = os.getpid() == self.bad_process
        return {name: fingerprint_of(tensor) for name, tensor in self._read(is_bad).items()}

    def _read(self, is_bad: bool) -> dict[str, torch.Tensor]:
        folder = self.other if is_bad and self.other is not None else self.folder
        return load_file(folder / "model.safetensors")
