"""A runner without a model: KV slots remember which tokens they were computed from, and tokens are a hash of that.

It is the oracle of the scheduler's tests. A slot's content is the whole prefix up to its token, so that every read
through a block table shows whether the table is right, whatever prefix hits, forks, copies and swaps led there. The
next token is drawn from what the slots hold, never from the request: wrong KV gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np

from rollout.core.beam import num_candidates
from rollout.core.prefix_cache import chained_hash, root_hash
from rollout.core.schedule import DraftPlan, Draw, SchedulePlan, StepResult, TopLogprobs, join
from rollout.core.scheduler import Scheduler
from rollout.request import Request

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotContent:
    """What a written slot holds: KV of the last token of `prefix`, for a cache salt.

    `policy_versions` are those that computed it: its own forward pass's and those of all KV that this pass read.
    """

    prefix: Prefix
    policy_versions: frozenset[int]
    cache_salt: str | None


def _number(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def next_token(prefix: Prefix, seed: int, sample_index: int, vocab: int, banned: Sequence[int] = ()) -> int:
    """The fake model: a pure function of the prefix and of who draws."""
    allowed = [token_id for token_id in range(vocab) if token_id not in banned]
    return allowed[_number("token", prefix, seed, sample_index) % len(allowed)]


def fake_logprob(prefix: Prefix, token_id: int) -> float:
    """A float32 value that belongs to one token after one prefix."""
    return float(np.float32(-(_number("logprob", prefix, token_id) % 9973) / 1000))


def fake_top_logprobs(prefix: Prefix, token_id: int, num_top: int, chosen: Sequence[int] = ()) -> TopLogprobs:
    """Values that belong to one token, and to what else was asked for, after one prefix."""
    top = [_number("top", prefix, place) % 1000 for place in range(num_top)]
    return TopLogprobs.of(
        token_ids=np.array([top], dtype=np.int32),
        logprobs=np.array([[fake_logprob(prefix, other) for other in top]], dtype=np.float32),
        ranks=np.array([1 + _number("rank", prefix, token_id) % 1000], dtype=np.int32),
        chosen=np.array([[fake_logprob(prefix, other) for other in chosen]], dtype=np.float32),
    )


def expected_output(request: Request, vocab: int, max_model_len: int) -> list[int]:
    """The slow obvious truth: the request alone, one token at a time, without KV."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    ends = request.eos_token_ids | request.stop_token_ids
    num_known = request.branch_position  # tokens of the request that it is a fork of: they end nothing
    forced = [*request.output_token_ids[:num_known], *request.forced_token_ids[num_known:]]
    may_end_from = max(len(request.forced_token_ids), num_known + 1, request.params.min_tokens + 1)
    while len(output) < request.max_tokens and len(tokens) < max_model_len:
        banned = ends if len(output) < request.params.min_tokens else ()
        token_id = next_token(tuple(tokens), request.seed, request.sample_index, vocab, sorted(banned))
        token_id = forced[len(output)] if len(output) < len(forced) else token_id
        tokens.append(token_id)
        output.append(token_id)
        if token_id in ends and len(output) >= may_end_from:
            break
    return output


class Drafts(Protocol):
    """What the runner asks of a drafter with weights (`tests.support.fake_drafter`)."""

    def propose(self, plan: DraftPlan) -> Mapping[str, Sequence[int]]: ...

    def audit(self) -> None: ...


