"""Logprobs of samples and prompts: compact arrays, and dictionaries as vLLM has them, made when they are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np

from rollout.core.logprob_columns import LogprobColumns
from rollout.core.schedule import TopLogprobs
from rollout.engine.token_texts import TEXT_CONTEXT, KnownTexts, TokenTexts

EntryT = TypeVar("EntryT", bound="dict[int, Logprob] | None")


@dataclass(frozen=True, slots=True)
class Logprob:
    """vLLM's entry of a logprob dictionary.

    `rank` of the token that stands at the position is 1 + the number of tokens with a larger logit; of the others it is
    their place among the most likely ones (equal logits by their ids), and None for tokens of `logprob_token_ids` that
    are not among those. `decoded_token` is what the token would add to the text: "" where it ends within a character,
    the whole character where it ends one; None without a tokenizer, and with `detokenize=False`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Logprobs(Sequence[EntryT], Generic[EntryT]):
    """A sequence of {token id: Logprob} with one entry a token; the entries are made when they are asked for.

    Each has the token that stands there first, then the most likely ones, then those of `logprob_token_ids`, each once.
    It equals, and can be used like, the list of its entries. Of a prompt, entry 0 is None: nothing precedes that token.

    The arrays behind it, in order of the tokens that have a logprob (without a prompt's first):
    `logprobs` float32 [T], `token_ranks` int32 [T], `top_token_ids` int32 [T, k], `top_logprobs` float32 [T, k],
    `chosen_logprobs` float32 [T, m] of the m ids in `chosen_token_ids`.
    """

    __slots__ = ("_context", "_is_prompt", "_texts", "_token_ids", "_top", "chosen_token_ids", "logprobs")

    def __init__(
        self,
        token_ids: Sequence[int],
        logprobs: np.ndarray,
        top: TopLogprobs,
        *,
        chosen_token_ids: Sequence[int] = (),
        texts: TokenTexts | None = None,
        before: Sequence[int] = (),
        is_prompt: bool = False,
    ) -> None:
        assert len(logprobs) == len(top.ranks) == max(0, len(token_ids) - is_prompt)
        self.logprobs = logprobs
        self.chosen_token_ids = tuple(chosen_token_ids)
        self._token_ids = token_ids
        self._top = top
        self._texts = texts
        self._context = before
        self._is_prompt = is_prompt

    @property
    def token_ranks(self) -> np.ndarray:
        return self._top.ranks

    @property
    def top_token_ids(self) -> np.ndarray:
        return self._top.token_ids

    @property
    def top_logprobs(self) -> np.ndarray:
        return self._top.logprobs

    @property
    def chosen_logprobs(self) -> np.ndarray:
        return self._top.chosen

    def columns(self) -> LogprobColumns:
        """The arrays, for a sample that goes on from here."""
        columns = LogprobColumns(self._top.num_top, self._top.num_chosen)
        columns.append(self._top)
        return columns

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> EntryT: ...

    @overload
    def __getitem__(self, index: slice) -> list[EntryT]: ...

    def __getitem__(self, index: int | slice) -> EntryT | list[EntryT]:
        places = range(len(self._token_ids))[index]
        return [self._entry(place) for place in places] if isinstance(places, range) else self._entry(places)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the tokenizer, which is large: with the texts of the tokens that occur."""
        return _restored, (
            self._token_ids,
            self.logprobs,
            self._top,
            self.chosen_token_ids,
            self._known_texts(),
            self._context,
            self._is_prompt,
        )

    def _entry(self, place: int) -> EntryT:
        row = place - self._is_prompt
        if row < 0:
            return cast("EntryT", None)
        entry: dict[int, Logprob] = {}
        here = self._token_ids[place]
        self._put(entry, place, here, float(self.logprobs[row]), int(self._top.ranks[row]))
        ids, logprobs = self._top.token_ids[row].tolist(), self._top.logprobs[row].tolist()
        for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
            self._put(entry, place, token_id, logprob, rank)
        for token_id, logprob in zip(self.chosen_token_ids, self._top.chosen[row].tolist(), strict=True):
            self._put(entry, place, token_id, logprob, None)
        return cast("EntryT", entry)

    def _put(self, entry: dict[int, Logprob], place: int, token_id: int, logprob: float, rank: int | None) -> None:
        if token_id not in entry:
            text = None if self._texts is None else self._texts.after(self._before(place), token_id)
            entry[token_id] = Logprob(logprob, rank, text)

    def _before(self, place: int) -> Sequence[int]:
        here = self._token_ids[max(0, place - TEXT_CONTEXT) : place]
        return here if place >= TEXT_CONTEXT else [*self._context[place - TEXT_CONTEXT :], *here]

    def _known_texts(self) -> KnownTexts | None:
        if self._texts is None or isinstance(self._texts, KnownTexts):
            return self._texts
        known = KnownTexts()
        for place in range(self._is_prompt, len(self._token_ids)):
            row = place - self._is_prompt
            for token_id in (self._token_ids[place], *self._top.token_ids[row].tolist(), *self.chosen_token_ids):
                known.learn(self._texts, self._before(place), token_id)
        return known


def _restored(
    token_ids: Sequence[int],
    logprobs: np.ndarray,
    top: TopLogprobs,
    chosen_token_ids: tuple[int, ...],
    texts: KnownTexts | None,
    before: Sequence[int],
    is_prompt: bool,
) -> Logprobs[Any]:
    options: dict[str, Any] = {"texts": texts, "before": before, "is_prompt": is_prompt}
    return Logprobs(token_ids, logprobs, top, chosen_token_ids=chosen_token_ids, **options)


SampleLogprobs = Logprobs[dict[int, Logprob]]
PromptLogprobs = Logprobs["dict[int, Logprob] | None"]
