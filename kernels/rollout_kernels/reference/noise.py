"""The noise of sampling: 32 bits for each (seed, sample index, position, token id), a pure function.

The key is 64 bits: the three numbers pass one after another through a 64-bit finaliser (Stafford's variant 13). The id
then passes through two rounds of a 32-bit finaliser with half of the key before each. `cpu/csrc/noise.h` computes the
same bits.
"""

from __future__ import annotations

import numpy as np
import torch

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _mix64(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
    return h ^ (h >> 31)


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """The 64-bit key of one draw."""
    h = _mix64((seed + _STEP) & _MASK)
    h = _mix64(((h ^ (sample_index & _MASK)) + _STEP) & _MASK)
    return _mix64(((h ^ (position & _MASK)) + _STEP) & _MASK)


def noise_array(seed: int, sample_index: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """The noise of the given ids, uint32."""
    key = noise_key(seed, sample_index, position)
    h = token_ids.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    h = (h ^ (h >> np.uint32(16))) + np.uint32(key >> 32)
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(15))


def noise_bits(seed: int, sample_index: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    bits = noise_array(seed, sample_index, position, token_ids.cpu().numpy())
    return torch.from_numpy(bits.astype(np.int64)).to(token_ids.device)
