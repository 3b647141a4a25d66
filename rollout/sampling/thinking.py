"""A limit on the tokens of reasoning: once it is used up, the section is closed by force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.sampling.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts that open and close a section of reasoning, and the tokens that close it by force."""

    start: bytes
    end: bytes
    end_token_ids: tuple[int, ...]
    tokens: list[bytes]  # what each token of the vocabulary writes, special ones too


def find_marks(vocabulary: Vocabulary, start: str, end: str) -> ReasoningMarks:
    """The marks of a vocabulary's tokens. Raises `ValueError` where no tokens write `end`."""
    ids = vocabulary.tokenizer.encode(end, add_special_tokens=False)
    text = b"".join(vocabulary.written[token_id] for token_id in ids if token_id < vocabulary.vocab_size)
    if end.encode() not in text or max(ids) >= vocabulary.vocab_size:
        raise ValueError(f"reasoning_end={end!r} cannot be written with the tokens of the model's vocabulary")
    return ReasoningMarks(start.encode(), end.encode(), tuple(ids), vocabulary.written)


@dataclass(slots=True)
class _Reading:
    """What the tokens of a sample have told so far."""

    tail: bytes = b""  # what was written since the last mark, as much as could begin one
    is_open: bool = False
    num_spent: int = 0  # tokens sampled in sections


class ThinkingBudget:
    """Where one sample stands: whether a section of reasoning is open, and how many tokens were sampled in sections.

    Marks are found in the bytes of the tokens, however those spell them. The prompt may open a section, as chat
    templates do; only sampled tokens are counted, those of the closing mark too, over all sections of the sample.
    """

    def __init__(self, marks: ReasoningMarks, num_prompt_tokens: int) -> None:
        self._marks = marks
        self._num_prompt_tokens = num_prompt_tokens
        self._longest = max(len(marks.start), len(marks.end))
        self._num_seen = 0
        self._reading = _Reading()

    def token_to_force(
        self, token_ids: Sequence[int], position: int, budget: int, draft_token_ids: Sequence[int] = ()
    ) -> int | None:
        """The token that must come behind those before `position`, and the guesses that follow them, to close a section
        whose budget is used up; None where none must. Guesses are not remembered."""
        if position < self._num_seen:
            self._num_seen, self._reading = 0, _Reading()
        if self._num_seen < self._num_prompt_tokens:
            prompt = token_ids[: self._num_prompt_tokens]
            self._write(self._reading, b"".join(self._marks.tokens[token_id] for token_id in prompt))
            self._num_seen = self._num_prompt_tokens
        self._read(self._reading, token_ids[self._num_seen : position])
        self._num_seen = position
        reading = self._reading
        if draft_token_ids:
            reading = replace(reading)
            self._read(reading, draft_token_ids)
        if not reading.is_open or reading.num_spent < budget:
            return None
        closing = self._marks.end_token_ids
        start = max(self._num_prompt_tokens, position - len(closing))
        return closing[self._num_closing([*token_ids[start:position], *draft_token_ids])]

    def _read(self, reading: _Reading, sampled: Sequence[int]) -> None:
        for token_id in sampled:
            reading.num_spent += reading.is_open
            self._write(reading, self._marks.tokens[token_id])

    def _write(self, reading: _Reading, text: bytes) -> None:
        tail = reading.tail + text
        while True:
            mark = self._marks.end if reading.is_open else self._marks.start
            found = tail.find(mark)
            if found < 0:
                break
            tail = tail[found + len(mark) :]
            reading.is_open = not reading.is_open
        reading.tail = tail[-self._longest :]

    def _num_closing(self, output: Sequence[int]) -> int:
        """How many tokens of the closing mark stand already at the end of the output."""
        closing = self._marks.end_token_ids
        for count in range(min(len(closing) - 1, len(output)), 0, -1):
            if tuple(output[-count:]) == closing[:count]:
                return count
        return 0
