"""What a drafter with weights computes before a step, for whom, and where its own KV lies.

    plan ─► the drafter catches up with the known tokens, and guesses ─► take ─► the step's drafts

Its KV lies in a pool of its own and is cheap to lose: it is computed again when its request is drafted again. So a
request that runs no longer gives it back at once, and where the pool is short those go without that are not drafted
now. Only known tokens count as computed, and only their blocks become hittable: what the drafter has written for its
own guesses is written again when the real tokens have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout.core.kv_manager import KVManager
from rollout.core.request_queue import RequestQueue
from rollout.core.schedule import DraftPlan, DraftSequence
from rollout.core.speculation import Speculation
from rollout.request import Request, RequestStatus

if TYPE_CHECKING:
    from rollout.core.planner import SchedulerConfig

_MOST_TO_CATCH_UP = 16  # known tokens, for each that may still be drawn: more would cost more than guesses can bring


@dataclass(slots=True, eq=False)
class _Drafted:
    """A request as the drafter sees it."""

    request: Request
    num_computed_tokens: int = 0  # leading known tokens whose KV the drafter has
    plan_number: int = 0  # of the last plan that it was in

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids

    @property
    def adapter_key(self) -> str | None:
        return self.request.adapter_key  # the drafter may read features of the adapted model

    @property
    def cache_salt(self) -> str | None:
        return self.request.cache_salt


@dataclass(slots=True)
class _Foresight:
    """The next step, as far as it can be told before it is planned."""

    budget: int  # tokens that the others leave
    num_free_blocks: int  # that they leave in the engine's pool, less one for each that runs
    num_draws: int = 0
    decoding: list[Request] = field(default_factory=list)  # those whose next tokens may be guessed


class DraftPlanner:
    """Plans the work of a drafter with weights, and keeps its guesses until the next step is planned."""

    def __init__(
        self, config: SchedulerConfig, running: RequestQueue, waiting: RequestQueue, speculation: Speculation
    ) -> None:
        self._config = config
        self._running = running
        self._waiting = waiting
        self._speculation = speculation
        self._guesses: dict[str, list[int]] = {}  # by request id: what follows its known tokens
        self._in_flight: DraftPlan | None = None
        self._policy_version = 0
        self.num_tokens = 0  # known tokens that the drafter has computed since start
        self._drafted: dict[str, _Drafted] = {}  # those that run and were drafted, by request id
        self._num_plans = 0
        self.resize(config.num_draft_blocks)

    def resize(self, num_blocks: int) -> None:
        """Another pool of so many blocks, all free and none hittable; 0 for a drafter without KV."""
        assert self._in_flight is None, "the drafter is at work"
        self._drafted.clear()
        self.kv = KVManager(num_blocks, self._config.block_size, enable_prefix_caching=True)
        self.kv.set_policy_version(self._policy_version)

    def plan(self, kv: KVManager) -> DraftPlan | None:
        """What the drafter does before the next step; None where that needs no guesses, or they are not worth it.

        `kv` is the engine's.
        """
        assert self._in_flight is None, "the last plan's guesses have not been taken"
        self._guesses.clear()
        wanted = self._wanted(kv)
        plan = DraftPlan(self._sequences(wanted, kv) if wanted else [])
        if not plan.sequences:
            return None
        self._in_flight = plan
        return plan

    def take(self, plan: DraftPlan, guesses: Mapping[str, Sequence[int]]) -> None:
        """The drafter has done what the plan says, and guessed at most as many tokens for each request as it asks for.

        What belongs to requests that were aborted since `plan` is ignored.
        """
        assert self._in_flight is plan, "these guesses belong to another plan"
        for sequence in plan.sequences:
            num_guesses = len(guesses.get(sequence.request_id, ()))
            assert num_guesses <= sequence.num_drafts, f"{sequence.request_id}: more guesses than were asked for"
        self._in_flight = None
        for sequence in plan.sequences:
            self.num_tokens += len(sequence.token_ids)
            drafted = self._drafted.get(sequence.request_id)
            if drafted is not None:
                self._take_computed(drafted, sequence.start + len(sequence.token_ids))
            if guesses.get(sequence.request_id):
                self._guesses[sequence.request_id] = list(guesses[sequence.request_id])

    def _take_computed(self, drafted: _Drafted, num_computed: int) -> None:
        """The last known token's block is not published yet: should its request not get a token in this step, that one
        is computed once more, since the next guess is drawn behind it."""
        drafted.num_computed_tokens = min(num_computed, drafted.request.num_tokens - 1)
        self.kv.publish(drafted)
        drafted.num_computed_tokens = num_computed
        self.kv.trim(drafted)

    def take_guesses(self) -> dict[str, list[int]]:
        """By request id: guesses of what follows its known tokens. They are given once, to the next step."""
        guesses, self._guesses = self._guesses, {}
        return guesses

    def forget(self, request: Request) -> None:
        """The request runs no longer: its KV is given back."""
        self._guesses.pop(request.request_id, None)
        drafted = self._drafted.get(request.request_id)
        if drafted is not None:
            self.kv.forget(drafted)
            del self._drafted[request.request_id]

    def forget_all(self) -> None:
        """No request runs on: all KV is given back. A plan in flight is forgotten, wherever it was interrupted."""
        self._in_flight = None
        self._guesses.clear()
        for drafted in reversed(self._drafted.values()):
            self.kv.forget(drafted)
        self._drafted.clear()

    def reset_prefix_cache(self) -> None:
        """Gives all KV back, and makes no block hittable."""
        self.forget_all()
        self.kv.reset_prefix_cache()

    def set_policy_version(self, policy_version: int) -> None:
        """Gives all KV back: it may come from features, or weights, of an older policy, and none of it can be hit."""
        self.forget_all()
        self._policy_version = policy_version
        self.kv.set_policy_version(policy_version)

    def _wanted(self, kv: KVManager) -> list[tuple[Request, int]]:
        """Who is to get how many guesses, in order, from what all others leave of the next step's budget and blocks."""
        speculation, size = self._speculation, self._config.block_size
        foresight = self._foresee(kv)
        if not foresight.decoding or not speculation.is_worth_it(foresight.num_draws, foresight.decoding):
            return []
        wanted: list[tuple[Request, int]] = []
        for request in foresight.decoding:
            num_known = request.num_tokens
            num_blocks = kv.num_blocks_for(num_known)
            most = min(
                foresight.budget,
                request.num_prompt_tokens + request.max_tokens - num_known - 1,
                self._config.max_model_len - num_known - 1,
                (num_blocks + max(0, foresight.num_free_blocks)) * size - num_known,
            )
            if most <= 0:
                continue
            text = speculation.text(request)[:most]  # what its grammar prescribes needs no drafter
            num_drafts = len(text) or min(most, speculation.length(request))
            if text:
                self._guesses[request.request_id] = text
            elif num_drafts:
                wanted.append((request, num_drafts))
            foresight.budget -= num_drafts
            foresight.num_free_blocks -= kv.num_blocks_for(num_known + num_drafts) - num_blocks
        return wanted

    def _foresee(self, kv: KVManager) -> _Foresight:
        """What the next step will do for those that run, and for those that seem to fit.

        Prefix hits of those that wait are not looked up: a step in which many come may be drafted too little.
        """
        config, speculation = self._config, self._speculation
        step = _Foresight(config.max_num_batched_tokens, kv.pool.num_free)
        for request in self._running.items:
            if step.budget == 0 or step.num_draws > speculation.most_sequences:
                break
            num_left = request.num_tokens - request.num_computed_tokens
            if num_left == 1 and not request.siblings and speculation.can_draft(request):
                step.decoding.append(request)
            self._foresee_one(step, request, len(kv.block_ids(request)), kv)
        num_running = len(self._running)
        if not step.decoding:
            return step
        for request in self._waiting.items[: config.max_num_seqs - num_running]:
            num_blocks = kv.num_blocks_for(request.num_tokens)
            if step.budget == 0 or step.num_free_blocks - num_blocks < num_running // 2:
                break
            self._foresee_one(step, request, 0, kv)
            num_running += 1
        step.num_free_blocks -= num_running
        return step

    @staticmethod
    def _foresee_one(step: _Foresight, request: Request, num_held: int, kv: KVManager) -> None:
        num_left = request.num_tokens - request.num_computed_tokens
        num_new = min(num_left, step.budget)
        step.budget -= num_new
        step.num_free_blocks -= kv.num_blocks_for(request.num_computed_tokens + num_new) - num_held
        if num_new == num_left and request.max_tokens > 0:
            step.num_draws += 1 + len(request.siblings)

    def _sequences(self, wanted: list[tuple[Request, int]], kv: KVManager) -> list[DraftSequence]:
        if not self.kv.pool.num_blocks:
            return [_sequence(request, request.num_tokens - 1, 1, [], num, kv) for request, num in wanted]
        self._num_plans += 1
        budget = self._config.max_num_batched_tokens
        kept = {request.request_id for request, _ in wanted}
        computing: set[bytes] = set()  # hashes of the blocks that the drafter fills now
        sequences: list[DraftSequence] = []
        for request, num_drafts in wanted:
            if budget == 0:
                break
            drafted = self._begin(request, computing)
            if drafted is None:
                continue
            num_left = request.num_prompt_tokens + request.max_tokens - request.num_tokens
            if request.num_tokens - drafted.num_computed_tokens > _MOST_TO_CATCH_UP * num_left:
                self._release(drafted)
                continue
            num_slots = self._reserve(drafted, num_drafts, kept)
            if num_slots < request.num_tokens:
                continue
            start = min(drafted.num_computed_tokens, request.num_tokens - 1)
            num_new = min(request.num_tokens - start, budget)
            end = start + num_new
            budget -= num_new
            num_drafts = min(num_drafts, num_slots - end + 1) if end == request.num_tokens else 0
            block_ids = self.kv.block_ids(drafted)[: self.kv.num_blocks_for(end + max(0, num_drafts - 1))]
            sequences.append(_sequence(request, start, num_new, block_ids, num_drafts, kv))
            computing.update(self.kv.hashes_filled(drafted, start, min(end, request.num_tokens - 1)))
        return sequences

    def _begin(self, request: Request, computing: set[bytes]) -> _Drafted | None:
        """The request with what the drafter has of it, or finds in its prefix cache.

        None where another request's next blocks are its own: once they are filled it hits them.
        """
        drafted = self._drafted.setdefault(request.request_id, _Drafted(request))
        drafted.plan_number = self._num_plans
        if not self.kv.holds_blocks(drafted):
            limit = (request.num_tokens - 1) // self.kv.block_size
            hits = self.kv.cached_prefix(drafted, limit)
            if len(hits) < limit and self.kv.hashes(drafted, len(hits) + 1)[len(hits)] in computing:
                return None
            self.kv.admit(drafted, hits)
            drafted.num_computed_tokens = len(hits) * self.kv.block_size
        return drafted

    def _reserve(self, drafted: _Drafted, num_drafts: int, kept: set[str]) -> int:
        """Blocks for all known tokens of a request, and for its guesses but the last. Those that are not in `kept` go
        without theirs where it needs them, planned longest ago first; it does so itself where its known tokens do not
        fit.

        Returns for how many tokens there are slots now.
        """
        pool, num_known = self.kv.pool, drafted.request.num_tokens
        num_held = len(self.kv.block_ids(drafted))
        num_needed = self.kv.num_blocks_for(num_known) - num_held
        num_wanted = self.kv.num_blocks_for(num_known + num_drafts - 1) - num_held
        if pool.num_free < num_wanted:
            idle = [other for request_id, other in self._drafted.items() if request_id not in kept]
            if pool.num_free + sum(len(self.kv.block_ids(other)) for other in idle) >= num_needed:
                for other in sorted(idle, key=lambda other: other.plan_number):
                    if pool.num_free < num_wanted:
                        self._release(other)
        if pool.num_free < num_needed:
            self._release(drafted)
            return 0
        return self.kv.extend(drafted, num_known + num_drafts - 1, reserve=0)

    def _release(self, drafted: _Drafted) -> None:
        self.kv.release(drafted)
        drafted.num_computed_tokens = 0

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Recounts who holds which of the drafter's blocks. Raises `AssertionError` on a mismatch."""
        self.kv.check_integrity()
        by_id = {request.request_id: request for request in running}
        for request_id, drafted in self._drafted.items():
            assert by_id.get(request_id) is drafted.request, f"{request_id} does not run and holds the drafter's blocks"
            assert drafted.request.status is RequestStatus.RUNNING
            num_held, num_computed = len(self.kv.block_ids(drafted)), drafted.num_computed_tokens
            assert num_computed <= drafted.request.num_tokens, f"{request_id}: the drafter knows tokens that are not"
            if self._in_flight is None:
                assert num_held == self.kv.num_blocks_for(num_computed), f"{request_id} holds {num_held} draft blocks"
        num_held = sum(len(self.kv.block_ids(drafted)) for drafted in self._drafted.values())
        assert self.kv.pool.num_blocks - self.kv.pool.num_free <= num_held, "draft blocks are held by nobody"


def _sequence(
    request: Request, start: int, num_new: int, block_ids: list[int], num_drafts: int, kv: KVManager
) -> DraftSequence:
    return DraftSequence(
        request_id=request.request_id,
        start=start,
        token_ids=request.token_ids[start : start + num_new],
        block_ids=block_ids,
        target_block_ids=kv.block_ids(request).copy(),
        num_drafts=num_drafts,
        params=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
    )
