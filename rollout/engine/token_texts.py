"""The text of single tokens, for those who look at logprobs token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no whole character
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space
TEXT_CONTEXT = 16  # so many tokens before a token may its text depend on


class TokenTexts(Protocol):
    """Says what a token adds to a text."""

    def after(self, before: Sequence[int], token_id: int) -> str:
        """The text of `token_id` where the tokens `before` precede it; the last `TEXT_CONTEXT` of them are enough.

        A token decoded by itself, with the space before it, special tokens included. One that ends within a character
        adds "", and what it begins with is added by the next one that does not.
        """
        ...


@dataclass(slots=True)
class DecodedTexts:
    """Decodes when it is asked; see `TokenTexts`."""

    tokenizer: PreTrainedTokenizerBase
    _alone: dict[int, str] = field(default_factory=dict)

    def after(self, before: Sequence[int], token_id: int) -> str:
        pending = self._pending(before)
        text = self._decode([*pending, token_id]) if pending else self._by_itself(token_id)
        return "" if text.endswith(_UNFINISHED) else text

    def _pending(self, before: Sequence[int]) -> list[int]:
        """The last tokens of `before`, as far as they have added nothing yet: they end within a character."""
        first = len(before)
        while first > max(0, len(before) - TEXT_CONTEXT) and self._by_itself(before[first - 1]).endswith(_UNFINISHED):
            first -= 1
        if first == 0 and len(before) >= TEXT_CONTEXT:  # it may begin within a character
            while first < len(before) and self._by_itself(before[first]).startswith(_UNFINISHED):
                if not self._decode(list(before[first : first + 4])).startswith(_UNFINISHED):
                    break
                first += 1
        pending: list[int] = []
        for token_id in before[first:]:
            pending.append(token_id)
            if not self._decode(pending).endswith(_UNFINISHED):
                pending = []
        return pending

    def _by_itself(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._with_spaces(token_id, self._decode([token_id]))
        return text

    def _with_spaces(self, token_id: int, text: str) -> str:
        """Where the tokenizer marks spaces in its tokens it drops those at the beginning of what it decodes."""
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str) or not piece.startswith(_SPACE_MARK) or text.startswith(_SPACE_MARK):
            return text
        num_spaces = len(piece) - len(piece.lstrip(_SPACE_MARK))
        return " " * num_spaces + text.lstrip(" ")

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids) if token_ids else ""
        assert isinstance(text, str)  # one list of ids, so not a list of texts
        return text


@dataclass(slots=True)
class KnownTexts:
    """Texts that were decoded before, without the tokenizer: what travels to other processes."""

    alone: dict[int, str] = field(default_factory=dict)  # with nothing before
    in_context: dict[tuple[tuple[int, ...], int], str] = field(default_factory=dict)  # where that differs

    def after(self, before: Sequence[int], token_id: int) -> str:
        return self.in_context.get((tuple(before), token_id), self.alone[token_id])

    def learn(self, texts: TokenTexts, before: Sequence[int], token_id: int) -> None:
        """Asks `texts` for what is not known yet."""
        if token_id not in self.alone:
            self.alone[token_id] = texts.after((), token_id)
        text = texts.after(before, token_id)
        if text != self.alone[token_id]:
            self.in_context[tuple(before), token_id] = text
