"""Bad words: which tokens would complete one, given the bytes that a sample has written so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.sampling.masks import clear, full_mask
from rollout.sampling.vocabulary import TokenSearch


class BadWords:
    """Words that must not appear in the text of a sample, whatever tokens could spell them.

    A token completes a word where the word stands in the token's own bytes, or where the sample's last bytes are the
    beginning of the word and the token's bytes begin with the rest. Every other token stays allowed. So no word can
    ever be complete, and nothing is banned that would not complete one.
    """

    def __init__(self, words: Sequence[str], search: TokenSearch) -> None:
        self._search = search
        encoded = [word.encode() for word in words]
        self.longest = max(map(len, encoded))
        self._whole = full_mask(len(search.tokens))
        self._rests: dict[bytes, list[bytes]] = {}  # the beginning of a word -> what would complete it
        self._after: dict[bytes, np.ndarray] = {}  # the same, as masks, made when they are first needed
        for word in encoded:
            clear(self._whole, search.containing(word))
            for cut in range(1, len(word)):
                self._rests.setdefault(word[:cut], []).append(word[cut:])

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of each token."""
        return self._search.tokens

    def beginnings(self, tail: bytes) -> tuple[bytes, ...]:
        """The beginnings of words with which `tail`, the last bytes of a sample, ends."""
        cuts = (tail[-length:] for length in range(1, min(len(tail), self.longest - 1) + 1))
        return tuple(cut for cut in cuts if cut in self._rests)

    def mask(self, beginnings: tuple[bytes, ...]) -> np.ndarray:
        """int32 [ceil(V / 32)]: the tokens that complete no word after these beginnings. Not to be written to."""
        mask = self._whole
        for beginning in beginnings:
            if beginning not in self._after:
                after = full_mask(len(self._search.tokens))
                for rest in self._rests[beginning]:
                    clear(after, self._search.beginning_with(rest))
                self._after[beginning] = after
            mask = mask & self._after[beginning]
        return mask


class Tail:
    """The last bytes that a sample has written, as many as could begin a word."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._start = num_prompt_tokens
        self._num_seen = num_prompt_tokens
        self.text = b""

    def catch_up(
        self, token_ids: Sequence[int], position: int, words: BadWords, draft_token_ids: Sequence[int] = ()
    ) -> bytes:
        """The bytes before `position`, and of the guesses that follow, which are not remembered. The prompt's do not
        count."""
        if position < self._num_seen:
            self._num_seen, self.text = self._start, b""
        for token_id in token_ids[self._num_seen : position]:
            self.text = (self.text + words.tokens[token_id])[-words.longest :]
        self._num_seen = position
        if not draft_token_ids:
            return self.text
        return (self.text + b"".join(words.tokens[token_id] for token_id in draft_token_ids))[-words.longest :]
