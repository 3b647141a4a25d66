"""What each token adds to a text, as bytes, for the kinds of tokenizer where that can be said token by token.

    byte-level BPE     the token's characters stand for bytes, which need not end where characters do
    SentencePiece      `▁` is a space, tokens such as `<0xE4>` are single bytes, one leading space is left out
    Metaspace          `▁` is a space, except in the first token
    WordPiece          a space before every token but the first and those that begin with `##`

Other tokenizers have no spelling: `rollout.engine.detokenize` decodes them through a window of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = re.compile(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?")


class _Pieces(dict[int, bytes]):
    """The bytes of token ids, each worked out when it is first asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._spell(token_id)
        return piece


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tokens of one tokenizer are spelled, with special tokens or without."""

    pieces: dict[int, bytes]  # of any id; empty for ids that no token has, and for special tokens that are skipped
    first_pieces: dict[int, bytes] | None  # at the beginning of a text, where that differs
    special_ids: frozenset[int]
    skipped_ids: Callable[[int], bool]  # whether a token counts for nothing, also not as the first one
    num_stripped: int = 0  # leading spaces that are left out of the text
    bytes_stand_alone: bool = False  # each byte that is in no character becomes a U+FFFD; else each broken character


def find_spelling(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Spelling | None:
    """The spelling of a tokenizer, or None for one of another kind."""
    if not isinstance(tokenizer, TokenizersBackend) or type(tokenizer)._decode is not TokenizersBackend._decode:
        return None
    backend = tokenizer.backend_tokenizer
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = "".join(part["type"] + " " for part in parts)
    special_ids = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)

    def is_skipped(token_id: int) -> bool:
        return (skip_special_tokens and token_id in special_ids) or backend.id_to_token(token_id) is None

    def spelled(spell: Callable[[str], bytes]) -> _Pieces:
        return _Pieces(lambda token_id: b"" if is_skipped(token_id) else spell(_token(backend, token_id)))

    if kinds == "ByteLevel ":
        return Spelling(spelled(_byte_level), None, special_ids, is_skipped)
    if kinds in ("Metaspace ", "WordPiece "):
        decode = backend.decoder.decode
        following = spelled(lambda token: decode(["a", token]).removeprefix("a").encode())
        return Spelling(following, spelled(lambda token: decode([token]).encode()), special_ids, is_skipped)
    if _SENTENCEPIECE.fullmatch(kinds) and all(map(_is_usual, parts)):
        num_stripped = sum(part["start"] for part in parts if part["type"] == "Strip")
        spell = _sentencepiece(parts)
        return Spelling(spelled(spell), None, special_ids, is_skipped, num_stripped, bytes_stand_alone=True)
    return None


def _token(backend: Tokenizer, token_id: int) -> str:
    token = backend.id_to_token(token_id)
    assert token is not None
    return token


def _byte_of_each_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_each_character()


def _byte_level(token: str) -> bytes:
    """Added tokens may hold characters that stand for no byte: these are then spelled as they are."""
    values = [_BYTES.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


def _is_usual(part: dict[str, Any]) -> bool:
    """Whether a step of a SentencePiece decoder is one that can be done token by token."""
    if part["type"] == "Replace":
        return "String" in part["pattern"]
    return part["type"] != "Strip" or (part["content"] == " " and part["stop"] == 0)


def _sentencepiece(parts: list[dict[str, Any]]) -> Callable[[str], bytes]:
    replaced = [(part["pattern"]["String"], part["content"]) for part in parts if part["type"] == "Replace"]
    has_byte_tokens = any(part["type"] == "ByteFallback" for part in parts)

    def spell(token: str) -> bytes:
        for pattern, content in replaced:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        return token.encode() if byte is None else bytes([int(byte[1], 16)])

    return spell
