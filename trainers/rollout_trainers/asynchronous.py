"""Groups of samples that the engine works on beside the trainer, or from one step to the next.

                      ┌──────────────── groups that have ended ◄───────────────┐
    trainer: take a batch ─► learn ─► update ─► take …                          │
                   │                    │                                       │
                   ▼ there is room      ▼ between two steps of the engine       │
    sampler: begin groups ─► one step of the engine ─► one step of the engine ──┘

The sampler is a thread of this process, or in synchronous mode whoever takes a batch. `staleness.GroupBook` says which
groups may begin and which make a batch, and a `GroupSource` what they are: completions, or episodes in an environment.
Group g is the g-th prompt on the walk through the data, with the seed that it would have in plain synchronous training:
whatever the mode, it has the same tokens under the same policy.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rollout.engine.lock import FairLock
from rollout_trainers.async_metrics import RunLengths, StreamReport, staleness_metrics
from rollout_trainers.config import RunConfig
from rollout_trainers.environments.producer import check_environments, have_failed
from rollout_trainers.event_loop import seconds_until
from rollout_trainers.group_source import CompletionGroups, GroupSource, StreamEngine
from rollout_trainers.ranks import Ranks
from rollout_trainers.staleness import Group, GroupBook
from rollout_trainers.types import Example, Sample

_SECONDS_TO_END = 60.0  # for the step that the engine is in; the thread does not keep the process alive


class GroupStream:
    """Samples groups for the steps of a run, in the way that the section `asynchrony` says. Close it at the end.

    They come from `source`, by default completions of `examples`. With several `ranks` each has a stream with its share
    of every step's groups. An error of the sampler is raised by the trainer's next call.
    """

    def __init__(
        self,
        engine: StreamEngine,
        examples: Sequence[Example],
        config: RunConfig,
        source: GroupSource | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        algorithm, section = config.algorithm, config.asynchrony
        self.ranks = ranks or Ranks()
        share = self.ranks.part(algorithm.prompts_per_step)
        self.engine = engine
        self.config = config
        self.section = section
        self.book = GroupBook(
            len(share),
            section.staleness_bound,
            section.num_spare(len(share)),
            config.steps,
            share.start,
            algorithm.prompts_per_step,
        )
        self.lengths = RunLengths()
        self._source = source or CompletionGroups(engine, examples, config)
        self._to_begin: list[int] = []  # a checkpoint's unfinished groups
        self._num_wanted = 0  # groups that the present step waits for beside its own
        self._is_spent = False  # the budget of the batch that is being sampled
        self._budget_tokens, self._budget_ends = 0.0, math.inf  # engine's tokens so far; `time.monotonic`
        self._turn = FairLock()  # who has it may run or change the engine
        self._changed = self._source.changed  # guards all of the above; notified when something has changed
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._idle_since: float | None = None  # the sampler's, while it has nothing to do
        self._trainer_idle = 0.0  # seconds since the last `metrics`, and so are the following
        self._sampler_idle = 0.0
        self._sampling_seconds = 0.0  # where the sampler has no thread of its own
        self._measured_at = time.perf_counter()
        self._rests_since: float | None = None  # `time.monotonic`, where nothing is to be sampled
        self._taken: list[Group] = []
        self._failed: list[Sample] = []  # of the groups that were taken last, if all their environments had failed

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
                with self._changed:
                    assert self._has_work(), "a batch is waited for, and no group is on its way"
                    self._wait_to_advance()
                self._advance()
            self._begin_rest()
            self._sampling_seconds += time.perf_counter() - started
        with self._changed:
            numbers = self._choose(step, count)
            assert numbers is not None
            self._taken += self.book.take(step, numbers)
            self._num_wanted = 0
            if self.section.samples_ahead and not is_further:
                self._begin_budget()
            self._changed.notify_all()
        groups = [self._source.take(number, place) for place, number in enumerate(numbers, first_place)]
        self._check_environments(groups)
        samples = [sample for group in groups for sample in group]
        self.lengths.learn(samples)
        return samples

    def _check_environments(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Raises `ValueError` once all environments have failed of as many groups, one after the other, as a step has:
        a step that takes fewer may meet with one that cannot work."""
        for group in groups:
            self._failed = [*self._failed, *group] if have_failed(group) else []
        algorithm = self.config.algorithm
        if len(self._failed) >= algorithm.prompts_per_step * algorithm.group_size:
            check_environments(self._failed)

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
        the lengths that are learned from: over all ranks (`samples` are theirs), but for the times, which are this
        one's. All ranks call it."""
        with self._turn, self._changed:
            waiting = self._source.lengths()
            own = StreamReport(
                taken=self._taken,
                num_waiting=len(self.book.groups) - self.book.num_unfinished,
                num_unfinished=self.book.num_unfinished,
                waiting_lengths=waiting,
                num_sampled=self.lengths.count_new(waiting),
                lengths=self.lengths,
            )
            idle = self._idle_metrics() if self.section.samples_ahead else {}
            seconds, self._sampling_seconds, self._taken = self._sampling_seconds, 0.0, []
        report = StreamReport.of_all(self.ranks.gather(own))
        result = staleness_metrics(samples, report.taken, step) | idle
        result |= {"async/groups_waiting": report.num_waiting, "async/groups_in_flight": report.num_unfinished}
        if self.section.keeps_groups:
            result |= report.lengths.metrics(report.waiting_lengths)
        result["perf/gen_tokens_per_s"] = report.num_sampled / seconds if report.num_sampled else 0.0
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

    def state_dict(self) -> dict[str, Any]:
        """All that is on its way, as values that a checkpoint takes: with `load_state_dict` another stream goes on as
        this one does, which is not disturbed."""
        with self._turn, self._changed:
            self._raise_failure()
            return {
                "step": self.book.step,
                "next_number": self.book.num_begun,
                "groups": [self._state_of(group) for group in self.book.groups.values()],
                "lengths": self.lengths.state_dict(),
            }

    def _state_of(self, group: Group) -> dict[str, Any]:
        """With nothing but its number and its age where it must be begun anew."""
        kept = self._source.state(group.number)
        return {**asdict(group), "place": None if kept is None else group.place, "output": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has given, before the first batch is taken."""
        assert not self.book.groups, "a stream that has begun cannot take over another's groups"
        groups = [Group(each["number"], each["version"], each["begun_for"], each["place"]) for each in state["groups"]]
        for group, each in zip(groups, state["groups"], strict=True):
            if each["output"] is not None:
                self._source.restore(group.number, each["output"], has_ended=group.place is not None)
        self._to_begin = [group.number for group in groups if group.place is None]
        self.book.restore(state["step"], state["next_number"], groups)
        self.lengths.load_state_dict(state["lengths"])
        self.lengths.forget_lost(self._source.lengths())

    def close(self) -> None:
        """Ends the sampler, and leaves nothing of it in the engine. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)
        if self._thread is None or not self._thread.is_alive():
            self._source.close()

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
        self._budget_tokens = self._num_tokens()
        self._budget_ends = time.monotonic() + (self.section.step_seconds or math.inf)

    def _is_budget_spent(self) -> bool:
        tokens = self.section.step_tokens
        if tokens is not None and self._num_tokens() - self._budget_tokens >= tokens:
            return True
        return time.monotonic() >= self._budget_ends

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
            if not self._is_closed and not self._can_advance():
                self._idle_since = time.perf_counter()
                self._wait_to_advance()
                self._sampler_idle += time.perf_counter() - self._idle_since
                self._idle_since = None
            return not self._is_closed

    def _wait_to_advance(self) -> None:
        """Until there is something to do, or something is late; what there is to wait for may change meanwhile."""
        while not self._is_closed and not self._can_advance():
            if not self._has_work():
                self._begin_rest()
                self._changed.wait()
                continue
            self._end_rest()
            if not self._changed.wait(self._seconds_left()):
                return
        self._end_rest()

    def _begin_rest(self) -> None:
        if self._rests_since is None:
            self._rests_since = time.monotonic()

    def _end_rest(self) -> None:
        if self._rests_since is not None:
            self._source.rest(time.monotonic() - self._rests_since)
            self._rests_since = None

    def _can_advance(self) -> bool:
        """Whether there is something to do for the sampler now, and not only once an environment has answered."""
        may_begin = bool(self._to_begin) or self.book.may_begin(self._num_wanted)
        return self._has_work() and (may_begin or self._source.is_ready)

    def _seconds_left(self) -> float | None:
        """Until something is late, or the batch's time is over (None: never)."""
        deadline = self._source.deadline
        if self.section.step_seconds is not None and not self._is_spent:
            deadline = min(deadline, self._budget_ends)
        return seconds_until(deadline)

    def _has_work(self) -> bool:
        """Whether the sampler has something to do; a step ahead only until the next batch is there."""
        if not (self.book.num_unfinished or self.book.may_begin(self._num_wanted)):
            return False
        if self.section.mode != "one_step_off":
            return True
        if self._num_wanted and self._choose(self.book.step, self._num_wanted) is None:
            return True
        return self._choose(self.book.step + 1, self.book.groups_per_step) is None

    def _advance(self) -> None:
        """Begins what may begin, and runs one step of the engine. The sampler's turn."""
        with self._changed:
            numbers, self._to_begin = self._to_begin, []
            while self.book.may_begin(self._num_wanted):
                numbers.append(self.book.begin())
        if numbers:
            self._source.begin(numbers)
        progress = self._source.advance()
        is_spent = self._is_budget_spent()
        with self._changed:
            for number in progress.first_sampled:
                self.book.note_first_token(number)
            for number in progress.ended:
                self.book.end(number)
            self._is_spent = is_spent
            self._changed.notify_all()
