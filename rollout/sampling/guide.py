"""What a grammar tells before a step about the tokens to come, for those who guess them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.request import Request
from rollout.sampling.grammars import Grammars


@dataclass(frozen=True, slots=True)
class GrammarGuide:
    """Asks the grammars of a worker in this process, between steps: see `rollout.core.speculation.Guide`."""

    grammars: Callable[[], Grammars]

    def next_tokens(self, request: Request) -> list[int]:
        assert request.sample_state is not None
        return self.grammars().next_tokens(request.sample_state, request.params)

    def num_allowed(self, request: Request, draft_token_ids: list[int]) -> int:
        assert request.sample_state is not None
        return self.grammars().num_allowed(request.sample_state, request.params, draft_token_ids)
