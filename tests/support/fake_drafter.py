"""A drafter with weights, without a model: its slots remember which tokens they were computed from.

It asserts of its own pool what the fake runner asserts of the engine's: whatever prefix hits, evictions, chunks and
interruptions led there, the KV that it reads is that of the known tokens before the first that it computes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.core.draft_planner import DraftPlanner
from rollout.core.schedule import DraftPlan, DraftSequence
from rollout.core.scheduler import Scheduler
from rollout.request import Request, RequestStatus
from tests.support.fake_runner import Prefix, SlotContent, next_token, slow_hash


@dataclass(slots=True)
class FakeDrafter:
    """Guesses tokens that are right with a probability; the others are those that nobody draws."""

    scheduler: Scheduler
    requests: Mapping[str, Request]  # by id
    vocab: int
    rightness: float = 1.0
    may_be_short: bool = False  # guesses fewer than it is asked for, or nothing
    device: dict[int, SlotContent] = field(default_factory=dict)  # slot -> content
    plans: list[DraftPlan] = field(default_factory=list)

    @property
    def planner(self) -> DraftPlanner:
        assert self.scheduler.draft_planner is not None
        return self.scheduler.draft_planner

    def propose(self, plan: DraftPlan) -> dict[str, list[int]]:
        self.plans.append(plan)
        assert plan.sequences, "the drafter is asked for nothing"
        ids = [sequence.request_id for sequence in plan.sequences]
        assert len(set(ids)) == len(ids), "a request is drafted twice"
        num_tokens = sum(len(sequence.token_ids) for sequence in plan.sequences)
        assert num_tokens <= self.scheduler.config.max_num_batched_tokens
        for sequence in plan.sequences:
            self._check(sequence)
        guesses = {sequence.request_id: self._guess(sequence) for sequence in plan.sequences}
        if self.planner.kv.pool.num_blocks:
            self._forward(plan, guesses)
        if not self.may_be_short:
            return guesses
        return {request_id: self._cut(request_id, guess) for request_id, guess in guesses.items() if len(guess) != 1}

    def _check(self, sequence: DraftSequence) -> None:
        request, kv = self.requests[sequence.request_id], self.planner.kv
        assert request.status is RequestStatus.RUNNING, "a request is drafted that does not run"
        assert request.num_computed_tokens == request.num_tokens - 1, "a request is drafted that does not decode"
        end = sequence.start + len(sequence.token_ids)
        assert sequence.token_ids and sequence.token_ids == request.token_ids[sequence.start : end]
        assert end == request.num_tokens or sequence.num_drafts == 0, "guesses behind tokens that are not the last"
        assert sequence.target_block_ids == self.scheduler.kv.block_ids(request)
        most = request.num_prompt_tokens + request.max_tokens - request.num_tokens - 1
        assert sequence.num_drafts <= most, "guesses that could never be used"
        if kv.pool.num_blocks:
            num_blocks = kv.num_blocks_for(end + max(0, sequence.num_drafts - 1))
            assert len(sequence.block_ids) == len(set(sequence.block_ids)) == num_blocks
            assert all(0 <= block_id < kv.pool.num_blocks for block_id in sequence.block_ids)
        else:
            assert (sequence.start, sequence.block_ids) == (request.num_tokens - 1, [])

    def _guess(self, sequence: DraftSequence) -> list[int]:
        request = self.requests[sequence.request_id]
        assert (request.seed, request.sample_index) == (sequence.seed, sequence.sample_index)
        prefix = list(request.token_ids)
        chance = random.Random(f"{request.request_id} {len(prefix)}")
        for _ in range(sequence.num_drafts):
            token_id = next_token(tuple(prefix), request.seed, request.sample_index, self.vocab)
            prefix.append(token_id if chance.random() < self.rightness else self.vocab)
        return prefix[request.num_tokens :]

    def _cut(self, request_id: str, guess: list[int]) -> list[int]:
        return guess[: random.Random(f"{request_id} {len(self.plans)}").randint(0, len(guess))]

    def _forward(self, plan: DraftPlan, guesses: Mapping[str, list[int]]) -> None:
        """Writes the KV of known tokens and of guesses, then reads every sequence's known tokens."""
        size, version = self.scheduler.config.block_size, self.scheduler.policy_version
        written: set[int] = set()
        for sequence in plan.sequences:
            request = self.requests[sequence.request_id]
            prefix: Prefix = tuple(request.token_ids[: sequence.start])
            new = [*sequence.token_ids, *guesses[sequence.request_id][:-1]]
            for position, token_id in enumerate(new, start=sequence.start):
                prefix = (*prefix, token_id)
                slot = sequence.block_ids[position // size] * size + position % size
                assert slot not in written, "a slot is written twice in one step"
                written.add(slot)
                self.device[slot] = SlotContent(prefix, frozenset({version}), request.cache_salt)
        for sequence in plan.sequences:
            request = self.requests[sequence.request_id]
            for position in range(sequence.start + len(sequence.token_ids)):
                slot = sequence.block_ids[position // size] * size + position % size
                expected = tuple(request.token_ids[: position + 1])
                assert self.device[slot] == SlotContent(expected, frozenset({version}), request.cache_salt)

    def audit(self) -> None:
        """What can be hit holds what its hash says; what is not running holds nothing."""
        size, pool = self.scheduler.config.block_size, self.planner.kv.pool
        for block_hash, block in pool.index.items():
            contents = [self.device[block.block_id * size + offset] for offset in range(size)]
            last = contents[-1]
            first = len(last.prefix) - size
            assert [content.prefix for content in contents] == [
                last.prefix[: first + offset + 1] for offset in range(size)
            ]
            assert {content.policy_versions for content in contents} == {frozenset({self.scheduler.policy_version})}
            assert block_hash == slow_hash(last.prefix, size, self.scheduler.policy_version, last.cache_salt)
        if not self.scheduler.num_running:
            assert pool.num_free == pool.num_blocks, "draft blocks are held, and nobody runs"
