"""The scheduler: requests come, their steps are planned, results change them, requests go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from rollout.core.beam_groups import BeamGroups
from rollout.core.draft_planner import DraftPlanner
from rollout.core.kv_manager import KVManager
from rollout.core.planner import Planner, SchedulerConfig, Step
from rollout.core.request_queue import RequestQueue
from rollout.core.schedule import DraftPlan, SchedulePlan, SchedulerStats, StepResult
from rollout.core.speculation import Speculation
from rollout.core.stop import NOT_A_TOKEN, REPETITION_DETECTED, check_stop, ends_in_repetition
from rollout.request import FinishReason, Request, RequestStatus

__all__ = ["Scheduler", "SchedulerConfig"]

_RUNNING = RequestStatus.RUNNING


class _Draws:
    """The columns of a step's result as plain lists."""

    __slots__ = (
        "completed",
        "entropy",
        "failures",
        "kept_mass",
        "raw_logprobs",
        "sampled_logprobs",
        "token_ids",
        "top_logprobs",
    )

    def __init__(self, result: StepResult) -> None:
        self.token_ids: list[int] = result.token_ids.tolist()
        self.raw_logprobs: list[float] = result.raw_logprobs.tolist()
        self.sampled_logprobs: list[float] = result.sampled_logprobs.tolist()
        self.kept_mass: list[float] = result.kept_mass.tolist()
        self.entropy: list[float] = result.entropy.tolist()
        self.completed = result.completed
        self.top_logprobs = result.top_logprobs  # by the draw, of those that ask for it
        self.failures = result.failures


