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
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout import LLM
from rollout.lora.request import LoRARequest
from rollout.outputs import RequestOutput
from rollout.prompts import Message
from rollout.sampling_params import SamplingParams
from rollout.session import Session
from rollout_trainers.checks import as_number
from rollout_trainers.config import EnvironmentSection
from rollout_trainers.environments.environment import Action, Environment, Observation, StepResult
from rollout_trainers.event_loop import EventLoopThread, seconds_until
from rollout_trainers.metric_catalog import own_metric
from rollout_trainers.types import Example

EnvironmentFactory = Callable[[], Environment]

_SECONDS_TO_CLOSE = 5.0  # for the environments of episodes that are given up


@dataclass(slots=True, eq=False)
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
    metrics: dict[str, float] = field(default_factory=dict)  # the environment's own, once the episode has ended

    @property
    def num_tokens(self) -> int:
        """Tokens of the policy's, in the turns that have ended."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


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
    their episodes alone. Where the engine raises, or the run is interrupted, all are given up: their environments are
    closed, and nothing of them is left in the engine.
    """
    for each in params:
        if each.n != 1:
            raise ValueError(f"n={each.n} is not valid in an episode: give the example once for each")
    episodes = [Episode(example) for example in examples]
    with closing(EpisodeRunner(llm, make_environment, section, adapter)) as runner:
        for episode, each in zip(episodes, params, strict=True):
            runner.add(episode, each)
        while runner.is_busy:
            runner.wait()
            runner.advance()
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


