"""Groups of samples that the engine works on beside the trainer, or from one step to the next.

                      ┌──────────────── groups that have ended ◄───────────────┐
    trainer: take a batch ─► learn ─► update ─► take …                          │
                   │                    │                                       │
                   ▼ there is room      ▼ between two steps of the engine       │
    sampler: begin groups ─► one step of the engine ─► one step of the engine ──┘

The sampler is a thread of this process, or in synchronous mode whoever takes a batch. `staleness.GroupBook` says which
groups may begin and which make a batch. Group g is the g-th prompt on the walk through the data, with the seed that it
would have in plain synchronous training: whatever the mode, it has the same tokens under the same policy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from rollout.engine.lock import FairLock
from rollout.outputs import RequestOutput
from rollout.prompts import encode_prompt
from rollout.sampling_params import SamplingParams
from rollout_trainers.async_metrics import RunLengths, staleness_metrics
from rollout_trainers.asynchrony_config import AsynchronySection
from rollout_trainers.config import RunConfig
from rollout_trainers.group_state import output_from_plain, output_to_plain
from rollout_trainers.producer import Engine, check_reproducible, derive_seed, samples_of, select_examples
from rollout_trainers.staleness import Group, GroupBook
from rollout_trainers.types import Example, Sample, Task

_SECONDS_TO_END = 60.0  # for the step that the engine is in; the thread does not keep the process alive


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


def check_task(section: AsynchronySection, task: Task) -> None:
    """Raises `ValueError` for a task with an environment, whose episodes cannot be sampled in this way."""
    if section.is_active and task.environment is not None:
        section.refuse(f"left out: task {task.name!r} has an environment, and episodes are sampled in synchronous mode")


class GroupStream:
    """Samples groups for the steps of a run, in the way that the section `asynchrony` says. Close it at the end.

    An error of the sampler is raised by the trainer's next call.
    """

    def __init__(self, engine: StreamEngine, examples: Sequence[Example], config: RunConfig) -> None:
        algorithm, section = config.algorithm, config.asynchrony
        self.engine = engine
        self.config = config
        self.section = section
        self.book = GroupBook(
            algorithm.prompts_per_step,
            section.staleness_bound,
            section.num_spare(algorithm.prompts_per_step),
            config.steps,
        )
        self.lengths = RunLengths()
        self._adapter = config.policy.sent_adapter
        self._examples = examples
        self._tokenizer = engine.get_tokenizer()
        self._running: dict[int, str] = {}  # the engine's ids of those that it has, by number
        self._numbers: dict[str, int] = {}  # their numbers, by the ids that their outputs will have
        self._ended: dict[int, RequestOutput] = {}  # by number
        self._restored: dict[int, RequestOutput] = {}  # a checkpoint's unfinished ones
        self._num_wanted = 0  # groups that the present step waits for beside its own
        self._is_spent = False  # the budget of the batch that is being sampled
        self._budget_began = (0.0, 0.0)  # engine's tokens, seconds of the clock
        self._turn = FairLock()  # who has it may run or change the engine
        self._changed = threading.Condition()  # guards all of the above; notified when something has changed
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._idle_since: float | None = None  # the sampler's, while it has nothing to do
        self._trainer_idle = 0.0  # seconds since the last `metrics`, and so are the following
        self._sampler_idle = 0.0
        self._sampling_seconds = 0.0  # where the sampler has no thread of its own
        self._measured_at = time.perf_counter()
        self._taken: list[Group] = []

    def take(self, step: int, count: int, first_place: int = 0) -> list[Sample]:
        """Samples of `count` groups for `step`, group after group, once they have all ended; of fewer where the step's
        budget is spent. Another call for the same step takes more.

        Raises `ValueError` for samples that a trainer could not learn from, as `RolloutProducer` does.
        """
        self._raise_failure()
        is_further = step == self.book.step
        with self._changed:
            self._num_wanted = count if is_further else 0
            self._changed.notify_all()
        if self.section.samples_ahead:
            self._start()
            self._wait(lambda: self._choose(step, count) is not None)
        else:
            if not is_further:
                self._begin_budget()
            started = time.perf_counter()
            while self._choose(step, count) is None:
                self._advance()
            self._sampling_seconds += time.perf_counter() - started
        with self._changed:
            numbers = self._choose(step, count)
            assert numbers is not None
            outputs = [self._ended.pop(number) for number in numbers]
            self._taken += self.book.take(step, numbers)
            self._num_wanted = 0
            if self.section.samples_ahead and not is_further:
                self._begin_budget()
            self._changed.notify_all()
        samples = []
        for place, (number, output) in enumerate(zip(numbers, outputs, strict=True), first_place):
            check_reproducible(output, self.config.sampling.temperature)
            samples += samples_of(self._example(number), place, output)
        self.lengths.learn(samples)
        return samples

    def update(self, version: int, load: Callable[[Any], None]) -> Any:
        """Makes what `load(update)` brings the engine's policy, and returns its receipt. A step ahead it waits for the
        batch that is being sampled."""
        if self._thread is not None and self.section.mode == "one_step_off":
            self._wait(lambda: not self._has_work())
        with self._turn:
            self._raise_failure()
            with self.engine.policy_update(version=version, in_flight=self.section.held_cache_mode) as update:
                load(update)
            with self._changed:
                self.book.version = version
                self._changed.notify_all()
        return update.receipt

    def sleep(self) -> Any:
        """Gives the engine's KV pool back, where nothing is sampled meanwhile; unfinished samples go on afterwards.
        Returns what was released."""
        assert not self.section.samples_ahead, "an engine that samples meanwhile cannot sleep"
        return self.engine.sleep(level=1, mode="recompute")

    def metrics(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """How stale a step's samples were, who has waited for whom since the last call, and what over-sampling does to
        the lengths that are learned from."""
        with self._turn, self._changed:
            waiting = self._waiting_lengths()
            result = staleness_metrics(samples, self._taken, step)
            result |= {
                "async/groups_waiting": len(self._ended),
                "async/groups_in_flight": len(self.book.groups) - len(self._ended),
            }
            if self.section.keeps_groups:
                result |= self.lengths.metrics(waiting)
            if self.section.samples_ahead:
                result |= self._idle_metrics()
            num_sampled = self.lengths.count_new(waiting)
            result["perf/gen_tokens_per_s"] = num_sampled / self._sampling_seconds if num_sampled else 0.0
            self._sampling_seconds, self._taken = 0.0, []
        return result

    def _idle_metrics(self) -> dict[str, float]:
        now = time.perf_counter()
        if self._idle_since is not None:
            self._sampler_idle += now - self._idle_since
            self._idle_since = now
        self._sampling_seconds = max(now - self._measured_at - self._sampler_idle, 1e-9)
        result = {
            "async/idle_seconds/trainer": self._trainer_idle,
            "async/idle_seconds/sampler": self._sampler_idle,
        }
        self._trainer_idle = self._sampler_idle = 0.0
        self._measured_at = now
        return result

    def _waiting_lengths(self) -> list[int]:
        """Of all samples that no batch has taken, as far as they have come. Both locks are held."""
        there = [*self._ended.values(), *self._restored.values()]
        lengths = [len(sample.token_ids) for output in there for sample in output.outputs]
        for each in self.engine.num_output_tokens(list(self._running.values())):
            lengths += each
        return lengths

    def _on_their_way(self) -> dict[int, RequestOutput]:
        """What all groups have by now that no batch has taken, by number. Both locks are held."""
        peeked = zip(self._running, self.engine.peek(list(self._running.values())), strict=True)
        return {**self._ended, **self._restored, **dict(peeked)}

    def state_dict(self) -> dict[str, Any]:
        """All that is on its way, as values that a checkpoint takes: with `load_state_dict` another stream goes on as
        this one does, which is not disturbed."""
        with self._turn, self._changed:
            self._raise_failure()
            outputs = self._on_their_way()
            groups = [
                {**asdict(group), "output": output_to_plain(outputs[group.number])}
                for group in self.book.groups.values()
            ]
            return {
                "step": self.book.step,
                "next_number": self.book.next_number,
                "groups": groups,
                "lengths": self.lengths.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has given, before the first batch is taken."""
        assert not self.book.groups, "a stream that has begun cannot take over another's groups"
        groups = []
        for each in state["groups"]:
            group = Group(each["number"], each["version"], each["begun_for"], each["place"])
            outputs = self._restored if group.place is None else self._ended
            outputs[group.number] = output_from_plain(each["output"])
            groups.append(group)
        self.book.restore(state["step"], state["next_number"], groups)
        self.lengths.load_state_dict(state["lengths"])

    def close(self) -> None:
        """Ends the sampler, and leaves nothing of it in the engine. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)
        if self._running and (self._thread is None or not self._thread.is_alive()):
            self.engine.abort(list(self._numbers))
            self.engine.step(list(self._running.values()))  # takes them away; what has ended needs no step
            self._running, self._numbers = {}, {}

    def _choose(self, step: int, count: int) -> list[int] | None:
        return self.book.choose(step, count, may_be_fewer=self._is_spent)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Waits for the sampler's thread, and raises what it has run into."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._is_closed or until())
            self._trainer_idle += time.perf_counter() - started
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise RuntimeError("the stream of samples is closed")

    def _begin_budget(self) -> None:
        """The sampling of a batch begins."""
        self._is_spent = False
        self._budget_began = (self._num_tokens(), time.perf_counter())

    def _is_budget_spent(self) -> bool:
        tokens, seconds = self._budget_began
        if self.section.step_tokens is not None and self._num_tokens() - tokens >= self.section.step_tokens:
            return True
        return self.section.step_seconds is not None and time.perf_counter() - seconds >= self.section.step_seconds

    def _num_tokens(self) -> float:
        """That the engine has sampled so far; 0 where no budget counts them."""
        return 0.0 if self.section.step_tokens is None else self.engine.get_metrics()["generation_tokens_total"]

    def _start(self) -> None:
        if self._thread is None:
            self._begin_budget()
            self._thread = threading.Thread(target=self._run, name="rollout-sampler", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                with self._turn:
                    self._advance()
        except BaseException as error:  # noqa: BLE001 - whatever it is goes to the trainer
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """False where the stream was closed meanwhile."""
        with self._changed:
            if not self._is_closed and not self._has_work():
                self._idle_since = time.perf_counter()
                self._changed.wait_for(lambda: self._is_closed or self._has_work())
                self._sampler_idle += time.perf_counter() - self._idle_since
                self._idle_since = None
            return not self._is_closed

    def _has_work(self) -> bool:
        """Whether the sampler has something to do; a step ahead only until the next batch is there."""
        if not (self._running or self._restored or self.book.may_begin(self._num_wanted)):
            return False
        if self.section.mode == "in_flight":
            return True
        if self._num_wanted and self._choose(self.book.step, self._num_wanted) is None:
            return True
        return self._choose(self.book.step + 1, self.book.groups_per_step) is None

    def _advance(self) -> None:
        """Begins what may begin, and runs one step of the engine. The sampler's turn."""
        with self._changed:
            restored, self._restored = self._restored, {}
            numbers: list[int] = []
            while self.book.may_begin(self._num_wanted):
                numbers.append(self.book.begin())
        if restored:
            names = [f"group-{number}" for number in restored]
            outputs = [
                replace(each, request_id=name, lora_request=self._adapter)
                for each, name in zip(restored.values(), names, strict=True)
            ]
            ids = self.engine.enqueue_resume(outputs, [self._params(number) for number in restored])
            self._note_running(restored, ids, names)
        if numbers:
            prompts = [encode_prompt(self._example(number).prompt, self._tokenizer).token_ids for number in numbers]
            params = [self._params(number) for number in numbers]
            ids = self.engine.enqueue(prompts, params, lora_request=self._adapter)
            self._note_running(numbers, ids, ids)
        assert self._running, "a batch is waited for, and no group is on its way"
        outputs = self.engine.step(list(self._running.values()))
        is_spent = self._is_budget_spent()
        with self._changed:
            for output in outputs:
                number = self._numbers.pop(output.request_id)
                del self._running[number]
                self._ended[number] = output
                self.book.end(number)
            self._is_spent = is_spent
            self._changed.notify_all()

    def _note_running(self, numbers: Iterable[int], ids: Sequence[str], names: Sequence[str]) -> None:
        with self._changed:
            self._running.update(zip(numbers, ids, strict=True))
            self._numbers.update(zip(names, numbers, strict=True))

    def _example(self, number: int) -> Example:
        return select_examples(self._examples, number + 1, 1, self.config.seed)[0]

    def _params(self, number: int) -> SamplingParams:
        step, place = divmod(number, self.book.groups_per_step)
        return SamplingParams(
            n=self.config.algorithm.group_size,
            temperature=self.config.sampling.temperature,
            max_tokens=self.config.sampling.max_tokens,
            seed=derive_seed(self.config.seed, "rollout", step + 1, place),
        )
