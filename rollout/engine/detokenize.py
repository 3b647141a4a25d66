"""From tokens to text: stop strings while a sample grows, its text when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rollout.sampling_params import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class StopStringMatch:
    """A stop string and where it begins in the generated text."""

    stop: str
    start: int


class IncrementalText:
    """The text of one sample as it grows, for the search for stop strings.

    A token's text depends on the tokens before it (spaces, bytes of one character), so a few of them are decoded
    together with the new ones and the part that was known is cut off. Bytes of an unfinished character are held back
    until the character is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._context_start = 0  # tokens from here are decoded to know the spacing
        self._read_end = 0  # tokens up to here are in `text`
        self.text = ""

    def append(self, token_ids: list[int]) -> str:
        """Adds tokens; returns the text that became certain."""
        self._token_ids += token_ids
        known = self._decode(self._context_start, self._read_end)
        full = self._decode(self._context_start, len(self._token_ids))
        if full.endswith(_REPLACEMENT) or len(full) <= len(known):
            return ""
        self._context_start, self._read_end = self._read_end, len(self._token_ids)
        new = full[len(known) :]
        self.text += new
        return new

    def _decode(self, start: int, end: int) -> str:
        return _text(self._tokenizer, self._token_ids[start:end], self._skip_special_tokens)


class StopStringChecker:
    """Finds the leftmost stop string in the generated text of one sample; the prompt is never looked at."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self._incremental = IncrementalText(tokenizer, params.skip_special_tokens)
        self._params = params
        self._num_tokens = 0
        self._search_from = 0
        self.match: StopStringMatch | None = None

    def append(self, token_ids: list[int]) -> StopStringMatch | None:
        """Adds one sampled token. A match counts only from `min_tokens` on; text before that is not searched."""
        new = self._incremental.append(token_ids)
        text = self._incremental.text
        if self._num_tokens < self._params.min_tokens:
            self._search_from = len(text) - (
                len(new) if self._num_tokens + len(token_ids) >= self._params.min_tokens else 0
            )
        self._num_tokens += len(token_ids)
        if self._num_tokens < self._params.min_tokens or not new:
            return None
        longest = max(map(len, self._params.stop_strings))
        begin = max(self._search_from, len(text) - len(new) - longest + 1)
        found = [(text.find(stop, begin), -len(stop), stop) for stop in self._params.stop_strings]
        hits = sorted(hit for hit in found if hit[0] >= 0)
        if hits:
            self.match = StopStringMatch(hits[0][2], hits[0][0])
        return self.match

    def final_text(self) -> str:
        """The generated text up to the match, or with it where the parameters say so."""
        assert self.match is not None
        end = self.match.start + (len(self.match.stop) if self._params.include_stop_str_in_output else 0)
        return self._incremental.text[:end]


def decode(tokenizer: PreTrainedTokenizerBase | None, token_ids: list[int], params: SamplingParams) -> str:
    """The whole text of a sample; empty without a tokenizer or with `detokenize=False`."""
    if tokenizer is None or not params.detokenize:
        return ""
    return _text(tokenizer, token_ids, params.skip_special_tokens)


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], skip_special_tokens: bool) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)  # one list of ids, so not a list of texts
    return text
