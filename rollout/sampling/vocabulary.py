"""What the tokens of a vocabulary write, and which tokens' bytes begin with given ones or contain them."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.engine.spelling import Spelling, find_spelling

_NO_TEXT = 0xFF  # a byte that UTF-8 does not use, so that no text has it


class Vocabulary:
    """The bytes that each of `vocab_size` token ids adds to a text.

    `written[i]` are those of token `i` where special tokens are kept in the text, `plain[i]` where they are left out
    (`skip_special_tokens`). Ids that the tokenizer does not know write nothing. A part of a character is a part of its
    bytes. Where a tokenizer leaves out the first space of a text, it is here. Raises `ValueError` for a tokenizer whose
    tokens cannot be spelled one by one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.written = _bytes(tokenizer, vocab_size, skip_special_tokens=False)
        self.plain = _bytes(tokenizer, vocab_size, skip_special_tokens=True)

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
    """Why the bytes of a tokenizer's tokens are not known, in a sentence; None where they are."""
    spelling = find_spelling(tokenizer, skip_special_tokens=False)
    if spelling is not None and (spelling.first_pieces is None or _ends_alike(spelling, len(tokenizer))):
        return None
    return (
        f"{type(tokenizer).__name__} does not say what each token writes wherever it stands; byte-level BPE and "
        "SentencePiece tokenizers with a tokenizer.json do"
    )


def _ends_alike(spelling: Spelling, num_tokens: int) -> bool:
    """Whether each token writes at the beginning of a text what it writes elsewhere, or the end of that."""
    assert spelling.first_pieces is not None
    return all(spelling.pieces[i].endswith(spelling.first_pieces[i]) for i in range(num_tokens))


def _bytes(tokenizer: PreTrainedTokenizerBase, vocab_size: int, skip_special_tokens: bool) -> list[bytes]:
    why = problem(tokenizer)
    spelling = find_spelling(tokenizer, skip_special_tokens)
    if why is not None or spelling is None:
        raise ValueError(why)
    return [spelling.pieces[token_id] for token_id in range(vocab_size)]
