"""Runs many episodes at once: the engine samples the turns of some while the environments of others think.

    caller's thread   ──► enqueue turns ──► step the engine ──► turns that have ended ──┐
                               ▲                                                        ▼
    event loop's thread        └──────── observations ◄──── reset, step, close of each environment

All of an episode is one `rollout.session.Session`, which only ever appends: what was sampled is never tokenised again.
A turn is a pure function of the policy, of the tokens before it and of the episode's seed, so that it does not matter
which episode's answer comes first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from rollout import LLM
from rollout.lora.request import LoRARequest
from rollout.outputs import RequestOutput
from rollout.prompts import Message
from rollout.sampling_params import SamplingParams
from rollout.session import Session
from rollout_trainers.config import EnvironmentSection
from rollout_trainers.environments.environment import Action, Environment, Observation, StepResult
from rollout_trainers.event_loop import EventLoopThread
from rollout_trainers.types import Example

EnvironmentFactory = Callable[[], Environment]


@dataclass(slots=True)
class Episode:
    """How an episode went. `session` is None where it did not begin: making or resetting the environment failed.

    `finish_reason`: "stop" (the environment said that it is done), "length" (a turn was cut off, or there was no room
    for another), "max_turns", "timeout", or "error" (the environment failed). `messages` are those after the first
    observation, where that was messages. `turn_rewards`: one for each turn that the environment answered.
    """

    example: Example
    session: Session | None = None
    environment: Environment | None = None
    outputs: list[RequestOutput] = field(default_factory=list)  # one a turn
    turn_rewards: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    finish_reason: str = ""
    error: str | None = None


def run_episodes(
    llm: LLM,
    examples: Sequence[Example],
    params: Sequence[SamplingParams],
    make_environment: EnvironmentFactory,
    section: EnvironmentSection,
    adapter: LoRARequest | None = None,
) -> list[Episode]:
    """One episode of each example, in order. `params` are those of every turn of it: `max_tokens` is a turn's, and the
    seed stays the same, since the noise is a function of the position too. Turns are sampled with the `adapter`.

    What environments raise, what they return that is no observation or reward, and what takes them too long, ends
    their episodes alone. Where the engine raises, or the run is interrupted, all are given up, and nothing of them is
    left in the engine.
    """
    for each in params:
        if each.n != 1:
            raise ValueError(f"n={each.n} is not valid in an episode: give the example once for each")
    episodes = [Episode(example) for example in examples]
    with EventLoopThread() as loop:
        _Run(llm, make_environment, section, loop, adapter).run(
            [_Running(episode, each) for episode, each in zip(episodes, params, strict=True)]
        )
    return episodes


@dataclass(slots=True, eq=False)
class _Running:
    """An episode and what it waits for: the engine (`request_id`), or its environment (`call`)."""

    episode: Episode
    params: SamplingParams
    request_id: str | None = None
    call: Future[Any] | None = None
    then: Callable[[_Running, Any], None] | None = None  # takes what the environment returned
    call_deadline: float = math.inf
    deadline: float = math.inf  # the episode's
    is_over: bool = False  # only `close` is left

    @property
    def next_deadline(self) -> float:
        return self.call_deadline if self.is_over else min(self.call_deadline, self.deadline)


class _Run:
    def __init__(
        self,
        llm: LLM,
        make_environment: EnvironmentFactory,
        section: EnvironmentSection,
        loop: EventLoopThread,
        adapter: LoRARequest | None,
    ) -> None:
        self._llm = llm
        self._adapter = adapter
        self._make_environment = make_environment
        self._section = section
        self._loop = loop
        self._answers: SimpleQueue[tuple[_Running, Future[Any]]] = SimpleQueue()
        self._active: set[_Running] = set()
        self._sampling: dict[str, _Running] = {}  # by request id

    def run(self, waiting: Sequence[_Running]) -> None:
        """Until all episodes have ended."""
        left = deque(waiting)
        most = self._section.max_concurrent or len(left)
        try:
            while left or self._active:
                while left and len(self._active) < most:
                    self._begin(left.popleft())
                self._take_answers()
                self._end_what_is_late()
                self._sample()
        finally:
            self._give_up()

    def _begin(self, running: _Running) -> None:
        self._active.add(running)
        if self._section.episode_timeout is not None:
            running.deadline = time.monotonic() + self._section.episode_timeout
        self._call(running, self._reset(running.episode), self._start_session)

    async def _reset(self, episode: Episode) -> Observation:
        episode.environment = self._make_environment()
        return await episode.environment.reset(episode.example)

    def _call(
        self, running: _Running, coroutine: Coroutine[Any, Any, Any], then: Callable[[_Running, Any], None]
    ) -> None:
        """Lets the environment run; `then` gets what it returns."""
        limit = self._section.step_timeout
        running.call_deadline = math.inf if limit is None else time.monotonic() + limit
        running.then = then
        running.call = call = self._loop.submit(coroutine)
        call.add_done_callback(lambda future: self._answers.put((running, future)))

    def _take_answers(self) -> None:
        """Handles what environments have returned. Where no turn is being sampled, waits for the first, or until
        something is late."""
        wait = None
        if not self._sampling and self._active:
            first = min(running.next_deadline for running in self._active)
            wait = None if first == math.inf else max(0.0, first - time.monotonic())
        is_waiting = not self._sampling and bool(self._active)
        while True:
            try:
                running, call = self._answers.get(block=is_waiting, timeout=wait if is_waiting else None)
            except Empty:
                return
            is_waiting = False
            if running.call is call:  # else it came too late
                self._answer(running, call)

    def _answer(self, running: _Running, call: Future[Any]) -> None:
        running.call, running.call_deadline = None, math.inf
        error = None
        if call.cancelled():
            error = "it cancelled itself"
        elif (raised := call.exception()) is not None:
            error = f"{type(raised).__name__}: {raised}"
        if running.is_over:
            running.episode.error = running.episode.error or error
            self._active.remove(running)
        elif error is not None:
            self._end(running, "error", error)
        else:
            assert running.then is not None
            running.then(running, call.result())

    def _start_session(self, running: _Running, observation: Any) -> None:
        episode = running.episode
        assert episode.environment is not None
        tools = episode.environment.tools
        try:
            _check_observation(observation, "reset")
            if not observation:
                raise ValueError("reset of the environment returned nothing that the policy could see")
            session = Session(
                self._llm, tools=None if tools is None else list(tools), strict=self._section.strict_template
            )
            _append(session, observation)
        except ValueError as error:  # what the template or the model does not take
            self._end(running, "error", f"ValueError: {error}")
            return
        episode.session = session
        self._enqueue(running)

    def _enqueue(self, running: _Running) -> None:
        """Lets the engine sample the next turn, if there is room for one."""
        session, limit = running.episode.session, self._llm.max_model_len
        assert session is not None
        if len(session.token_ids) >= limit:
            self._end(running, "length")
            return
        (running.request_id,) = self._llm.enqueue([session.token_ids], running.params, lora_request=self._adapter)
        self._sampling[running.request_id] = running

    def _sample(self) -> None:
        """One step of the engine, and what becomes of the turns that have ended with it."""
        if not self._sampling:
            return
        for output in self._llm.step(self._sampling.keys()):
            running = self._sampling.pop(output.request_id)
            running.request_id = None
            self._act(running, output)

    def _act(self, running: _Running, output: RequestOutput) -> None:
        episode, (sample,) = running.episode, output.outputs
        assert episode.session is not None and episode.environment is not None
        episode.session.append_sample(output)
        episode.outputs.append(output)
        if episode.session.is_chat:
            episode.messages.append({"role": "assistant", "content": sample.text})
        if sample.finish_reason not in ("stop", "length"):  # "abort": it was late. "error": the producer refuses it
            self._end(running, "timeout" if sample.finish_reason == "abort" else "error")
            return
        action = Action(sample.text, list(sample.token_ids), sample.finish_reason)
        self._call(running, episode.environment.step(action), self._observe)

    def _observe(self, running: _Running, result: Any) -> None:
        episode, section = running.episode, self._section
        try:
            result = _checked_result(result)
        except ValueError as error:
            self._end(running, "error", f"ValueError: {error}")
            return
        episode.turn_rewards.append(float(result.reward))
        if episode.outputs[-1].outputs[0].finish_reason == "length":
            self._end(running, "length")
        elif result.done:
            self._end(running, "stop")
        elif len(episode.outputs) >= section.max_turns:
            self._end(running, "max_turns")
        else:
            self._show(running, result.observation)

    def _show(self, running: _Running, observation: Observation) -> None:
        session = running.episode.session
        assert session is not None
        try:
            if session.is_chat and isinstance(observation, str):
                observation = [{"role": "user", "content": observation}]
            _append(session, observation)
        except ValueError as error:
            self._end(running, "error", f"ValueError: {error}")
            return
        running.episode.messages += [dict(item) for item in observation if isinstance(item, Mapping)]
        self._enqueue(running)

    def _end_what_is_late(self) -> None:
        now = time.monotonic()
        late = [running for running in self._active if running.next_deadline <= now]
        aborted = [running for running in late if running.request_id is not None]
        if aborted:  # their outputs come with the next step
            self._llm.abort([running.request_id for running in aborted if running.request_id is not None])
            for running in aborted:
                running.deadline = math.inf
        for running in late:
            call, running.call = running.call, None
            if call is None:
                continue
            call.cancel()
            if running.is_over:
                self._active.remove(running)
                continue
            is_call = running.call_deadline <= now
            limit = self._section.step_timeout if is_call else self._section.episode_timeout
            self._end(running, "timeout", f"{'a call' if is_call else 'the episode'} took more than {limit:g} s")

    def _end(self, running: _Running, finish_reason: str, error: str | None = None) -> None:
        episode = running.episode
        episode.finish_reason, episode.error, running.is_over = finish_reason, error, True
        if episode.environment is None:
            self._active.remove(running)
        else:
            self._call(running, episode.environment.close(), _nothing)

    def _give_up(self) -> None:
        """Leaves nothing behind in the engine, where the run was interrupted."""
        if self._sampling:
            self._llm.abort(self._sampling.keys())
            self._llm.step(self._sampling.keys())  # takes them away; what has ended needs no step
        for running in self._active:
            if running.call is not None:
                running.call.cancel()


def _nothing(running: _Running, result: Any) -> None:
    """Takes what `close` returns."""


def _append(session: Session, observation: Observation) -> None:
    if isinstance(observation, str):
        session.add_text(observation)
    elif observation and isinstance(observation[0], int):
        session.add_token_ids([item for item in observation if isinstance(item, int)])
    else:
        session.add([item for item in observation if isinstance(item, Mapping)])


def _check_observation(observation: Any, method: str) -> None:
    kinds: tuple[type, ...] = (Mapping, int)
    is_list = isinstance(observation, (list, tuple)) and any(
        all(isinstance(item, kind) for item in observation) for kind in kinds
    )
    if not is_list and not isinstance(observation, str):
        raise ValueError(
            f"{method} of the environment returned {observation!r}: an observation must be text, a list of messages or "
            "a list of token ids"
        )


def _checked_result(result: Any) -> StepResult:
    if not isinstance(result, tuple) or len(result) not in (1, 2, 3):
        raise ValueError(f"step of the environment returned {result!r}: it must be (observation, reward, done)")
    result = StepResult(*result)
    _check_observation(result.observation, "step")
    if isinstance(result.reward, bool) or not isinstance(result.reward, (int, float)):
        raise ValueError(f"step of the environment returned a reward of {result.reward!r}: it must be a number")
    if not math.isfinite(result.reward):
        raise ValueError(f"step of the environment returned a reward of {result.reward!r}: it must be finite")
    if not isinstance(result.done, bool):
        raise ValueError(f"step of the environment returned done={result.done!r}: it must be True or False")
    return result
