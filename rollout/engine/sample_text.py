"""The text of one sample while it grows: stop strings are looked for, and what is shown is never taken back."""

from __future__ import annotations

from rollout.engine.detokenize import GrowingText
from rollout.sampling_params import SamplingParams


class SampleText:
    """Finds the leftmost stop string in the generated text of one sample; the prompt is never looked at.

    The token that completes a stop string ends the sample. Of several that it completes the leftmost counts, and of
    those that begin there the longest. What the first `min_tokens` tokens complete does not count. `take` gives the
    text out as it grows, except for an end of it that may yet turn out to begin a stop string. Forced tokens before the
    last one end nothing either, but a stop string may begin in their text.
    """

    def __init__(self, growing: GrowingText, params: SamplingParams) -> None:
        self._growing = growing
        self._stops = params.stop_strings
        self._longest = max(map(len, self._stops), default=0)
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = max(params.min_tokens, len(params.forced_token_ids or ()) - 1)
        self.num_tokens = 0  # of the sample, up to the one that completes a stop string
        self._parts: list[str] = []  # the text, before the stop string is cut off
        self._num_characters = 0
        self._tail = ""  # its end, one character less than the longest stop string
        self._end: int | None = None  # where the text ends, once a stop string was found
        self._is_finished = False
        self._waiting = ""  # what `take` has not returned
        self._num_taken = 0
        self.stop: str | None = None

    def append(self, token_ids: list[int]) -> str | None:
        """Adds the tokens that the sample has got, up to the one that completes a stop string, if any does.

        Returns that stop string.
        """
        for token_id in token_ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            self._add(self._growing.append(token_id), is_searched=self.num_tokens > self._min_tokens)
        return self.stop

    def begin(self, token_ids: list[int]) -> None:
        """Adds tokens that the sample had before, which end nothing any more."""
        for token_id in token_ids:
            self.num_tokens += 1
            self._add(self._growing.append(token_id), is_searched=False)

    def finish(self) -> None:
        """The sample has ended. Bytes of an unfinished character become text."""
        if self.stop is None and not self._is_finished:
            self._add(self._growing.finish(), is_searched=False)
        self._is_finished = True

    def take(self) -> str:
        """The text that has become certain since the last call."""
        num_held = 0 if self._is_finished or self.stop is not None else self._num_held()
        cut = len(self._waiting) - num_held
        taken, self._waiting = self._waiting[:cut], self._waiting[cut:]
        self._num_taken += len(taken)
        return taken

    @property
    def shown(self) -> str:
        """All that `take` has returned."""
        return self.text[: self._num_taken]

    @property
    def text(self) -> str:
        """All the text so far, up to the stop string, or with it where the parameters say so."""
        return "".join(self._parts)[: self._end]

    def _add(self, new: str, is_searched: bool) -> None:
        if not new:
            return
        self._parts.append(new)
        self._waiting += new
        self._num_characters += len(new)
        window = self._tail + new
        if self._stops and is_searched:
            self._search(window, len(self._tail))
        self._tail = window[max(0, len(window) - self._longest + 1) :] if self._longest else ""

    def _search(self, window: str, num_known: int) -> None:
        """Looks for stop strings that end in the window after its first `num_known` characters."""
        starts = [(window.find(stop, max(0, num_known - len(stop) + 1)), -len(stop), stop) for stop in self._stops]
        found = min((hit for hit in starts if hit[0] >= 0), default=None)
        if found is None:
            return
        self.stop = found[2]
        end = found[0] + (len(self.stop) if self._includes_stop else 0)
        self._end = self._num_characters - len(window) + end
        self._waiting = self._waiting[: max(0, len(self._waiting) - (len(window) - end))]

    def _num_held(self) -> int:
        """Characters at the end of the text that a stop string could begin with."""
        if self._includes_stop:
            return 0
        waiting = self._waiting
        for length in range(min(len(waiting), self._longest - 1), 0, -1):
            if any(len(stop) > length and stop.startswith(waiting[-length:]) for stop in self._stops):
                return length
        return 0
