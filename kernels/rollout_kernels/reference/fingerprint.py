"""A 64-bit fingerprint of a tensor's bytes in numpy, equal bit for bit to `cpu/csrc/fingerprint.cpp`."""

from __future__ import annotations

import numpy as np
import torch

_CHUNK, _STRIPE, _LANES = 1 << 16, 256, 32
_LANE, _FOLD, _SEED = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _fold(h: int, value: int) -> int:
    h = ((h ^ value) * _FOLD) & _MASK
    return h ^ (h >> 29)


def _hash_chunks(words: np.ndarray) -> list[int]:
    """Hashes of chunks, uint64 [chunks, stripes, 32]."""
    state = np.tile(np.uint64(_SEED) * np.arange(1, _LANES + 1, dtype=np.uint64), (len(words), 1))
    total = np.zeros_like(state)
    for stripe in range(words.shape[1]):
        state ^= words[:, stripe]
        state = ((state << np.uint64(23)) | (state >> np.uint64(41))) * np.uint64(_LANE)
        total += state
    hashes = []
    for lanes in np.concatenate((state, total), axis=1).tolist():
        h = _SEED
        for lane in lanes:
            h = _fold(h, lane)
        hashes.append(h)
    return hashes


def fingerprint(tensor: torch.Tensor) -> int:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    whole = len(data) // _CHUNK * _CHUNK
    hashes = _hash_chunks(data[:whole].view("<u8").reshape(-1, _CHUNK // _STRIPE, _LANES))
    if whole < len(data):
        rest = np.zeros(-(-(len(data) - whole) // _STRIPE) * _STRIPE, dtype=np.uint8)
        rest[: len(data) - whole] = data[whole:]
        hashes += _hash_chunks(rest.view("<u8").reshape(1, -1, _LANES))
    h = _SEED
    for value in hashes:
        h = _fold(h, value)
    h = _fold(h, len(data))
    return h ^ (h >> 32)


def copy_and_fingerprint(destination: torch.Tensor, source: torch.Tensor) -> int:
    destination.copy_(source)
    return fingerprint(destination)
