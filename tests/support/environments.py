"""Environments for tests, and what their episodes came to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollout import LLM, SamplingParams
from rollout_trainers.config import EnvironmentSection
from rollout_trainers.environments import Action, Environment, Episode, Observation, StepResult, run_episodes
from rollout_trainers.types import Example


class Echo(Environment):
    """Tells the policy how long its turn was, `turns` times, for a tenth of that as a reward."""

    def __init__(self, turns: int = 3, wait: Callable[[int], float] | None = None) -> None:
        super().__init__()
        self.turns = turns
        self.wait = wait
        self.actions: list[Action] = []
        self.is_closed = False

    async def reset(self, example: Example) -> Observation:
        self.number = int(example.columns.get("number", 0))
        return await super().reset(example)

    async def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        if self.wait is not None:
            await asyncio.sleep(self.wait(self.number))
        length = len(action.token_ids)
        self.metrics["length"] = self.metrics.get("length", 0.0) + length
        return StepResult(f"{length} tokens", length / 10, len(self.actions) >= self.turns)

    async def close(self) -> None:
        self.is_closed = True


def ending_params(seed: int, max_tokens: int = 12, **options: object) -> SamplingParams:
    """A bias for EOS, so that turns of a random model end by themselves; trainers use none."""
    return SamplingParams(max_tokens=max_tokens, seed=seed, logit_bias={2: 4.0}, **options)  # type: ignore[arg-type]


def play(
    llm: LLM,
    examples: Sequence[Example],
    make_environment: Callable[[], Environment],
    section: EnvironmentSection | None = None,
    *,
    params: Callable[[int], SamplingParams] = ending_params,
) -> list[Episode]:
    """An episode of each example, with its place as the seed."""
    each = [params(place) for place in range(len(examples))]
    return run_episodes(llm, examples, each, make_environment, section or EnvironmentSection())
