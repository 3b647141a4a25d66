"""A limit on the tokens of reasoning: once it is used up, the section is closed by force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class ThinkingBudget:
    """Where one sample stands: whether a section of reasoning is open, and how many tokens were sampled in sections.

    Marks are found in the bytes of the tokens, however those spell them. The prompt may open a section, as chat
    templates do; only sampled tokens are counted, those of the closing mark too, over all sections of the sample.
    """

    def __init__(self, marks: ReasoningMarks, num_prompt_tokens: int) -> None:
        self._marks = marks
        self._num_prompt_tokens = num_prompt_tokens
        self._longest = max(len(marks.start), len(marks.end))
        self._forget()

    def _forget(self) -> None:
        self._num_seen = 0
        self._tail = b""  # what was written since the last mark, as much as could begin one
        self._is_open = False
        self._num_spent = 0

    def token_to_force(self, token_ids: Sequence[int], position: int, budget: int) -> int | None:
        """The token that must stand at `position` to close a section whose budget is used up; None where none must."""
        if position < self._num_seen:
            self._forget()
        tokens = self._marks.tokens
        if self._num_seen < self._num_prompt_tokens:
            self._write(b"".join(tokens[token_id] for token_id in token_ids[: self._num_prompt_tokens]))
            self._num_seen = self._num_prompt_tokens
        for token_id in token_ids[self._num_seen : position]:
            self._num_spent += self._is_open
            self._write(tokens[token_id])
        self._num_seen = position
        if not self._is_open or self._num_spent < budget:
            return None
        return self._marks.end_token_ids[self._num_closing(token_ids[self._num_prompt_tokens : position])]

    def _write(self, text: bytes) -> None:
        tail = self._tail + text
        while True:
            mark = self._marks.end if self._is_open else self._marks.start
            found = tail.find(mark)
            if found < 0:
                break
            tail = tail[found + len(mark) :]
            self._is_open = not self._is_open
        self._tail = tail[-self._longest :]

    def _num_closing(self, output: Sequence[int]) -> int:
        """How many tokens of the closing mark stand already at the end of the output."""
        closing = self._marks.end_token_ids
        for count in range(min(len(closing) - 1, len(output)), 0, -1):
            if tuple(output[-count:]) == closing[:count]:
                return count
        return 0
