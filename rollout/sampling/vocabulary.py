"""What the tokens of a vocabulary write: the bytes of each, and which tokens' bytes begin with given ones."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_MARKS_SPACES = {"Replace", "Metaspace"}
_SENTENCEPIECE = {*_MARKS_SPACES, "ByteFallback", "Fuse", "Strip"}  # steps of a decoder in a tokenizer.json
_NO_TEXT = 0xFF  # a byte that UTF-8 does not use, so that no text has it


class Vocabulary:
    """The bytes that each of `vocab_size` token ids adds to a text.

    `written[i]` are those of token `i` where special tokens are kept in the text, `plain[i]` where they are left out
    (`skip_special_tokens`). Ids that the tokenizer does not know write nothing. A part of a character is a part of its
    bytes: byte-level BPE, and SentencePiece with byte fallback, have such tokens. Raises `ValueError` for a tokenizer
    whose tokens do not each write the same bytes wherever they stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        bytes_of = _rule(tokenizer)
        self.written = [b""] * vocab_size
        for token, token_id in tokenizer.get_vocab().items():
            if token_id < vocab_size:
                self.written[token_id] = bytes_of(token)
        self.plain = self.written.copy()
        for token_id, added in tokenizer.added_tokens_decoder.items():
            if token_id < vocab_size:
                self.written[token_id] = added.content.encode()
                self.plain[token_id] = b"" if added.special else self.written[token_id]

    @cached_property
    def search_written(self) -> TokenSearch:
        return TokenSearch(self.written)

    @cached_property
    def search_plain(self) -> TokenSearch:
        return TokenSearch(self.plain)


class TokenSearch:
    """Finds tokens by their bytes. Ids come as int64 arrays, in no particular order."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._ids = np.array(order, np.int64)
        self._sorted = [tokens[token_id] for token_id in order]
        separator = bytes([_NO_TEXT])
        self._joined = separator.join(tokens) + separator
        self._ends = np.cumsum([len(token) + 1 for token in tokens])

    def beginning_with(self, prefix: bytes) -> np.ndarray:
        """Tokens whose bytes begin with `prefix`, which is not empty."""
        first = bisect_left(self._sorted, prefix)
        last = bisect_left(self._sorted, prefix + bytes([_NO_TEXT, _NO_TEXT]), lo=first)
        return self._ids[first:last]

    def containing(self, text: bytes) -> np.ndarray:
        """Tokens in whose bytes the whole of `text` stands. It is UTF-8, and not empty."""
        places = []
        place = self._joined.find(text)
        while place >= 0:
            places.append(place)
            place = self._joined.find(text, place + 1)
        return np.unique(np.searchsorted(self._ends, places, side="right"))


def problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a tokenizer's tokens have no bytes of their own, in a sentence; None where they have."""
    try:
        _rule(tokenizer)
    except ValueError as error:
        return str(error)
    return None


def _rule(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """A function from a token, as the vocabulary spells it, to its bytes."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json, which says what bytes a token writes")
    decoder: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": "missing"}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if _MARKS_SPACES.isdisjoint(kinds) or not _SENTENCEPIECE.issuperset(kinds):
        raise ValueError(
            f"its decoder is {', '.join(kinds)}: only byte-level BPE and SentencePiece tokenizers have tokens that "
            "write the same bytes wherever they stand"
        )
    spaces = [_space_mark(step) for step in steps if step["type"] in _MARKS_SPACES]
    has_bytes = "ByteFallback" in kinds

    def bytes_of(token: str) -> bytes:
        if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        for mark, text in spaces:
            token = token.replace(mark, text)
        return token.encode()

    return bytes_of


def _space_mark(step: dict[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise ValueError(f"its decoder replaces {step['pattern']!r}: only a fixed text can be followed")
    return step["pattern"]["String"], step["content"]


def _byte_level(token: str) -> bytes:
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE spells bytes (Radford et al., 2019): printable ones stand for
    themselves, the others, in order, for the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
