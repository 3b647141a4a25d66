"""Penalties for tokens that a sample has already, on the entries of its row of logits that they change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.sampling_params import SamplingParams

_FIRST_CAPACITY = 64


class TokenCounts:
    """The different tokens of a sample so far, and how often each stands in its output.

    Where the prompt counts (for `repetition_penalty`) its tokens are there too, with a count of their output. Grows
    token by token, so that a draw costs what its own token costs.
    """

    def __init__(self, num_prompt_tokens: int, with_prompt: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._with_prompt = with_prompt
        self._forget()

    def _forget(self) -> None:
        self._num_seen = 0 if self._with_prompt else self._num_prompt_tokens
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._counts = np.empty(_FIRST_CAPACITY, np.float32)

    def before(
        self, token_ids: Sequence[int], position: int, draft_token_ids: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens before `position` (which may also lie before that of the last call) and the guesses that follow
        them, int64 [N], each once, and how often each stands in the output, float32 [N]. Guesses are not remembered."""
        if position < self._num_seen:
            self._forget()
        if self._num_seen < self._num_prompt_tokens:
            self._enter_prompt(token_ids)
        for token_id in token_ids[self._num_seen : position]:
            self._count(token_id)
        self._num_seen = position
        size = len(self._places)
        ids, counts = self._ids[:size].copy(), self._counts[:size].copy()
        return self._with_drafts(ids, counts, draft_token_ids) if draft_token_ids else (ids, counts)

    def _with_drafts(
        self, ids: np.ndarray, counts: np.ndarray, draft_token_ids: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """With guesses counted as tokens of the output. `ids` and `counts` are copies."""
        new: dict[int, int] = {}
        for token_id in draft_token_ids:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] = new.get(token_id, 0) + 1
            else:
                counts[place] += 1
        if not new:
            return ids, counts
        new_ids, new_counts = np.fromiter(new.keys(), np.int64), np.fromiter(new.values(), np.float32)
        return np.concatenate([ids, new_ids]), np.concatenate([counts, new_counts])

    def _enter_prompt(self, token_ids: Sequence[int]) -> None:
        ids = list(dict.fromkeys(token_ids[: self._num_prompt_tokens]))
        self._places = {token_id: place for place, token_id in enumerate(ids)}
        self._ids = np.append(np.array(ids, np.int64), self._ids)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._num_seen = self._num_prompt_tokens

    def _count(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._ids[place], self._counts[place] = token_id, 0
        self._counts[place] += 1


def penalty_arrays(
    counted: Sequence[tuple[int, np.ndarray, np.ndarray, SamplingParams]], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What penalties change in rows of logits that lie one after the other.

    `counted` has, for each row with penalties, its number, its sample's token ids int64 [N], their counts float32 [N],
    and the parameters. Returns the places int64 [E], each once; the factors float32 [E] by which a positive logit is
    divided and another multiplied (`repetition_penalty`); and what is taken away after that, float32 [E]
    (`frequency_penalty` for each time that the token stands in the output, `presence_penalty` once).
    """
    sizes = [len(ids) for _, ids, _, _ in counted]
    starts = np.repeat(np.array([row * vocab_size for row, *_ in counted], np.int64), sizes)
    places = starts + np.concatenate([ids for _, ids, _, _ in counted])
    times = np.concatenate([counts for _, _, counts, _ in counted])
    factors, frequency, presence = (
        np.repeat(np.array(values, np.float32), sizes)
        for values in zip(
            *((p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for *_, p in counted), strict=True
        )
    )
    return places, factors, frequency * times + np.where(times > 0, presence, np.float32(0))
