"""From tokens to text: as a sample grows, and as a whole.

The text of a sample is that of its own tokens, `tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)`, and
no matter of the prompt: where a prompt ends within a character, the sample's first bytes are the rest of that
character, which is none by itself, and come as U+FFFD. A growing text shows whole characters only. Bytes that
can belong to no character are U+FFFD at once; those that a character still could follow from are held back, and are
U+FFFD where the sample ends.

In one case text differs from `tokenizer.decode`: that makes every byte token U+FFFD in a row of them which is not
UTF-8 as a whole. Here, as in SentencePiece itself, the characters of such a row stay, so that none of those which
were shown has to be taken back. With tokenizers of no known kind the text of a whole sample is made as that of a
growing one, so that it is what was shown, and what stop strings were looked for in.
"""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rollout.engine.spelling import Spelling, find_spelling
from rollout.sampling_params import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WINDOW = 16  # tokens that are decoded together at most, for tokenizers without a spelling


class GrowingText(Protocol):
    """The text of one sample, token by token."""

    def append(self, token_id: int) -> str:
        """Adds a token. Returns the characters that became certain."""
        ...

    def finish(self) -> str:
        """The sample has ended. Returns what was held back."""
        ...


class Detokenizer:
    """Makes texts for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._spellings = {skipped: find_spelling(tokenizer, skipped) for skipped in (True, False)}

    def growing(self, params: SamplingParams) -> GrowingText:
        """An empty text, to which the tokens of a sample are added."""
        spelling = self._spellings[params.skip_special_tokens]
        if spelling is None:
            return WindowText(self.tokenizer, params)
        return SpelledText(spelling, params.spaces_between_special_tokens)

    def text(self, token_ids: list[int], params: SamplingParams) -> str:
        """The text of a whole sample; empty with `detokenize=False`."""
        if not params.detokenize:
            return ""
        spelling = self._spellings[params.skip_special_tokens]
        if spelling is None or spelling.first_pieces is not None:
            growing = self.growing(params)
            return "".join([*map(growing.append, token_ids), growing.finish()])
        data = b"".join(map(spelling.pieces.__getitem__, token_ids))
        text, _ = take_characters(data, spelling.bytes_stand_alone, is_end=True)
        for _ in range(spelling.num_stripped):
            text = text.removeprefix(" ")
        return text


class SpelledText:
    """The text of tokens whose bytes are known."""

    def __init__(self, spelling: Spelling, spaces_between_special_tokens: bool = True) -> None:
        self._spelling = spelling
        self._joins_specials = not spaces_between_special_tokens
        self._num_to_strip = spelling.num_stripped
        self._is_at_start = spelling.first_pieces is not None
        self._follows_special = False
        self._pending = b""  # an unfinished character

    def append(self, token_id: int) -> str:
        self._pending += self._piece(token_id)
        text, self._pending = take_characters(self._pending, self._spelling.bytes_stand_alone)
        return self._strip(text)

    def finish(self) -> str:
        text, self._pending = take_characters(self._pending, self._spelling.bytes_stand_alone, is_end=True)
        return self._strip(text)

    def _piece(self, token_id: int) -> bytes:
        spelling = self._spelling
        if spelling.first_pieces is None or spelling.skipped_ids(token_id):
            return spelling.pieces[token_id]
        is_special = token_id in spelling.special_ids
        is_joined = self._joins_specials and self._follows_special and is_special
        pieces = spelling.first_pieces if self._is_at_start or is_joined else spelling.pieces
        self._is_at_start, self._follows_special = False, is_special
        return pieces[token_id]

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != " ":
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def take_characters(data: bytes, bytes_stand_alone: bool, is_end: bool = False) -> tuple[str, bytes]:
    """The characters of `data`, and the bytes at its end that begin another one; at the end of a text there are none.

    Bytes that belong to no character become U+FFFD: one for all those that could have begun the same character (as
    Python and Rust decode), or one for each.
    """
    text = ""
    while data:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode()
            if error.end == len(data) and error.reason == "unexpected end of data" and not is_end:
                return text, data[error.start :]
            text += _REPLACEMENT * (error.end - error.start if bytes_stand_alone else 1)
            data = data[error.end :]
    return text, b""


class WindowText:
    """The text of any tokenizer: a few tokens are decoded with the new one, and what was known is cut off.

    Right where what a token adds depends on the tokens just before it, and no token changes what was shown. Text that
    ends in U+FFFD waits for the tokens that complete the character, up to a limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._window: list[int] = []
        self._num_shown = 0  # tokens of the window whose text is known

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._show(is_end=len(self._window) >= _LONGEST_WINDOW)

    def finish(self) -> str:
        return self._show(is_end=True)

    def _show(self, is_end: bool) -> str:
        known = _decode(self._tokenizer, self._window[: self._num_shown], self._params)
        text = _decode(self._tokenizer, self._window, self._params)
        if not is_end and (text.endswith(_REPLACEMENT) or len(text) <= len(known)):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return text[len(known) :]


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], params: SamplingParams) -> str:
    text = tokenizer.decode(
        token_ids,
        skip_special_tokens=params.skip_special_tokens,
        clean_up_tokenization_spaces=False,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    assert isinstance(text, str)  # one list of ids, so not a list of texts
    return text
