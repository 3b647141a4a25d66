"""What the sampler knows of one sample's tokens. It imports no torch: the scheduler hands it on with each draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.sampling.adjust import Tables
    from rollout.sampling.bad_words import Tail
    from rollout.sampling.penalties import TokenCounts
    from rollout.sampling.thinking import ThinkingBudget


@dataclass(slots=True, eq=False)
class SampleState:
    """The tokens of one sample, and what was derived from them.

    `token_ids` is the request's own list, prompt and output, and grows with it. Whatever is derived (token counts, a
    grammar's position) is a function of a leading part of that list and catches up with it before a draw: so it is
    the same after a preemption, and a fork begins with nothing and catches up too. The worker that samples makes it.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    eos_token_ids: frozenset[int] = frozenset()  # the request's
    stop_token_ids: frozenset[int] = frozenset()
    tables: Tables | None = None  # what the parameters say, made once
    counts: TokenCounts | None = None  # for penalties
    tail: Tail | None = None  # for bad words
    thinking: ThinkingBudget | None = None
    grammar: Any = None  # the position in a grammar, made by the worker that samples; see `rollout.sampling.grammars`