@dataclass(slots=True)
class FakeRunner:
    """Executes plans against a simulated KV store; asserts everything that a real runner silently relies on."""

    scheduler: Scheduler
    vocab: int = 7
    poisoned: Callable[[Draw], bool] = lambda draw: False  # draws whose logits are not numbers
    completing: Callable[[Draw], bool] = lambda draw: False  # draws after whose token a grammar allows no more
    device: dict[int, SlotContent] = field(default_factory=dict)  # slot -> content
    host: dict[int, SlotContent] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)  # by id, ended ones too
    num_forward_tokens: int = 0
    num_copies: int = 0
    num_swapped_blocks: int = 0
    drafter: Drafts | None = None  # where the scheduler has one with weights

    def add(self, request: Request) -> None:
        """Adds to the scheduler, and remembers what the runner has to know."""
        family = [request, *request.siblings]
        self.scheduler.add(request)
        for member in family:
            self.requests[member.request_id] = member

    def schedule(self) -> SchedulePlan:
        """The next step's plan, with guesses where there is a drafter with weights."""
        draft_plan = self.scheduler.plan_drafts()
        if draft_plan is not None:
            assert self.drafter is not None
            self.scheduler.take_drafts(draft_plan, self.drafter.propose(draft_plan))
        return self.scheduler.schedule()

    def step_plan(self) -> SchedulePlan:
        """One step, as `step`; returns its plan."""
        plan = self.schedule()
        self.scheduler.update(plan, self.execute(plan))
        self.audit()
        return plan

    def step(self) -> list[tuple[Request, list[int]]]:
        """One schedule, execute, update; audits the plan, the state between, and the state after."""
        plan = self.schedule()
        self.scheduler.check_integrity()
        result = self.execute(plan)
        outputs = self.scheduler.update(plan, result)
        self.audit()
        return outputs

    def run(self, max_steps: int = 10_000) -> list[tuple[Request, list[int]]]:
        """Steps until nothing is unfinished; all outputs in order. Fails where `max_steps` do not suffice."""
        outputs: list[tuple[Request, list[int]]] = []
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                return outputs
            outputs += self.step()
        raise AssertionError(f"requests are not done after {max_steps} steps")

    def execute(self, plan: SchedulePlan) -> StepResult:
        self.requests |= {request.request_id: request for request in self.scheduler.running_requests()}  # beams too
        self._check_plan(plan)
        size = self.scheduler.config.block_size
        for device_block, host_block in plan.swap_out:
            _copy_block(self.device, device_block, self.host, host_block, size)
        for host_block, device_block in plan.swap_in:
            _copy_block(self.host, host_block, self.device, device_block, size)
        # A real runner may copy all pairs at once: no destination is another pair's source.
        sources = {source for source, _ in plan.block_copies}
        destinations = [destination for _, destination in plan.block_copies]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        arriving = {device_block for _, device_block in plan.swap_in}
        assert not arriving & (sources | set(destinations)), "a block is swapped in and copied"
        for source, destination in plan.block_copies:
            _copy_block(self.device, source, self.device, destination, size)
        self.num_copies += len(plan.block_copies)
        self.num_swapped_blocks += len(plan.swap_in) + len(plan.swap_out)
        prefixes = self._forward(plan)
        return self._draw(plan, prefixes)

    def _check_plan(self, plan: SchedulePlan) -> None:
        config = self.scheduler.config
        counts = [len(sequence.token_ids) for sequence in plan.sequences]
        assert plan.num_scheduled_tokens == sum(counts) <= config.max_num_batched_tokens
        assert all(count > 0 for count in counts)
        assert self.scheduler.num_running <= config.max_num_seqs
        ids = [sequence.request_id for sequence in plan.sequences[: plan.num_decoding]]
        assert all(
            (sequence.last_place >= 0) == (place >= plan.num_decoding) for place, sequence in enumerate(plan.sequences)
        )
        assert len(set(ids)) == len(ids), "a request is scheduled twice"
        assert [draw.sequence_index for draw in plan.draws] == sorted(draw.sequence_index for draw in plan.draws)

    def _forward(self, plan: SchedulePlan) -> list[Prefix]:
        """Writes the KV of all sequences, then reads every sequence's whole prefix; returns the prefixes."""
        size = self.scheduler.config.block_size
        written: set[int] = set()
        contexts: list[tuple[Prefix, list[int]]] = []
        for sequence in plan.sequences:
            end = sequence.start + len(sequence.token_ids)
            assert len(sequence.block_ids) * size >= end, "the block table is too short"
            places = [*range(end)]
            if sequence.last_place >= 0:  # a guess in the place of a draft: behind all drafts
                assert len(sequence.token_ids) == 1 and sequence.last_place >= end
                assert len(sequence.block_ids) * size > sequence.last_place, "the block table is too short"
                places[-1] = sequence.last_place
            slots = [sequence.block_ids[place // size] * size + place % size for place in places]
            before = self.device[slots[sequence.start - 1]] if sequence.start else None
            prefix = before.prefix if before is not None else ()
            versions = frozenset({self.scheduler.policy_version})
            if before is not None:
                versions |= before.policy_versions
            assert len(prefix) == sequence.start, "the slot before the first token holds another position"
            for position, token_id in enumerate(sequence.token_ids, start=sequence.start):
                prefix = (*prefix, token_id)
                assert slots[position] not in written, "a slot is written twice in one step"
                written.add(slots[position])
                salt = self.requests[sequence.request_id].cache_salt
                self.device[slots[position]] = SlotContent(prefix, versions, salt)
            contexts.append((prefix, slots))
            self.num_forward_tokens += len(sequence.token_ids)
        for sequence, (prefix, slots) in zip(plan.sequences, contexts, strict=True):
            request = self.requests[sequence.request_id]
            for position, slot in enumerate(slots):
                self._check_slot(request, prefix[: position + 1], slot)
        return [prefix for prefix, _ in contexts]

    def _draw(self, plan: SchedulePlan, prefixes: list[Prefix]) -> StepResult:
        rows: list[tuple[int, float]] = []
        top: dict[int, TopLogprobs] = {}
        for index, draw in enumerate(plan.draws):
            sequence, whole = plan.sequences[draw.sequence_index], prefixes[draw.sequence_index]
            assert -1 <= draw.row < len(sequence.token_ids)
            prefix = whole if draw.row == -1 else whole[: sequence.start + draw.row + 1]
            assert draw.position == len(prefix), "a draw names another position than its row's"
            assert [*prefix[draw.num_known_tokens :]] == [*draw.draft_token_ids], "a draw names other guesses"
            assert not draw.draft_token_ids or draw.num_known_tokens == self.requests[draw.request_id].num_tokens
            if self.poisoned(draw):
                rows.append((-1, float("nan")))
                continue
            token_id = next_token(prefix, draw.seed, draw.sample_index, self.vocab, draw.banned_token_ids)
            token_id = draw.forced_token_id if draw.forced_token_id >= 0 else token_id
            if draw.position < self.requests[draw.request_id].num_tokens:  # behind it stand drafts
                assert whole[draw.position :][:1] in ((), (token_id,)), "a known token is drawn, and not forced"
            rows.append((token_id, fake_logprob(prefix, token_id)))
            asked, request = draw.params, self.requests[draw.request_id]
            if request.beam_options is not None:
                top[index] = self._most_likely(request, prefix)
            elif asked.wants_top_logprobs:
                chosen = asked.logprob_token_ids or ()
                top[index] = fake_top_logprobs(prefix, token_id, asked.logprobs or 0, chosen)
        scores: dict[str, np.ndarray] = {}
        prompt_top: dict[str, TopLogprobs] = {}
        for sequence, prefix in zip(plan.sequences, prefixes, strict=True):
            if sequence.target_token_ids:
                values = [
                    fake_logprob(prefix[: sequence.start + offset + 1], target)
                    for offset, target in enumerate(sequence.target_token_ids)
                ]
                scores[sequence.request_id] = np.array(values, dtype=np.float32)
                if sequence.num_top_logprobs is not None:
                    prompt_top[sequence.request_id] = join(
                        [
                            fake_top_logprobs(prefix[: sequence.start + offset + 1], target, sequence.num_top_logprobs)
                            for offset, target in enumerate(sequence.target_token_ids)
                        ]
                    )
        logprobs = np.array([logprob for _, logprob in rows], dtype=np.float32)
        return StepResult(
            token_ids=np.array([token_id for token_id, _ in rows], dtype=np.int64),
            raw_logprobs=logprobs,
            sampled_logprobs=logprobs * np.float32(2),
            kept_mass=logprobs * np.float32(3),
            entropy=logprobs * np.float32(4),
            completed={index: None for index, draw in enumerate(plan.draws) if self.completing(draw)},
            prompt_logprobs=scores,
            top_logprobs=top,
            prompt_top_logprobs=prompt_top,
        )

    def _most_likely(self, beam: Request, prefix: Prefix) -> TopLogprobs:
        assert beam.beam_options is not None
        ranked = sorted((-fake_logprob(prefix, token_id), token_id) for token_id in range(self.vocab))
        ranked = ranked[: num_candidates(beam.beam_options.width, len(beam.eos_token_ids))]
        return TopLogprobs.of(
            token_ids=np.array([[token_id for _, token_id in ranked]], dtype=np.int32),
            logprobs=np.array([[-value for value, _ in ranked]], dtype=np.float32),
            ranks=np.ones(1, dtype=np.int32),
            chosen=np.zeros((1, 0), dtype=np.float32),
        )

    def _check_slot(self, request: Request, prefix: Prefix, slot: int) -> None:
        """The slot holds what the request takes it for. KV of more than the present policy is for those alone whose
        spans say that more than one policy had part in them."""
        content, version = self.device[slot], self.scheduler.policy_version
        found = (content.prefix, content.cache_salt)
        assert found == (prefix, request.cache_salt), f"{request.request_id}: wrong KV at position {len(prefix) - 1}"
        versions = {span[0] for span in request.policy_spans}
        assert content.policy_versions == {version} or len(versions) > 1, f"{request.request_id}: KV of older policies"

    def audit(self) -> None:
        """Nothing that anybody may still read was overwritten: tables of running requests, and hittable blocks."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        if self.drafter is not None:
            self.drafter.audit()
        size = scheduler.config.block_size
        for request in [*scheduler.running_requests(), *scheduler.parked_requests()]:
            table = scheduler.kv.block_ids(request)
            tokens = tuple(request.token_ids)
            for position in range(request.num_computed_tokens):
                slot = table[position // size] * size + position % size
                self._check_slot(request, tokens[: position + 1], slot)
        for block_hash, block in scheduler.kv.pool.index.items():
            contents = [self.device[block.block_id * size + offset] for offset in range(size)]
            last = contents[-1]
            first = len(last.prefix) - size
            assert [content.prefix for content in contents] == [
                last.prefix[: first + offset + 1] for offset in range(size)
            ]
            assert all(content.policy_versions == {scheduler.policy_version} for content in contents), (
                "a block can be hit that is not purely of the present policy"
            )
            assert block_hash == slow_hash(last.prefix, size, scheduler.policy_version, last.cache_salt)


def slow_hash(prefix: Prefix, block_size: int, policy_version: int, cache_salt: str | None) -> bytes:
    """The hash of the full block that ends `prefix`, from the root."""
    value = root_hash(policy_version, None, cache_salt)
    for start in range(0, len(prefix), block_size):
        value = chained_hash(value, prefix[start : start + block_size])
    return value


def _copy_block(
    source: dict[int, SlotContent], source_block: int, target: dict[int, SlotContent], target_block: int, size: int
) -> None:
    """Copies a whole block, slots that hold nothing included."""
    contents = [source.get(source_block * size + offset) for offset in range(size)]
    for offset, content in enumerate(contents):
        target.pop(target_block * size + offset, None)
        if content is not None:
            target[target_block * size + offset] = content
