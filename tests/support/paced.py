"""An engine whose steps wait for a test's word, so that a test decides where in a sample a policy update falls."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from rollout import LLM, RequestOutput

_LIMIT = 60.0  # seconds; nothing here waits so long unless something is broken
_MOMENT = 0.02  # seconds that a step which may not run holds up who asks for it, and whoever waits for him


class PacedLLM(LLM):
    """Steps run freely until `shut`, and stop by themselves whenever some group has ended, where `stops_at_ends`. A
    step that may not run does nothing."""

    _state = threading.Condition()  # each instance gets its own before the first step
    num_allowed: float = float("inf")
    stops_at_ends = False
    fails_with: BaseException | None = None
    _shut_since: float | None = None

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._state = threading.Condition()

    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        with self._state:
            if not self._state.wait_for(lambda: self.num_allowed > 0, _MOMENT):
                self._shut_since = self._shut_since or time.monotonic()
                assert time.monotonic() - self._shut_since < _LIMIT, "the test has shut the engine"
                return []
            self._shut_since = None
            if self.fails_with is not None:
                raise self.fails_with
            self.num_allowed -= 1
        outputs = super().step(request_ids)
        with self._state:
            if outputs and self.stops_at_ends:
                self.num_allowed = 0
            self._state.notify_all()
        return outputs

    def allow(self, count: float) -> None:
        """Lets `count` more steps run, and no others."""
        with self._state:
            self.num_allowed = count
            self._state.notify_all()

    def allow_and_wait(self, count: int) -> None:
        """Returns once they have run, or begun."""
        with self._state:
            self.num_allowed = count
            self._state.notify_all()
            assert self._state.wait_for(lambda: self.num_allowed == 0, _LIMIT)

    def open(self) -> None:
        self.stops_at_ends = False
        self.allow(float("inf"))