class EpisodeRunner:
    """Runs episodes, which may be added at any time; close it at the end. One thread at a time may use it, but for
    `is_ready`.

    `changed` guards the environments' answers, and is notified of each: it may be the condition of somebody who waits
    for other things as well.
    """

    def __init__(
        self,
        llm: LLM,
        make_environment: EnvironmentFactory,
        section: EnvironmentSection,
        adapter: LoRARequest | None = None,
        changed: threading.Condition | None = None,
    ) -> None:
        self._llm = llm
        self._adapter = adapter
        self._make_environment = make_environment
        self._section = section
        self._changed = changed or threading.Condition()
        self._stack = ExitStack()  # of the loop, once there is one
        self._loop: EventLoopThread | None = None
        self._waiting: deque[_Running] = deque()
        self._active: set[_Running] = set()
        self._answers: deque[tuple[_Running, Future[Any]]] = deque()
        self._sampling: dict[str, _Running] = {}  # by request id
        self._ended: list[Episode] = []  # since the last `advance`

    def add(self, episode: Episode, params: SamplingParams) -> None:
        """An episode that begins as soon as `max_concurrent` lets it. `params` are those of each turn."""
        self._waiting.append(_Running(episode, params))

    @property
    def is_busy(self) -> bool:
        """Whether some episode has not ended."""
        return bool(self._waiting or self._active)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something to do now, be it only until the next environment answers."""
        return bool(self._sampling or self._answers) or self._may_begin

    @property
    def _may_begin(self) -> bool:
        most = self._section.max_concurrent
        return bool(self._waiting) and (most is None or len(self._active) < most)

    @property
    def deadline(self) -> float:
        """When `advance` has something to do although nobody has answered: something is late then. Of `time.monotonic`;
        infinite where there are no limits."""
        return min((running.next_deadline for running in self._active), default=math.inf)

    def wait(self) -> None:
        """Until `advance` has something to do."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready, seconds_until(self.deadline))

    def advance(self) -> list[Episode]:
        """Hands the environments' answers on, and runs one step of the engine where some turn is being sampled. Never
        waits for an environment. Returns the episodes that have ended."""
        while self._may_begin:
            self._begin(self._waiting.popleft())
        self._take_answers()
        self._end_what_is_late()
        self._sample()
        ended, self._ended = self._ended, []
        return ended

    def rest(self, seconds: float) -> None:
        """Nobody has sampled for so long: that is no episode's fault, and the limit of none counts it."""
        for running in self._active:
            running.deadline += seconds

    def lengths(self) -> list[int]:
        """How many tokens of the policy's each episode has by now that has not ended."""
        turns = self._llm.num_output_tokens(list(self._sampling))
        now = {running: sum(each) for running, each in zip(self._sampling.values(), turns, strict=True)}
        return [running.episode.num_tokens + now.get(running, 0) for running in (*self._waiting, *self._active)]

    def close(self) -> None:
        """Gives up what has not ended: closes its environments, as far as they let themselves be closed in a few
        seconds, and leaves nothing in the engine. May be called twice."""
        with self._stack:
            try:
                self._close_environments()
            finally:
                self._waiting.clear()
                self._active.clear()
                sampling, self._sampling = list(self._sampling), {}
                if sampling:
                    self._llm.abort(sampling)
                    self._llm.step(sampling)  # takes them away; what has ended needs no step

    def _close_environments(self) -> None:
        closing_now: list[Future[Any]] = []
        for running in self._active:
            if running.is_over:
                closing_now += [] if running.call is None else [running.call]
                continue
            if running.call is not None:
                running.call.cancel()
            closing_now.append(self._submit(_close(running.episode)))
        wait(closing_now, _SECONDS_TO_CLOSE)

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            self._loop = self._stack.enter_context(EventLoopThread())
        return self._loop.submit(coroutine)

    def _begin(self, running: _Running) -> None:
        self._active.add(running)
        if self._section.episode_timeout is not None:
            running.deadline = time.monotonic() + self._section.episode_timeout
        self._call(running, self._reset(running.episode), self._start_session)

    async def _reset(self, episode: Episode) -> tuple[Observation, list[dict[str, Any]] | None]:
        """What the environment shows first, and its tools."""
        environment = self._make_environment()
        if not isinstance(environment, Environment):
            raise TypeError(f"the environment is a {type(environment).__name__}: it must be an Environment")
        episode.environment = environment
        observation = await environment.reset(episode.example)
        return observation, None if environment.tools is None else list(environment.tools)

    def _call(
        self, running: _Running, coroutine: Coroutine[Any, Any, Any], then: Callable[[_Running, Any], None]
    ) -> None:
        """Lets the environment run; `then` gets what it returns."""
        limit = self._section.step_timeout
        running.call_deadline = math.inf if limit is None else time.monotonic() + limit
        running.then = then
        running.call = call = self._submit(coroutine)
        call.add_done_callback(lambda future: self._note_answer(running, future))

    def _note_answer(self, running: _Running, call: Future[Any]) -> None:
        with self._changed:
            self._answers.append((running, call))
            self._changed.notify_all()

    def _take_answers(self) -> None:
        """Handles what environments have returned."""
        while self._answers:
            running, call = self._answers.popleft()
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
            self._leave(running)
        elif error is not None:
            self._end(running, "error", error)
        else:
            assert running.then is not None
            running.then(running, call.result())

    def _start_session(self, running: _Running, shown: Any) -> None:
        episode = running.episode
        observation, tools = shown
        try:
            _check_observation(observation, "reset")
            if not observation:
                raise ValueError("reset of the environment returned nothing that the policy could see")
            session = Session(self._llm, tools=tools, strict=self._section.strict_template)
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
                self._leave(running)
                continue
            is_call = running.call_deadline <= now
            limit = self._section.step_timeout if is_call else self._section.episode_timeout
            self._end(running, "timeout", f"{'a call' if is_call else 'the episode'} took more than {limit:g} s")

    def _end(self, running: _Running, finish_reason: str, error: str | None = None) -> None:
        episode = running.episode
        episode.finish_reason, episode.error, running.is_over = finish_reason, error, True
        if episode.environment is None:
            self._leave(running)
        else:
            self._call(running, episode.environment.close(), _nothing)

    def _leave(self, running: _Running) -> None:
        episode = running.episode
        if episode.environment is not None:
            try:
                episode.metrics = _checked_metrics(episode.environment.metrics)
            except ValueError as error:
                episode.finish_reason, episode.error = "error", episode.error or f"ValueError: {error}"
        self._active.remove(running)
        self._ended.append(episode)


async def _close(episode: Episode) -> None:
    if episode.environment is not None:  # it may not have come so far
        await episode.environment.close()


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
    observation, reward, done = StepResult(*result)
    _check_observation(observation, "step")
    number = math.nan if isinstance(reward, (bool, np.bool_)) else as_number(reward)
    if not math.isfinite(number):
        raise ValueError(f"step of the environment returned a reward of {reward!r}: it must be a finite number")
    if not isinstance(done, (bool, np.bool_)):
        raise ValueError(f"step of the environment returned done={done!r}: it must be True or False")
    return StepResult(observation, number, bool(done))


def _checked_metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics of the environment are {metrics!r}: they must be numbers by name")
    return {name: own_metric(name, value) for name, value in metrics.items()}