def check_fits(request: Request, config: SchedulerConfig) -> None:
    """Raises `ValueError`, with the numbers, if the request can never run to its end under these limits."""
    num_prompt, name = request.num_prompt_tokens, f"request {request.request_id!r}"
    limit = config.max_model_len
    if num_prompt == 0:
        raise ValueError(f"{name}: the prompt is empty (0 tokens), it must have at least 1")
    if request.max_tokens < 0:
        raise ValueError(f"{name}: max_tokens={request.max_tokens} is not valid: it must be at least 0")
    if num_prompt + request.max_tokens > limit:
        raise ValueError(
            f"{name}: {num_prompt} prompt tokens and max_tokens={request.max_tokens} make "
            f"{num_prompt + request.max_tokens}, more than max_model_len={limit}"
        )
    num_slots = num_prompt + max(request.max_tokens - 1, 0)  # the last token's KV is never written
    num_blocks = -(-num_slots // config.block_size)
    if num_blocks > config.num_blocks:
        raise ValueError(
            f"{name}: {num_prompt} prompt tokens and max_tokens={request.max_tokens} need {num_blocks} KV blocks "
            f"of {config.block_size} tokens, the pool has {config.num_blocks}"
        )


class Scheduler:
    """Makes the plan of each step and takes its result: `schedule()`, run the plan, `update(plan, result)`, again.

    There is one order of requests (by priority where configured, then arrival) for running and for waiting ones. When
    blocks run out, the last running request in that order gives up its blocks. So the first one is never preempted,
    every request becomes first once, and since `add` refuses what the pool cannot hold, every request ends.
    """

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None) -> None:
        self.config = config
        self.speculation = speculation
        self.kv = KVManager(config.num_blocks, config.block_size, config.enable_prefix_caching, config.num_host_blocks)
        self._requests: dict[str, Request] = {}  # everything unfinished
        self._groups: dict[str, dict[str, Request]] = {}  # group id -> its unfinished requests
        self._running = RequestQueue()
        self._waiting = RequestQueue()  # without the siblings that still wait for their leader's prompt
        self.draft_planner: DraftPlanner | None = None
        if speculation is not None and speculation.has_weights:
            self.draft_planner = DraftPlanner(config, self._running, self._waiting, speculation)
        self._planner = Planner(config, self.kv, self._running, self._waiting, speculation, self.draft_planner)
        self._beams = BeamGroups(self._planner)
        self._in_flight: Step | None = None
        self._num_added = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Everything unfinished that does not run: new, preempted, swapped, parked, and siblings before their fork."""
        return len(self._requests) + self._beams.num_further - len(self._running)

    @property
    def policy_version(self) -> int:
        return self._planner.policy_version

    def running_requests(self) -> list[Request]:
        """The running requests, first to last."""
        return list(self._running)

    def waiting_requests(self) -> list[Request]:
        """The waiting requests, first to last, without siblings that wait for their leader's prompt."""
        return list(self._waiting)

    def parked_requests(self) -> list[Request]:
        """Beams that have drawn, wait for the others of their search, and hold KV; first to last."""
        return list(self._planner.parked)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def unfinished(self) -> list[Request]:
        """Every request that has not ended, in the order of their arrival; of a beam search the one that was added."""
        return list(self._requests.values())

    def begun_beam_searches(self) -> list[Request]:
        """Those that hold what the present policy has computed. They have to end before another may come."""
        return self._beams.begun()

    def add(self, request: Request) -> None:
        """Queues a request and its siblings. Raises `ValueError`, adding none of them, if one can never fit."""
        family = [request, *request.siblings]
        for member in family:
            self.check_fits(member)
        ids = [member.request_id for member in family]
        if len(set(ids)) != len(ids) or not self._requests.keys().isdisjoint(ids):
            raise ValueError(f"request {request.request_id!r}: the id, or a sibling's, is already in use")
        priority = request.priority if self.config.policy == "priority" else 0
        for member in family:
            self._register(member, priority)
        if request.beam_options is not None:
            further = range(self._num_added, self._num_added + request.beam_options.width - 1)
            self._beams.add(request, [(priority, request.arrival, number) for number in further])
            self._num_added += len(further)
        self._waiting.add(request)
        if request.max_tokens == 0:  # nothing is drawn, so nothing would ever fork
            siblings, request.siblings = request.siblings, []
            for sibling in siblings:
                self._waiting.add(sibling)

    def _register(self, request: Request, priority: int) -> None:
        """Takes a request on the books, behind those of the same priority and arrival; it stands in no queue yet."""
        self._requests[request.request_id] = request
        self._groups.setdefault(request.group_id, {})[request.request_id] = request
        request.rank = (priority, request.arrival, self._num_added)
        self._num_added += 1

    def check_fits(self, request: Request) -> None:
        """Raises `ValueError`, with the numbers, if the request can never run to its end. Queues nothing."""
        check_fits(request, self.config)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests by their own or their group's id, with what they have sampled; ids not known are ignored."""
        targets: dict[str, Request] = {}
        for request_id in request_ids:
            if request_id in self._requests:
                targets[request_id] = self._requests[request_id]
            targets.update(self._groups.get(request_id, {}))
        for request in reversed(targets.values()):  # siblings before their leader, which would hand them on
            self.finish(request, FinishReason.ABORT)
        return list(targets.values())

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request wherever it stands; of one that has ended already, only the reason changes."""
        if not request.is_finished:
            if request.beam_options is not None:
                self._beams.close(request, reason)
            elif request.status is _RUNNING:
                self._running.discard(request)
            else:
                self._waiting.discard(request)
        self._retire(request, reason, stop_reason)

    def _retire(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if request.is_finished:
            return
        request.status = RequestStatus.FINISHED
        self.kv.forget(request)
        if self.draft_planner is not None:
            self.draft_planner.forget(request)
        if self.speculation is not None:
            self.speculation.ended(request)
        self._pass_on_siblings(request)
        request.forked_from = None
        del self._requests[request.request_id]
        group = self._groups[request.group_id]
        del group[request.request_id]
        if not group:
            del self._groups[request.group_id]

    def _pass_on_siblings(self, leader: Request) -> None:
        """The first sibling that has not forked waits right behind its leader, and leads the others."""
        if not leader.siblings:
            return
        siblings = [sibling for sibling in leader.siblings if sibling.status is RequestStatus.WAITING]
        leader.siblings = []
        if siblings:
            heir = siblings[0]
            heir.siblings = siblings[1:]
            if heir.scores_prompt and leader.finish_reason is not FinishReason.ERROR:
                heir.share_prompt_logprobs(leader)
            self._waiting.add(heir)

    def plan_drafts(self) -> DraftPlan | None:
        """What a drafter with weights computes before the next step; None where nothing is to be guessed.

        Its guesses go to `take_drafts`, and become drafts of the plan that `schedule` makes next. What other drafters
        guess, `schedule` asks for itself.
        """
        assert self._in_flight is None, "the last plan's result has not been taken"
        return None if self.draft_planner is None else self.draft_planner.plan(self.kv)

    def take_drafts(self, plan: DraftPlan, guesses: Mapping[str, Sequence[int]]) -> None:
        """The drafter has done what the plan says. `guesses`: by request id, as many as the plan asks for, or fewer."""
        assert self.draft_planner is not None, "there is no drafter with weights"
        self.draft_planner.take(plan, guesses)

    def schedule(self) -> SchedulePlan:
        """The plan of the next step; empty only where nothing is unfinished.

        Nothing is planned twice: `update` must take its result, or `preempt_all` drop it, before the next plan.
        """
        assert self._in_flight is None, "the last plan's result has not been taken"
        step = self._planner.plan_step()
        assert step.plan.sequences or not self._requests, "requests wait and nothing can be scheduled"
        self._in_flight = step if step.plan.sequences else None
        return step.plan

    def update(self, plan: SchedulePlan, result: StepResult) -> list[tuple[Request, list[int]]]:
        """Takes a plan's result: tokens and arrays are appended, full blocks published, ended requests freed.

        Returns the requests that got tokens, and those that ended without one (scored, or in error), in plan order;
        then the beam searches that ended.
        What belongs to requests that were aborted since `schedule` is ignored.
        """
        step = self._in_flight
        if step is None and plan.is_empty:
            return []
        assert step is not None, "no plan is in flight"
        assert step.plan is plan, "this result belongs to another plan"
        self._in_flight = None
        self.kv.end_step()
        outputs: list[tuple[Request, list[int]]] = []
        columns = _Draws(result)
        draws = plan.draws
        if result.likely and self.speculation is not None:
            for index in result.likely:
                if not draws[index].draft_token_ids:  # behind guesses: once they are verified
                    self._show_likely(step, result, index)
        num_draws = len(draws)
        first = last = 0  # draws of the sequence
        for index, request in enumerate(step.requests):
            first = last
            while last < num_draws and draws[last].sequence_index == index:
                last += 1
            if request.status is not _RUNNING:
                continue
            sequence = plan.sequences[index]
            if step.drafts and request.request_id in step.drafts:
                self._take_verified(request, step, result, columns, first, outputs)
                continue
            request.num_computed_tokens = sequence.start + len(sequence.token_ids)
            if sequence.target_token_ids and not self._take_scores(request, sequence.start, result):
                self._retire_in_error(request, outputs, why="the logits are not numbers")
                continue
            if NOT_A_TOKEN in columns.token_ids[first:last]:
                self.kv.withdraw(request)
            else:
                self.kv.publish(request)
            if first < last and request.beam_options is not None:
                self._beams.take(request, result, first)
            elif first < last:
                self._take_draws(step.drawers[first:last], columns, first, outputs)
            elif request.max_tokens == 0 and request.num_computed_tokens == request.num_tokens:
                self._retire(request, FinishReason.LENGTH, None)
                outputs.append((request, []))
        running = self._running
        running.items = [request for request in running.items if request.status is _RUNNING]
        if len(self._beams):
            for root, reason in self._beams.settle():
                self.finish(root, reason)
                outputs.append((root, []))
        return outputs

    @staticmethod
    def _take_scores(request: Request, start: int, result: StepResult) -> bool:
        """Appends the scores that are not known yet (after a preemption the first ones are), up to the first that is
        NaN; False if there is one."""
        scores, top = result.prompt_logprobs[request.request_id], request.prompt_top_logprobs
        if top is not None:
            top.append(result.prompt_top_logprobs[request.request_id][len(top) - start :])
        num_known = len(request.prompt_logprobs) - start
        request.prompt_logprobs.extend(scores[num_known:].tolist())
        if not np.isnan(scores).any():
            return True
        first = start + int(np.isnan(scores).argmax())
        del request.prompt_logprobs[first:]
        if top is not None:
            top.truncate(first)
        return False

    def _show_likely(self, step: Step, result: StepResult, index: int) -> None:
        """Tells the drafter of who drew a token what else could have come."""
        assert self.speculation is not None, "drafters learn from likely tokens"
        token_ids, shares = result.likely[index]
        position, token_id = step.plan.draws[index].position, int(result.token_ids[index])
        self.speculation.saw(step.drawers[index], position, token_id, token_ids, shares)

    def _take_verified(
        self,
        request: Request,
        step: Step,
        result: StepResult,
        columns: _Draws,
        first: int,
        outputs: list[tuple[Request, list[int]]],
    ) -> None:
        """Gives a request what it drew, from draw `first` on, up to the first token that is not the draft it has been
        computed with: each as if it came from a step of its own. The KV of the other drafts is given up. Where that
        token is one that was guessed in the draft's place, what was drawn behind it comes too; its KV, which lies
        elsewhere, is computed again by the next step.

        A draw behind drafts that has failed is made again by the next step, which knows the tokens before it: that one
        says whether the request fails, and why.
        """
        assert self.speculation is not None, "there are drafts"
        drafts, alternatives = step.drafts[request.request_id], step.alternatives.get(request.request_id, [])
        new: list[int] = []
        num_accepted = 0
        was_wrong = is_alternative = False
        is_text = bool(self.speculation.text(request))
        request.num_computed_tokens = step.plan.draws[first].position - 1
        for place, draft in enumerate([*drafts, NOT_A_TOKEN]):
            token_id = columns.token_ids[first + place]
            if token_id == NOT_A_TOKEN:
                if not new:
                    self._retire_in_error(request, outputs, new, columns.failures.get(first))
                break
            request.num_computed_tokens += 1
            self.kv.publish(request)
            new.append(self._take_verified_draw(request, step, result, columns, first + place))
            num_accepted += token_id == draft
            was_wrong = draft not in (token_id, NOT_A_TOKEN)
            if request.is_finished:
                break
            if token_id == draft:
                continue
            for guess, behind in alternatives:
                if (guess.place, guess.token_id) == (place, token_id):
                    is_alternative = True
                    if columns.token_ids[behind] != NOT_A_TOKEN:
                        new.append(self._take_verified_draw(request, step, result, columns, behind))
            break
        if new:
            outputs.append((request, new))
        if not request.is_finished:
            self.kv.trim(request)
        self.speculation.verified(request, len(drafts), num_accepted, was_wrong=was_wrong, is_text=is_text)
        if alternatives:
            self.speculation.tried_alternatives(len(alternatives), is_alternative)

    def _take_verified_draw(self, request: Request, step: Step, result: StepResult, columns: _Draws, index: int) -> int:
        """Gives a request the token of a draw, which is returned, and its values."""
        _take_arrays(request, columns, index)
        if index in result.likely and step.plan.draws[index].draft_token_ids:
            self._show_likely(step, result, index)
        token_id = columns.token_ids[index]
        self._take_token(request, token_id)
        if index in columns.completed:
            self._retire(request, FinishReason.STOP, columns.completed[index])
        return token_id

    def _take_draws(
        self, drawers: list[Request], columns: _Draws, first: int, outputs: list[tuple[Request, list[int]]]
    ) -> None:
        """Gives one sequence's draws, from `first` on, to those who drew: its request, and then its forks."""
        leader = drawers[0]
        known: list[int] = []  # forced tokens, of which this step tells no more than the values in the arrays
        if leader.params.forced_token_ids:
            while len(known) < len(drawers) and leader.num_output_tokens < leader.num_known_output_tokens:
                index = first + len(known)
                if columns.token_ids[index] == NOT_A_TOKEN:
                    self._retire_in_error(leader, outputs, known)
                    return
                _take_arrays(leader, columns, index)
                known.append(columns.token_ids[index])
            if len(known) == len(drawers):  # a chunk that ends among the forced tokens
                outputs.append((leader, known))
                return
            drawers, first = drawers[len(known) :], first + len(known)
        if leader.siblings:
            # Forks take their share of the leader's blocks before any of them can end and give its own back.
            for sibling in drawers[1:]:
                if not sibling.is_finished:
                    self._fork(leader, sibling)
            self._pass_on_siblings(leader)
        for index, request in enumerate(drawers, start=first):
            if request.status is not _RUNNING:
                continue
            token_id = columns.token_ids[index]
            new = known if request is leader else _copy_arrays(leader, request)
            if token_id == NOT_A_TOKEN:
                self._retire_in_error(request, outputs, new, columns.failures.get(index))
                continue
            _take_arrays(request, columns, index)
            self._take_token(request, token_id)
            if columns.completed and index in columns.completed:
                self._retire(request, FinishReason.STOP, columns.completed[index])
            outputs.append((request, [*new, token_id] if new else [token_id]))

    def _retire_in_error(
        self,
        request: Request,
        outputs: list[tuple[Request, list[int]]],
        token_ids: list[int] | None = None,
        why: str | None = None,
    ) -> None:
        """Ends a request that cannot go on, after `token_ids`, which this step has told of."""
        self.kv.withdraw(request)
        self._retire(request, FinishReason.ERROR, why)
        outputs.append((request, token_ids or []))

    def _take_token(self, request: Request, token_id: int) -> None:
        tokens = request.token_ids
        tokens.append(token_id)
        num_tokens = len(tokens)
        verdict = check_stop(
            token_id,
            num_tokens - len(request.prompt_token_ids),
            num_tokens,
            request.params.min_tokens,
            request.max_tokens,
            self.config.max_model_len,
            request.eos_token_ids,
            request.stop_token_ids,
        )
        if verdict is not None:
            self._retire(request, *verdict)
            return
        detection = request.params.repetition_detection
        if detection is not None and ends_in_repetition(
            tokens, request.num_output_tokens, request.params.min_tokens, detection
        ):
            self._retire(request, FinishReason.REPETITION, REPETITION_DETECTED)

    def _fork(self, leader: Request, sibling: Request) -> None:
        self.kv.fork(leader, sibling)
        sibling.num_computed_tokens = leader.num_computed_tokens
        sibling.num_cached_tokens = leader.num_cached_tokens
        if sibling.scores_prompt:
            sibling.share_prompt_logprobs(leader)
        sibling.policy_spans = list(leader.policy_spans)  # whose KV and forced tokens' values it takes over
        self._planner.start_running(sibling)

    def preempt_all(self) -> None:
        """Takes the KV of every request; they wait, and recompute it when they run again.

        Also forgets a plan in flight, or one that was interrupted while it was made, executed or taken: the queues are
        made anew, and since a plan's result is not taken, nothing is lost.
        """
        self._in_flight = None
        self.kv.end_step()
        self._preempt_all_but(frozenset())

    def _preempt_all_but(self, kept: AbstractSet[str]) -> None:
        if self.draft_planner is not None:
            self.draft_planner.forget_all()
        pending: set[str] = set()
        for request in self._requests.values():
            request.siblings = [sibling for sibling in request.siblings if sibling.status is RequestStatus.WAITING]
            pending.update(sibling.request_id for sibling in request.siblings)
            if request.request_id in kept or request.beam_options is not None:
                continue
            if request.status is _RUNNING:
                self._planner.count_preemption(request)
            if request.status in (_RUNNING, RequestStatus.SWAPPED):
                self._planner.drop_kv(request)
            elif request.num_computed_tokens:  # interrupted between getting its blocks and starting to run
                self.kv.release(request)
                request.num_computed_tokens = 0
            request.cut_back()
        queued = [
            request
            for request in self._requests.values()
            if request.request_id not in pending and request.beam_options is None
        ]
        in_order = sorted([*queued, *self._beams.forget_kv()], key=lambda request: request.rank)
        self._waiting.items = [request for request in in_order if request.status is not _RUNNING]
        self._running.items = [request for request in in_order if request.status is _RUNNING]
        self._planner.parked.items = []

    def reset_prefix_cache(self) -> bool:
        """Makes no block hittable; False, with nothing changed, where a block is in use."""
        is_done = self.kv.reset_prefix_cache()
        if is_done and self.draft_planner is not None:
            self.draft_planner.reset_prefix_cache()
        return is_done

    def set_num_blocks(self, num_blocks: int, num_draft_blocks: int | None = None) -> None:
        """Other device pools of this many blocks, all free and none hittable; without `num_draft_blocks` a drafter's
        stays as large as it is. Raises `RuntimeError` where requests are unfinished."""
        if self._requests:
            raise RuntimeError(f"{len(self._requests)} requests are unfinished: the pool cannot change")
        num_draft_blocks = self.config.num_draft_blocks if num_draft_blocks is None else num_draft_blocks
        config = replace(self.config, num_blocks=num_blocks, num_draft_blocks=num_draft_blocks)
        version = self.policy_version
        self.config = self._planner.config = config
        self.kv = self._planner.kv = KVManager(
            num_blocks, config.block_size, config.enable_prefix_caching, config.num_host_blocks
        )
        self.kv.set_policy_version(version)
        if self.draft_planner is not None:
            self.draft_planner.resize(num_draft_blocks)

    def set_policy_version(self, version: int, keep_kv: bool = False) -> None:
        """Every block hash from now on is under `version`; no block from before can be hit.

        With `keep_kv` requests that have sampled tokens go on with the KV that they have, in host memory too. All
        others compute theirs anew, scores of a prompt included. So an output whose tokens are all of one version was
        computed by that version alone, and the spans of every other say that it was not. Raises `RuntimeError` between
        `schedule` and `update`, without `keep_kv` while requests run (see `preempt_all` and `abort`), and where beam
        searches have begun: they would compare logprobs of one policy with those of another.
        """
        if self._beams.begun():
            raise RuntimeError(
                f"{len(self._beams.begun())} beam searches have begun: abort them before a policy update"
            )
        if self._in_flight is not None or (self._running.items and not keep_kv):
            raise RuntimeError(f"{self.num_running} requests are running: abort or preempt them before a policy update")
        kept = [request for request in self._requests.values() if keep_kv and _has_sampled(request)]
        self._preempt_all_but({request.request_id for request in kept})
        for request in self._requests.values():
            if request.num_output_tokens == 0:
                request.forget_prompt_logprobs()
                if request.status is RequestStatus.PREEMPTED:
                    request.status = RequestStatus.WAITING  # as if it had just come: its prefix is looked up anew
        self.kv.set_policy_version(version)
        if self.draft_planner is not None:
            self.draft_planner.set_policy_version(version)
        self._planner.policy_version = version
        for request in kept:
            if request.status is _RUNNING:
                self._planner.note_policy(request)

    def stats(self) -> SchedulerStats:
        """Gauges and counters now."""
        num_slots_allocated, num_slots_used = self.kv.slots([*self._running, *self._planner.parked])
        draft_planner = self.draft_planner
        draft_pool = None if draft_planner is None else draft_planner.kv.pool
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=self.kv.pool.num_free,
            num_blocks=self.kv.pool.num_blocks,
            num_preemptions=self._planner.num_preemptions,
            prefix_cache_queries=self._planner.num_cache_queries,
            prefix_cache_hits=self._planner.num_cache_hits,
            num_slots_allocated=num_slots_allocated,
            num_slots_used=num_slots_used,
            num_beam_tokens=self._beams.num_tokens,
            num_draft_blocks=0 if draft_pool is None else draft_pool.num_blocks,
            num_free_draft_blocks=0 if draft_pool is None else draft_pool.num_free,
            num_drafter_tokens=0 if draft_planner is None else draft_planner.num_tokens,
        )

    def check_integrity(self) -> None:
        """Recounts queues, states and blocks. Raises `AssertionError` on a mismatch."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        self.kv.check_integrity()
        if self.draft_planner is not None:
            self.draft_planner.check_integrity(self._running)
        assert len(self._running) <= self.config.max_num_seqs, "more requests run than there are seats"
        self._planner.parked.check_integrity()
        self._beams.check_integrity()
        known = {request_id for request_id, request in self._requests.items() if request.beam_options is None}
        pending = [sibling for request in self._requests.values() for sibling in request.siblings]
        places = [*self._running, *self._waiting, *(sibling for sibling in pending if not sibling.is_finished)]
        ids = [request.request_id for request in places if request.beam_options is None]
        assert len(set(ids)) == len(ids), "a request stands in two places"
        assert set(ids) == known, "a request stands nowhere"
        assert self._requests.keys() == {request_id for group in self._groups.values() for request_id in group}
        for request in self._running:
            assert request.status is _RUNNING, f"{request.request_id} is {request.status} in the running queue"
            self._check_table(request)
        for request in self._waiting:
            swapped = request.status is RequestStatus.SWAPPED
            assert swapped or request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert swapped or request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"

    def _check_table(self, request: Request) -> None:
        num_computed, num_known = request.num_computed_tokens, request.num_tokens
        assert num_computed < num_known, f"{request.request_id} runs and has nothing to compute"
        num_held = len(self.kv.block_ids(request))
        num_needed = self.kv.num_blocks_for(num_computed)
        if self._in_flight is None:
            assert num_held == num_needed, f"{request.request_id} holds {num_held} blocks and needs {num_needed}"
        else:
            num_drafts = len(self._in_flight.drafts.get(request.request_id, ()))
            num_drafts += len(self._in_flight.alternatives.get(request.request_id, ()))
            assert num_needed <= num_held <= self.kv.num_blocks_for(num_known + num_drafts)


def _take_arrays(request: Request, columns: _Draws, index: int) -> None:
    """Appends the values of a draw."""
    request.raw_logprobs.append(columns.raw_logprobs[index])
    request.sampled_logprobs.append(columns.sampled_logprobs[index])
    request.kept_mass.append(columns.kept_mass[index])
    if columns.top_logprobs and request.top_logprobs is not None:
        request.top_logprobs.append(columns.top_logprobs[index])
    request.entropy.append(columns.entropy[index])


def _copy_arrays(leader: Request, sibling: Request) -> list[int]:
    """Gives a fork the values of the forced tokens that its leader has been told of; returns these tokens."""
    start, end = sibling.num_output_tokens, sibling.num_known_output_tokens
    if start == end:
        return []
    if sibling.top_logprobs is not None and leader.top_logprobs is not None:
        sibling.top_logprobs.append(leader.top_logprobs.rows(start)[: end - start])
    for own, leading in zip(sibling.arrays, leader.arrays, strict=True):
        own.extend(leading[start:end])
    return sibling.token_ids[sibling.num_prompt_tokens + start :]


def _has_sampled(request: Request) -> bool:
    """Whether the request holds KV with which it has sampled tokens."""
    return request.num_output_tokens > 0 and request.status in (_RUNNING, RequestStatus.SWAPPED)
