"""Whether parameters about text can be met with the model's tokenizer: found out before anything is scheduled."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rollout.sampling.thinking import ReasoningMarks, find_marks
from rollout.sampling.vocabulary import Vocabulary, problem
from rollout.sampling_params import SamplingParams


class TextChecks:
    """What `bad_words` and `thinking_token_budget` need of a tokenizer; looked at when the first request needs it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, reasoning_start: str, reasoning_end: str
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._reasoning = (reasoning_start, reasoning_end)

    def problem(self, params: SamplingParams) -> str | None:
        """Why a request with these parameters cannot be run, in a sentence."""
        if params.bad_words and self._no_bytes is not None:
            return f"bad_words={list(params.bad_words)!r} {self._no_bytes}"
        if params.thinking_token_budget is None:
            return None
        name = f"thinking_token_budget={params.thinking_token_budget}"
        if self._no_bytes is not None:
            return f"{name} {self._no_bytes}"
        if isinstance(self._marks, str):
            return f"{name}: {self._marks}"
        return self._never_closes(params, name, self._marks)

    def _never_closes(self, params: SamplingParams, name: str, marks: ReasoningMarks) -> str | None:
        allowed = params.allowed_token_ids
        missing = [] if allowed is None else [t for t in marks.end_token_ids if t not in allowed]
        if missing:
            return f"{name}: allowed_token_ids does not hold {missing[0]}, which closes a section of reasoning"
        bad = [word for word in params.bad_words or () if word.encode() in marks.end]
        if bad:
            return f"{name}: bad_words holds {bad[0]!r}, which stands in reasoning_end={self._reasoning[1]!r}"
        return None

    @cached_property
    def _no_bytes(self) -> str | None:
        """Why nothing is known of the bytes of tokens."""
        if self._tokenizer is None:
            return "needs a tokenizer, and the model's folder has none"
        why = problem(self._tokenizer)
        return None if why is None else f"is not supported with the model's tokenizer: {why}"

    @cached_property
    def _marks(self) -> ReasoningMarks | str:
        """The marks of a section of reasoning, or why there are none."""
        assert self._tokenizer is not None
        try:
            return find_marks(Vocabulary(self._tokenizer, self._vocab_size), *self._reasoning)
        except ValueError as error:
            return str(error)
