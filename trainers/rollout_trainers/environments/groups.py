"""Groups of episodes for a stream: they go on while the trainer learns, and from one step to the next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from rollout import LLM
from rollout.sampling_params import SamplingParams
from rollout_trainers.config import RunConfig
from rollout_trainers.environments.episodes import EnvironmentFactory, Episode, EpisodeRunner
from rollout_trainers.environments.producer import check_episode, episode_params, episode_sample
from rollout_trainers.group_source import Progress, example_of
from rollout_trainers.group_state import episode_from_plain, episode_to_plain
from rollout_trainers.types import Example, Sample


class EpisodeGroups:
    """A `GroupSource` of episodes of one example, each with an environment of its own.

    An episode that a policy update comes across goes on under the new policy: with the turn that is being sampled, and
    with those after it. A checkpoint cannot hold an environment. So what has not ended is begun anew from it, with the
    same seeds; groups that have ended are in it, without their environments, if it `keeps_ended` (else they are begun
    anew as well).
    """

    def __init__(
        self,
        engine: LLM,
        examples: Sequence[Example],
        make_environment: EnvironmentFactory,
        config: RunConfig,
        keeps_ended: bool = True,
    ) -> None:
        self.changed = threading.Condition()
        self._engine = engine
        self._examples = examples
        self._config = config
        self._keeps_ended = keeps_ended
        self._runner = EpisodeRunner(
            engine, make_environment, config.environment, config.policy.sent_adapter, self.changed
        )
        self._running: dict[int, list[Episode]] = {}  # by number
        self._unsampled: set[int] = set()  # numbers of those that have not come to the policy's first turn
        self._numbers: dict[Episode, int] = {}  # of episodes that have not ended
        self._ended: dict[int, list[Sample]] = {}  # by number

    @property
    def is_ready(self) -> bool:
        return self._runner.is_ready

    @property
    def deadline(self) -> float:
        return self._runner.deadline

    def begin(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            example = example_of(number, self._examples, self._config.seed)
            self._running[number] = [Episode(example) for _ in range(self._config.algorithm.group_size)]
            self._unsampled.add(number)
            for member, episode in enumerate(self._running[number]):
                self._numbers[episode] = number
                self._runner.add(episode, self._params(number, member))

    def advance(self) -> Progress:
        """Hands on what environments have answered, and lets the engine take one step. A group's first token comes once
        the first of its environments has been reset."""
        numbers = [self._end(episode) for episode in self._runner.advance()]
        ended = [number for number in numbers if number is not None]
        self._unsampled -= {*ended}
        sampled = [number for number in self._unsampled if self._has_begun(number)]
        self._unsampled -= {*sampled}
        return Progress(sampled, ended)

    def _has_begun(self, number: int) -> bool:
        """Whether the policy has had its first turn in some episode of the group, or is about to."""
        return any(episode.session is not None for episode in self._running[number])

    def _end(self, episode: Episode) -> int | None:
        """An episode has ended. Returns the number of its group where it was the last of it."""
        number = self._numbers.pop(episode)
        check_episode(episode, self._config.sampling.temperature)
        group = self._running[number]
        if any(other in self._numbers for other in group):
            return None
        del self._running[number]
        self._ended[number] = [
            episode_sample(self._engine, each, self._params(number, member).seed, 0)
            for member, each in enumerate(group)
        ]
        return number

    def rest(self, seconds: float) -> None:
        self._runner.rest(seconds)

    def take(self, number: int, place: int) -> list[Sample]:
        samples = self._ended.pop(number)
        for sample in samples:
            sample.group = place
        return samples

    def lengths(self) -> list[int]:
        running = [each for group in self._running.values() for each in group if each not in self._numbers]
        ended = [sample for samples in self._ended.values() for sample in samples]
        return self._runner.lengths() + [each.num_tokens for each in (*running, *ended)]

    def state(self, number: int) -> dict[str, Any] | None:
        samples = self._ended.get(number)
        if samples is None or not self._keeps_ended:
            return None
        return {"episodes": [episode_to_plain(sample) for sample in samples]}

    def restore(self, number: int, state: dict[str, Any], has_ended: bool) -> None:
        assert has_ended, "what has not ended is begun anew"
        example = example_of(number, self._examples, self._config.seed)
        self._ended[number] = [episode_from_plain(each, example) for each in state["episodes"]]

    def close(self) -> None:
        """Closes the environments of what has not ended, too."""
        self._runner.close()

    def _params(self, number: int, member: int) -> SamplingParams:
        step, place = divmod(number, self._config.algorithm.prompts_per_step)
        sampling, seed = self._config.sampling, self._config.seed
        return episode_params(sampling.temperature, sampling.max_tokens, seed, step + 1, place, member)
