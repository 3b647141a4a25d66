"""The text of single tokens, for those who look at logprobs token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no whole character
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign for a space
_MOST_BYTES = 4  # of a character in UTF-8, so that so many tokens may make one


class TokenTexts(Protocol):
    """Says what a token adds to a text."""

    def after(self, before: Sequence[int], token_id: int) -> str:
        """The text of `token_id` where the tokens `before` precede it; the last four of them are enough.

        A token decoded by itself, with the space before it, special tokens included. One that ends within a character
        adds "", and the one that ends the character adds the whole of it.
        """
        ...


@dataclass(slots=True)
class DecodedTexts:
    """Decodes when it is asked; see `TokenTexts`."""

    tokenizer: PreTrainedTokenizerBase
    _alone: dict[int, str] = field(default_factory=dict)

    def after(self, before: Sequence[int], token_id: int) -> str:
        text = self._by_itself(token_id)
        if not text.endswith(_UNFINISHED):
            return text
        for count in range(1, min(len(before), _MOST_BYTES) + 1):
            context = list(before[-count:])
            whole = self._decode([*context, token_id])
            if whole.endswith(_UNFINISHED):
                continue
            while context and self._by_itself(context[-1]).endswith(_UNFINISHED):
                context.pop()  # it has added nothing yet
            return whole[len(self._decode(context)) :]
        return ""

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

    texts: dict[tuple[tuple[int, ...], int], str] = field(default_factory=dict)  # by the tokens before, and the token
    alone: dict[int, str] = field(default_factory=dict)  # of the tokens whose text does not depend on those before

    def after(self, before: Sequence[int], token_id: int) -> str:
        text = self.alone.get(token_id)
        return self.texts[tuple(before), token_id] if text is None else text

    def learn(self, texts: TokenTexts, before: Sequence[int], token_id: int) -> None:
        """Asks `texts` for what is not known yet."""
        if token_id in self.alone:
            return
        text = texts.after((), token_id)
        if text:
            self.alone[token_id] = text
        else:
            self.texts[tuple(before), token_id] = texts.after(before, token_id)
