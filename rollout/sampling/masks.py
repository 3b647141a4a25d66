"""Masks of tokens that may be drawn, as bits: token `i` is bit `i % 32` of word `i // 32`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def num_words(vocab_size: int) -> int:
    """Length of a mask."""
    return -(-vocab_size // 32)


def empty_mask(vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] in which no token is allowed."""
    return np.zeros(num_words(vocab_size), np.int32)


def full_mask(vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] in which every token is."""
    return np.full(num_words(vocab_size), -1, np.int32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] in which these tokens are allowed."""
    mask = empty_mask(vocab_size)
    _set(mask, np.fromiter(token_ids, np.int64), True)
    return mask


def clear(mask: np.ndarray, token_ids: np.ndarray) -> None:
    """Forbids tokens, int64 [N], in a mask."""
    _set(mask, token_ids, False)


def allows(mask: np.ndarray, token_id: int) -> bool:
    """Whether a token may be drawn."""
    return bool((int(mask[token_id // 32]) >> (token_id % 32)) & 1)


def _set(mask: np.ndarray, token_ids: np.ndarray, allowed: bool) -> None:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    bits[token_ids] = allowed
    mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
