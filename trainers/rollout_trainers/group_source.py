"""What samples the groups of a stream: completions here, episodes in `environments.groups`."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from rollout.outputs import RequestOutput
from rollout.prompts import encode_prompt
from rollout.sampling_params import SamplingParams
from rollout_trainers.config import RunConfig
from rollout_trainers.group_state import output_from_plain, output_to_plain
from rollout_trainers.producer import Engine, check_reproducible, derive_seed, samples_of, select_examples
from rollout_trainers.types import Example, Sample


class StreamEngine(Engine, Protocol):
    """What a stream asks of an engine; `rollout.LLM` is one."""

    def enqueue(self, prompts: Any, sampling_params: Any = None, *, lora_request: Any = None) -> list[str]: ...

    def enqueue_resume(self, outputs: Any, sampling_params: Any) -> list[str]: ...

    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]: ...

    def peek(self, request_ids: Collection[str]) -> list[RequestOutput]: ...

    def num_output_tokens(self, request_ids: Collection[str]) -> list[list[int]]: ...

    def abort(self, request_ids: Any) -> None: ...

    def sleep(self, level: int = 1, mode: Any = "abort") -> Any: ...

    def policy_update(self, version: int, *, in_flight: Any = "abort") -> Any: ...


class Progress(NamedTuple):
    """Groups, by number, that `advance` has brought forward: those whose first token comes from here on, where that is
    not when they were begun, and those that have ended."""

    first_sampled: list[int]
    ended: list[int]


class GroupSource(Protocol):
    """Samples groups, each of which has a number. One thread at a time uses it, but for `is_ready`, and for `take`,
    which another one may call meanwhile.

    `changed` guards what becomes ready by itself, and is notified of it.
    """

    @property
    def changed(self) -> threading.Condition: ...

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something to do now."""
        ...

    @property
    def deadline(self) -> float:
        """When `advance` has something to do at the latest, of `time.monotonic`; may be infinite."""
        ...

    def begin(self, numbers: Sequence[int]) -> None:
        """Begins these groups, or goes on with those that were restored."""
        ...

    def advance(self) -> Progress:
        """One step of the engine, at most."""
        ...

    def rest(self, seconds: float) -> None:
        """`advance` was not called for so long, since nothing was wanted."""
        ...

    def take(self, number: int, place: int) -> list[Sample]:
        """The samples of a group that has ended, as the step's group `place`. Raises `ValueError` for samples that a
        trainer could not learn from."""
        ...

    def lengths(self) -> list[int]:
        """Tokens that each sample has by now, of all groups that were begun or restored and not taken."""
        ...

    def state(self, number: int) -> dict[str, Any] | None:
        """What a group has by now, as values that a checkpoint takes. None: it must be begun anew."""
        ...

    def restore(self, number: int, state: dict[str, Any], has_ended: bool) -> None:
        """Takes a group over as `state` has given it."""
        ...

    def close(self) -> None:
        """Leaves nothing in the engine. May be called twice."""
        ...


def example_of(number: int, examples: Sequence[Example], seed: int) -> Example:
    """The prompt of group `number` on the walk through the data."""
    return select_examples(examples, number + 1, 1, seed)[0]


class CompletionGroups:
    """Groups of completions of one prompt."""

    is_ready = True
    deadline = math.inf

    def __init__(self, engine: StreamEngine, examples: Sequence[Example], config: RunConfig) -> None:
        self.changed = threading.Condition()
        self._engine = engine
        self._examples = examples
        self._config = config
        self._adapter = config.policy.sent_adapter
        self._tokenizer = engine.get_tokenizer()
        self._running: dict[int, str] = {}  # the engine's ids of those that it has, by number
        self._numbers: dict[str, int] = {}  # their numbers, by the ids that their outputs will have
        self._ended: dict[int, RequestOutput] = {}  # by number
        self._restored: dict[int, RequestOutput] = {}  # a checkpoint's unfinished ones

    def begin(self, numbers: Sequence[int]) -> None:
        restored = [number for number in numbers if number in self._restored]
        if restored:
            names = [f"group-{number}" for number in restored]
            outputs = [
                replace(self._restored[number], request_id=name, lora_request=self._adapter)
                for number, name in zip(restored, names, strict=True)
            ]
            ids = self._engine.enqueue_resume(outputs, [self._params(number) for number in restored])
            for number in restored:
                del self._restored[number]
            self._note_running(restored, ids, names)
        fresh = [number for number in numbers if number not in restored]
        if fresh:
            prompts = [encode_prompt(self._example(number).prompt, self._tokenizer).token_ids for number in fresh]
            params = [self._params(number) for number in fresh]
            ids = self._engine.enqueue(prompts, params, lora_request=self._adapter)
            self._note_running(fresh, ids, ids)

    def _note_running(self, numbers: Iterable[int], ids: Sequence[str], names: Sequence[str]) -> None:
        self._running.update(zip(numbers, ids, strict=True))
        self._numbers.update(zip(names, numbers, strict=True))

    def advance(self) -> Progress:
        ended = []
        for output in self._engine.step(list(self._running.values())):
            number = self._numbers.pop(output.request_id)
            del self._running[number]
            self._ended[number] = output
            ended.append(number)
        return Progress([], ended)

    def rest(self, seconds: float) -> None:
        """Completions have no limit of time."""

    def take(self, number: int, place: int) -> list[Sample]:
        output = self._ended.pop(number)
        check_reproducible(output, self._config.sampling.temperature)
        return samples_of(self._example(number), place, output)

    def lengths(self) -> list[int]:
        there = [*self._ended.values(), *self._restored.values()]
        lengths = [len(sample.token_ids) for output in there for sample in output.outputs]
        for each in self._engine.num_output_tokens(list(self._running.values())):
            lengths += each
        return lengths

    def state(self, number: int) -> dict[str, Any]:
        """Also of an unfinished group: its tokens, arrays and versions."""
        known = self._ended.get(number) or self._restored.get(number)
        return output_to_plain(known or self._engine.peek([self._running[number]])[0])

    def restore(self, number: int, state: dict[str, Any], has_ended: bool) -> None:
        outputs = self._ended if has_ended else self._restored
        outputs[number] = output_from_plain(state)

    def close(self) -> None:
        if self._running:
            running, names = list(self._running.values()), list(self._numbers)
            self._running, self._numbers = {}, {}
            self._engine.abort(names)
            self._engine.step(running)  # takes them away; what has ended needs no step

    def _example(self, number: int) -> Example:
        return example_of(number, self._examples, self._config.seed)

    def _params(self, number: int) -> SamplingParams:
        step, place = divmod(number, self._config.algorithm.prompts_per_step)
        return SamplingParams(
            n=self._config.algorithm.group_size,
            temperature=self._config.sampling.temperature,
            max_tokens=self._config.sampling.max_tokens,
            seed=derive_seed(self._config.seed, "rollout", step + 1, place),
        )
