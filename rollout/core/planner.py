"""Making the plan of a step: which requests compute which tokens, who is admitted and who is preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rollout.core.blocks import Block
from rollout.core.draft_planner import DraftPlanner
from rollout.core.kv_manager import KVManager
from rollout.core.request_queue import RequestQueue
from rollout.core.schedule import Draw, ScheduledSequence, SchedulePlan
from rollout.core.speculation import Guess, Speculation
from rollout.request import Request, RequestStatus

_RUNNING = RequestStatus.RUNNING


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a scheduler. `num_host_blocks` hold the KV of preempted requests under `preemption_mode="swap"`;
    `num_draft_blocks` that of a drafter with weights, 0 where it has none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_draft_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} is not valid: it must be at least 1")
        for name in ("num_host_blocks", "num_draft_blocks"):
            value: int = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name}={value} is not valid: it must be at least 0")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy={self.policy!r} is not valid: it must be 'fcfs' or 'priority'")
        if self.preemption_mode not in ("recompute", "swap"):
            raise ValueError(f"preemption_mode={self.preemption_mode!r} is not valid: it must be 'recompute' or 'swap'")


@dataclass(slots=True)
class Step:
    """A plan while it is made, and until its result arrives."""

    budget: int  # tokens that may still be scheduled
    num_seats: int  # requests that may still start to run
    plan: SchedulePlan = field(default_factory=SchedulePlan)
    requests: list[Request] = field(default_factory=list)  # of plan.sequences
    drawers: list[Request] = field(default_factory=list)  # of plan.draws
    num_forks: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)  # by request id: guessed tokens behind the known ones
    # By request id: guesses in the place of drafts, each with the index of the draw behind it.
    alternatives: dict[str, list[tuple[Guess, int]]] = field(default_factory=dict)
    computing: set[bytes] | None = None  # hashes of the blocks that this step fills; None while nobody asks


class Planner:
    """Plans steps over the scheduler's two queues; the scheduler takes the results."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        running: RequestQueue,
        waiting: RequestQueue,
        speculation: Speculation | None = None,
        draft_planner: DraftPlanner | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.speculation = speculation  # None: nothing is guessed
        self.draft_planner = draft_planner  # None: guesses, if any, come from drafters without weights
        self.running = running
        self.waiting = waiting
        self.parked = RequestQueue()  # beams that have drawn and hold KV, until their search goes on
        self.policy_version = 0
        self.num_preemptions = 0
        self.num_cache_queries = 0  # prompt tokens looked up at first admissions
        self.num_cache_hits = 0  # of these, found

    def plan_step(self) -> Step:
        """Computed tokens catch up with known tokens, as far as budget, seats and blocks reach.

        Running requests come first, then waiting ones, each in order. Where neither can move, parked beams give up
        their KV, last in order first.
        """
        step = Step(self.config.max_num_batched_tokens, self.config.max_num_seqs - len(self.running))
        if self._schedule_running(step):
            self._schedule_waiting(step)
        while not step.plan.sequences and self._drop_parked():
            self._schedule_waiting(step)
        if self.speculation is not None and step.plan.draws:
            self._add_drafts(step, self.speculation)
        step.plan.num_scheduled_tokens = self.config.max_num_batched_tokens - step.budget
        return step

    def _schedule_running(self, step: Step) -> bool:
        """Plans the running requests; False where blocks were short, so that nobody is admitted in this step."""
        running = self.running.items
        plan, kv = step.plan, self.kv
        enough = True
        position = 0
        while position < len(running) and step.budget > 0:
            request = running[position]
            num_new = min(len(request.token_ids) - request.num_computed_tokens, step.budget)
            while not kv.allocate(request, num_new, plan.block_copies):
                enough = False
                if self._drop_parked():
                    continue
                if running[-1] is request:  # the last one keeps its blocks and sits this step out
                    return False
                self._preempt(running.pop(), plan)
                step.num_seats += 1
            self._plan_sequence(step, request, num_new)
            position += 1
        return enough

    def _preempt(self, request: Request, plan: SchedulePlan) -> None:
        """Takes the blocks of a request that is no longer in the running queue and lets it wait."""
        self.count_preemption(request)
        if self.draft_planner is not None:
            self.draft_planner.forget(request)
        pairs = self.kv.swap_out(request) if self.config.preemption_mode == "swap" else None
        if pairs is not None:
            plan.swap_out.extend(pairs)
            request.status = RequestStatus.SWAPPED
        else:
            self.drop_kv(request)
        self.waiting.add(request)

    def _drop_parked(self) -> bool:
        """Takes the KV of the last parked beam; False where none has any. Its candidates stay: only its children will
        compute it anew."""
        if not self.parked.items:
            return False
        request = self.parked.items.pop()
        self.count_preemption(request)
        self.kv.release(request)
        request.num_computed_tokens = 0
        return True

    def drop_kv(self, request: Request) -> None:
        """Takes the KV of a request that ran or was swapped out; it recomputes when it runs again."""
        self.kv.release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED

    def count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _schedule_waiting(self, step: Step) -> None:
        """Admits waiting requests in order.

        One whose next block is being filled in this very step is passed over: in the next step it hits that block
        instead of computing it again. One that does not fit holds up those behind it, so that it is not starved.
        """
        items = self.waiting.items
        passed_over: list[Request] = []
        position = 0
        most = self.config.max_num_seqs  # to pass over: they would fill every seat of the next step
        while position < len(items) and step.budget > 0 and step.num_seats > 0 and len(passed_over) < most:
            request = items[position]
            swapped = request.status is RequestStatus.SWAPPED
            if swapped:
                limit = request.num_computed_tokens // self.config.block_size
            elif self._wants_scores(request):
                limit = 0
            else:  # the first token without values in the arrays is drawn from the row before it, which is computed
                limit = (request.num_prompt_tokens + request.num_output_tokens - 1) // self.config.block_size
            hits = self.kv.cached_prefix(request, limit)
            num_shared = 0 if swapped or request.forked_from is None else self._num_shared(step, request)
            if num_shared <= len(hits) * self.config.block_size:
                num_shared = 0
            num_blocks = num_shared // self.config.block_size or len(hits)
            reserve = (len(self.running) + step.num_forks + 1) // 2
            if not swapped and num_blocks < limit and self._is_being_computed(step, request, num_blocks):
                passed_over.append(request)
            elif num_shared and self.kv.fits_beside(request, num_shared, reserve):
                self._admit_fork(step, request, num_shared)
            elif not num_shared and self.kv.fits(request, hits, reserve):
                self._admit(step, request, hits)
            else:
                break
            position += 1
        items[:position] = passed_over

    def _num_shared(self, step: Step, request: Request) -> int:
        """Leading tokens whose KV the request can take from the running request that it is a fork of.

        The block behind the last full one is copied in this step: that needs a block whose content is there before the
        step, and is not itself copied or swapped in.
        """
        parent = request.forked_from
        if parent is None or parent.status is not _RUNNING or self._wants_scores(request):
            return 0
        if (parent.adapter_key, parent.cache_salt) != (request.adapter_key, request.cache_salt):
            return 0
        if not self.kv.may_be_forked(parent):
            return 0
        size = self.config.block_size
        num_common = min(request.branch_position, request.num_output_tokens - 1)
        num_tokens = min(request.num_prompt_tokens + num_common, parent.num_computed_tokens)
        if num_tokens % size:
            last = self.kv.block_ids(parent)[num_tokens // size]
            plan = step.plan
            if any(last == arriving for _, arriving in (*plan.block_copies, *plan.swap_in)):
                num_tokens -= num_tokens % size
        return num_tokens

    def _is_being_computed(self, step: Step, request: Request, block_position: int) -> bool:
        if not self.config.enable_prefix_caching:
            return False
        if step.computing is None:
            step.computing = set()
            for other, sequence in zip(step.requests, step.plan.sequences, strict=True):
                self._note_computing(step, other, sequence.start, sequence.start + len(sequence.token_ids))
        return self.kv.hashes(request, block_position + 1)[block_position] in step.computing

    def _note_computing(self, step: Step, request: Request, start: int, end: int) -> None:
        if step.computing is not None:
            step.computing.update(self.kv.hashes_filled(request, start, end))

    def _admit(self, step: Step, request: Request, hits: list[Block]) -> None:
        """Starts or resumes a request that fits, with the blocks that were found."""
        if request.status is RequestStatus.SWAPPED:
            step.plan.swap_in.extend(self.kv.swap_in(request, hits))
        else:
            self.kv.admit(request, hits)
            request.num_computed_tokens = len(hits) * self.config.block_size
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            if self.config.enable_prefix_caching and not self._wants_scores(request):
                self.num_cache_queries += len(request.token_ids)
                self.num_cache_hits += request.num_computed_tokens
        self._run_admitted(step, request)

    def _admit_fork(self, step: Step, request: Request, num_tokens: int) -> None:
        """Starts a request that fits, with the KV of `num_tokens` leading tokens of the one it is a fork of."""
        assert request.forked_from is not None
        request.num_computed_tokens = num_tokens  # first, so that an interruption here gives the blocks back
        self.kv.fork(request.forked_from, request, num_tokens)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_tokens
        self._run_admitted(step, request)

    def _run_admitted(self, step: Step, request: Request) -> None:
        self.start_running(request)
        step.num_seats -= 1
        num_new = min(len(request.token_ids) - request.num_computed_tokens, step.budget)
        allocated = self.kv.allocate(request, num_new, step.plan.block_copies)
        assert allocated, "a request that fits did not get its blocks"
        self._plan_sequence(step, request, num_new)
        self._note_computing(step, request, request.num_computed_tokens, request.num_computed_tokens + num_new)

    def start_running(self, request: Request) -> None:
        """Queues a request that has its blocks as running, under the present policy version."""
        request.status = _RUNNING
        self.note_policy(request)
        self.running.add(request)

    def note_policy(self, request: Request) -> None:
        """From its next token on, the request is sampled by the present policy version."""
        request.policy_version = self.policy_version
        num_output, spans = request.num_output_tokens, request.policy_spans
        if spans and spans[-1][1] == num_output:
            spans.pop()
        if not spans or spans[-1][0] != self.policy_version:
            spans.append((self.policy_version, num_output))

    def _plan_sequence(self, step: Step, request: Request, num_new: int) -> None:
        """Plans the next `num_new` tokens of a request, and the draws from their rows: of forced tokens that they make
        known, and of the next token after the last known one."""
        tokens = request.token_ids
        start = request.num_computed_tokens
        end = start + num_new
        targets = tokens[start + 1 : min(end + 1, request.num_prompt_tokens)] if self._wants_scores(request) else ()
        sequences = step.plan.sequences
        block_ids = self.kv.block_ids(request).copy()
        sequences.append(
            ScheduledSequence(
                request.request_id,
                start,
                tokens[start:end],
                block_ids,
                targets,
                request.adapter_slot,
                request.params.prompt_logprobs,
            )
        )
        step.requests.append(request)
        step.budget -= num_new
        if request.max_tokens == 0:
            return
        if request.params.forced_token_ids:
            for position in range(request.num_prompt_tokens + request.num_output_tokens, min(end + 1, len(tokens))):
                self._plan_draw(step, request, position, position - 1 - start)
        if end == len(tokens):
            self._plan_draw(step, request, end)
            if request.siblings:
                self._plan_forks(step, request)

    def _plan_draw(self, step: Step, request: Request, position: int, row: int = -1) -> None:
        """Plans the draw of the token at `position`, from a row of the last sequence."""
        step.plan.draws.append(self._draw(request, len(step.plan.sequences) - 1, position, row))
        step.drawers.append(request)

    @staticmethod
    def _draw(
        request: Request, sequence_index: int, position: int, row: int, draft_token_ids: Sequence[int] = ()
    ) -> Draw:
        params = request.params
        banned = request.banned_token_ids(position) if params.min_tokens else ()
        forced_token_id = -1
        if params.forced_token_ids:
            index = position - request.num_prompt_tokens
            forced_token_id = params.forced_token_ids[index] if index < len(params.forced_token_ids) else -1
        return Draw(
            request.request_id,
            sequence_index,
            params,
            request.seed,
            request.sample_index,
            position,
            banned,
            request.sample_state,
            row,
            forced_token_id,
            request.beam_options is not None,
            draft_token_ids,
        )

    def _add_drafts(self, step: Step, speculation: Speculation) -> None:
        """Gives sequences that decode their drafts, from what all others have left of budget and blocks. A block for
        each request stays free, so that nobody is preempted in the next step because of a draft."""
        plan, drawers = step.plan, step.drawers
        guesses: dict[str, list[int]] = {}
        if self.draft_planner is not None:  # it has asked whether they are worth it
            guesses = self.draft_planner.take_guesses()
            if not guesses:
                return
        elif len(drawers) > speculation.most_sequences:
            return
        else:
            candidates = [
                request
                for draw, request in zip(plan.draws, drawers, strict=True)
                if self._may_have_drafts(step, draw, request, speculation)
            ]
            if not speculation.is_worth_it(len(drawers), candidates):
                return
        reserve = len(self.running) + step.num_forks
        plan.draws, step.drawers, draws = [], [], plan.draws
        for draw, request in zip(draws, drawers, strict=True):
            plan.draws.append(draw)
            step.drawers.append(request)
            sequence = plan.sequences[draw.sequence_index]
            if not self._may_have_drafts(step, draw, request, speculation):
                continue
            num_known = request.num_tokens
            most = min(
                step.budget,
                request.num_prompt_tokens + request.max_tokens - num_known - 1,
                self.config.max_model_len - num_known - 1,
            )
            if most <= 0:
                continue
            if self.draft_planner is None:
                drafts = speculation.drafts(request, most)
            else:
                drafts = speculation.allowed(request, guesses.get(request.request_id, [])[:most])
            alternatives = speculation.alternatives(request, len(drafts), most - len(drafts)) if drafts else []
            num_wanted = len(drafts) + len(alternatives)
            num_slots = self.kv.extend(request, num_known + num_wanted, reserve) if drafts else num_known
            drafts = drafts[: num_slots - num_known]
            if not drafts:
                continue
            alternatives = alternatives[: num_slots - num_known - len(drafts)]
            step.budget -= len(drafts) + len(alternatives)
            step.drafts[request.request_id] = drafts
            if alternatives:
                step.alternatives[request.request_id] = [(guess, 0) for guess in alternatives]
            first_row = len(sequence.token_ids) - 1
            block_ids = self.kv.block_ids(request).copy()
            plan.sequences[draw.sequence_index] = msgspec.structs.replace(
                sequence, token_ids=[*sequence.token_ids, *drafts], block_ids=block_ids
            )
            plan.draws[-1] = msgspec.structs.replace(draw, row=first_row)
            for count in range(1, len(drafts) + 1):
                draft = self._draw(request, draw.sequence_index, num_known + count, first_row + count, drafts[:count])
                plan.draws.append(draft)
                step.drawers.append(request)
        if step.alternatives:
            self._add_alternatives(step)

    def _add_alternatives(self, step: Step) -> None:
        """A sequence of one row for each guess in the place of a draft: it shares the drafts before it, and the block
        table, in which its KV lies behind all drafts."""
        plan = step.plan
        for sequence, request in zip(plan.sequences.copy(), step.requests, strict=True):
            guesses = step.alternatives.get(request.request_id)
            if guesses is None:
                continue
            drafts, num_known = step.drafts[request.request_id], request.num_tokens
            for index, (guess, _) in enumerate(guesses):
                guesses[index] = (guess, len(plan.draws))
                plan.sequences.append(
                    msgspec.structs.replace(
                        sequence,
                        start=num_known + guess.place,
                        token_ids=[guess.token_id],
                        last_place=num_known + len(drafts) + index,
                    )
                )
                path = [*drafts[: guess.place], guess.token_id]
                plan.draws.append(self._draw(request, len(plan.sequences) - 1, num_known + len(path), -1, path))
                step.drawers.append(request)
            plan.num_alternatives += len(guesses)

    @staticmethod
    def _may_have_drafts(step: Step, draw: Draw, request: Request, speculation: Speculation) -> bool:
        """Whether the draw is that of a sequence which decodes, and whose next tokens may be guessed. Where the last
        step has taken a guess in the place of a draft, the KV of that one is computed before that of the last token."""
        if request is not step.requests[draw.sequence_index] or request.siblings:
            return False
        most_rows = 2 if speculation.most_alternatives else 1
        num_rows = len(step.plan.sequences[draw.sequence_index].token_ids)
        return num_rows <= most_rows and speculation.can_draft(request)

    def _plan_forks(self, step: Step, leader: Request) -> None:
        """Siblings draw their first token from the leader's last prompt row: as many as find a seat and a block."""
        num_forks = min(step.num_seats, self.kv.pool.num_free - step.num_forks)
        for sibling in leader.siblings:
            if num_forks <= 0:
                break
            if not sibling.is_finished:
                self._plan_draw(step, sibling, sibling.num_tokens)
                num_forks -= 1
                step.num_seats -= 1
                step.num_forks += 1

    @staticmethod
    def _wants_scores(request: Request) -> bool:
        """Whether prompt tokens still lack their logprob; the KV cache has none, so they are computed."""
        return request.scores_prompt and len(request.prompt_logprobs) < request.num_prompt_tokens - 1
