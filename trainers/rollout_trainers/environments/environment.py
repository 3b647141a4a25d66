"""What an environment is: the policy acts, it answers, with a reward, until it says that the episode is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from rollout.prompts import Message
from rollout_trainers.types import Example

# What the policy is shown: messages; token ids; or text, which in an episode that began with messages is a user's.
Observation = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Action:
    """A turn of the policy's: its text without special tokens, the very tokens that were sampled, and why it ended
    ("stop", or "length" where it was cut off, after which the episode ends whatever the environment says)."""

    text: str
    token_ids: list[int]
    finish_reason: str


class StepResult(NamedTuple):
    """What an action brought. `observation` is not shown to the policy where the episode ends here."""

    observation: Observation
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """One episode's world: a fresh one is made for each. Gymnasium's `reset` and `step`, as coroutines.

        class Guess(Environment):
            async def reset(self, example):
                self.number = example.columns["number"]
                return [{"role": "user", "content": "Guess a number from 1 to 9."}]

            async def step(self, action):
                if action.text.strip() == self.number:
                    return StepResult("", reward=1.0, done=True)
                return StepResult("No. Guess again.")

    The coroutines of all episodes run in one event loop, in a thread beside the engine's, and must not block it:
    `event_loop.run_in_thread` runs code that does. An exception ends this episode and no other.
    """

    tools: Sequence[dict[str, Any]] | None = None  # JSON schemas for a chat template that renders tools

    metrics: dict[str, float]  # by name; their means over the step's episodes are logged

    def __new__(cls, *arguments: Any, **named_arguments: Any) -> Self:
        """Makes `metrics` here, so that a class need not call `super().__init__()` for it."""
        environment = super().__new__(cls)
        environment.metrics = {}
        return environment

    async def reset(self, example: Example) -> Observation:
        """Begins the episode. Returns what the policy sees first: by default the example's prompt."""
        return example.prompt

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answers an action."""

    async def close(self) -> None:  # noqa: B027 - many have nothing to give back
        """Called once at the end, however the episode ended."""
