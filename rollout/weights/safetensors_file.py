"""Writes one safetensors file, a tensor at a time: none of them is kept in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from rollout.weights.buckets import Entry, wire_dtype
from rollout.weights.receipt import fingerprint_of

# The header stands before the data and names every tensor, so its room is set aside first: what is left of it is filled
# with spaces, as the format allows.
_HEADER_BYTES = (128 << 10) - 8
_BYTES_PER_ENTRY = 160  # beside the name: punctuation, dtype, up to 8 dimensions, two offsets
_METADATA = {"format": "pt"}  # without it, transformers refuses the file
_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
}


class SafetensorsWriter:
    """`entries` are the tensors written so far; their offsets are bytes from the beginning of the data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self._file = path.open("wb", buffering=0)
        self._file.seek(8 + _HEADER_BYTES)
        self._header_bytes = 256
        self._end = 0

    def has_room(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None, max_bytes: int) -> bool:
        """Whether a tensor may go into this file: not if it is too full, or the tensor would be misaligned in it."""
        kind = wire_dtype(name, tensor, dtype)
        if not self.entries:
            return True
        return (
            self._end + tensor.numel() * kind.itemsize <= max_bytes
            and self._header_bytes + _header_bytes(name) <= _HEADER_BYTES
            and self._end % kind.itemsize == 0
        )

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Writes a tensor, cast if asked for. A tensor that is contiguous, on the CPU and not cast is not copied."""
        data = tensor.detach().to("cpu", wire_dtype(name, tensor, dtype)).contiguous()
        entry = Entry(name, data.dtype, tuple(data.shape), self._end, fingerprint_of(data))
        rest = data.flatten().view(torch.uint8).numpy().data
        while rest:
            rest = rest[self._file.write(rest) :]
        self.entries.append(entry)
        self._end += entry.num_bytes
        self._header_bytes += _header_bytes(name)

    def close(self) -> None:
        """Writes the header and flushes everything to disk."""
        if self._file.closed:
            return
        header: dict[str, object] = {"__metadata__": _METADATA}
        for entry in self.entries:
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
            }
        text = json.dumps(header).encode()
        assert len(text) <= _HEADER_BYTES, f"a header of {len(text)} bytes where {_HEADER_BYTES} were set aside"
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little") + text.ljust(_HEADER_BYTES))
        os.fsync(self._file.fileno())
        self._file.close()


def _header_bytes(name: str) -> int:
    return len(json.dumps(name)) + _BYTES_PER_ENTRY


def flush_folder(folder: Path) -> None:
    """Makes the names in a folder durable: which files it holds, not what is in them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
