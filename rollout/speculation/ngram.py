"""Prompt lookup: what follows is guessed from the last place where the sample's tokens read as they do at their end.

Saxena, "Prompt Lookup Decoding" (2023). Good where the output copies from the prompt, or repeats itself.
"""

from __future__ import annotations


class NgramDrafter:
    """The n-grams of one sample, of `least` to `longest` tokens. A token costs one entry for each length."""

    def __init__(self, least: int, longest: int) -> None:
        self._lengths = range(longest, least - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where the token that followed it last stands
        self._num_seen = 0  # leading tokens of which every one has been entered as a follower

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` guesses of what follows `token_ids`, which has only grown since the last call.

        Where the earlier place is so near that its followers run into the end, the guess goes on with itself: a loop.
        """
        self._catch_up(token_ids)
        count = len(token_ids)
        for length in self._lengths:
            place = self._after.get(tuple(token_ids[count - length :])) if length <= count else None
            if place is not None:
                drafts = token_ids[place : place + most]
                period = count - place
                while len(drafts) < most:
                    drafts.append(drafts[len(drafts) - period])
                return drafts
        return []

    def close(self, token_ids: list[int]) -> None:
        """Nothing more is asked for."""
        self._after.clear()

    def _catch_up(self, token_ids: list[int]) -> None:
        after = self._after
        for place in range(self._num_seen, len(token_ids)):
            for length in self._lengths:
                if length <= place:
                    after[tuple(token_ids[place - length : place])] = place
        self._num_seen = len(token_ids)
