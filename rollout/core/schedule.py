"""The plan of one step, made by the scheduler, and its result, made by the runner. Plain data, no tensors.

What there is one of for each sequence and each token is a `msgspec.Struct`: made in a tenth of the time of a frozen
dataclass, and unknown to the garbage collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rollout.sampling.state import SampleState
from rollout.sampling_params import SamplingParams


class Draw(msgspec.Struct, frozen=True, gc=False):
    """One token to be drawn after a forward pass, from any row of it.

    Several draws may name the same sequence: the forks of a prompt draw their first token from the leader's last row,
    and tokens that are known in advance are drawn one from each row. Draws are in the order of their rows.
    """

    request_id: str  # who gets the token
    sequence_index: int  # index into SchedulePlan.sequences
    params: SamplingParams
    seed: int
    sample_index: int
    position: int  # absolute position of the token to be drawn, = number of tokens before it
    banned_token_ids: tuple[int, ...] = ()  # ids with probability zero (min_tokens)
    state: SampleState | None = None  # where the draw takes more than this (penalties, masks, processors, grammars)
    row: int = -1  # which of the sequence's scheduled tokens it follows; -1 for the last
    forced_token_id: int = -1  # where not -1 this token is taken, and reported on as if it had been drawn
    is_beam: bool = False  # what counts is the most likely tokens of the raw distribution
    draft_token_ids: Sequence[int] = ()  # guessed tokens: those before it that stand behind the known ones

    @property
    def num_known_tokens(self) -> int:
        """How many of the tokens before it are the sample's own, and no guesses."""
        return self.position - len(self.draft_token_ids)


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request that this step computes: `request.token_ids[start : start + len(token_ids)]`."""

    request_id: str
    start: int  # position of the first token = num_computed_tokens
    token_ids: list[int]
    block_ids: list[int]  # block table, covering at least start + len(token_ids) tokens
    # Scoring: the known token after each scheduled token (the last may be missing at the end of the prompt). Empty
    # unless the request scores its prompt.
    target_token_ids: Sequence[int] = ()
    adapter_slot: int = -1  # where its LoRA adapter lies, -1 for none
    num_top_logprobs: int | None = None  # scoring: most likely tokens to return beside each target, -1 for all
    # Of a guess in the place of a draft, the only token of its sequence: at which place of the block table its KV is
    # written, behind the drafts. -1: at its own.
    last_place: int = -1


@dataclass(slots=True)
class SchedulePlan:
    """What one step does, in this order: swap out, swap in, copy blocks, forward over all sequences, draw."""

    sequences: list[ScheduledSequence] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination), copy-on-write
    num_scheduled_tokens: int = 0
    num_alternatives: int = 0  # of the sequences, the last ones: guesses in the place of drafts of the others

    @property
    def num_decoding(self) -> int:
        """Sequences without the alternatives."""
        return len(self.sequences) - self.num_alternatives

    @property
    def is_decode(self) -> bool:
        """Whether every scheduled token is drawn behind, but for one at most of each sequence."""
        num_missing = self.num_scheduled_tokens - len(self.draws)
        if num_missing == 0:
            return True
        if not 0 < num_missing <= len(self.sequences):
            return False
        num_draws = [0] * len(self.sequences)
        for draw in self.draws:
            num_draws[draw.sequence_index] += 1
        return all(
            0 <= len(sequence.token_ids) - count <= 1 and count > 0
            for sequence, count in zip(self.sequences, num_draws, strict=True)
        )

    @property
    def is_empty(self) -> bool:
        return not self.sequences


class DraftSequence(msgspec.Struct, frozen=True, gc=False):
    """What a drafter with weights computes for one request before a step: the known tokens that it has not seen yet,
    `request.token_ids[start : start + len(token_ids)]`, and then its own guesses. Of a drafter without KV the last
    known token alone."""

    request_id: str
    start: int  # position of the first token whose KV the drafter lacks
    token_ids: list[int]  # up to the last known one, unless `num_drafts` is 0: a chunk of what is to be caught up
    block_ids: list[int]  # table in the drafter's own pool, for start + len(token_ids) + num_drafts - 1 tokens
    target_block_ids: list[int]  # the request's table in the engine's pool, where features of computed tokens lie
    num_drafts: int
    params: SamplingParams
    seed: int
    sample_index: int


@dataclass(slots=True)
class DraftPlan:
    """What a drafter with weights does before a step. No block of its own pool is ever copied: full ones are shared."""

    sequences: list[DraftSequence] = field(default_factory=list)


@dataclass(slots=True)
class TopLogprobs:
    """The most likely tokens at some positions, and the ranks of the tokens that really stand there.

    All of a position lies in one row of `packed`, int32 [P, 2 k + m + 1], so that to keep it is to copy bytes:
    `token_ids` [P, k] and `logprobs` float32 [P, k], most likely first (equal ones by their id); `chosen` float32
    [P, m], logprobs of the ids that the request has named; `ranks` [P]: 1 + the number of tokens with a larger logit.
    """

    packed: np.ndarray
    num_top: int  # k
    num_chosen: int = 0  # m

    @classmethod
    def of(cls, token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, chosen: np.ndarray) -> TopLogprobs:
        """From the four arrays."""
        floats = (np.ascontiguousarray(part, np.float32).view(np.int32) for part in (logprobs, chosen))
        parts = (np.asarray(token_ids, np.int32), *floats, np.asarray(ranks, np.int32)[:, None])
        return cls(np.concatenate(parts, axis=1), token_ids.shape[1], chosen.shape[1])

    @property
    def token_ids(self) -> np.ndarray:
        return self.packed[:, : self.num_top]

    @property
    def logprobs(self) -> np.ndarray:
        return self.packed.view(np.float32)[:, self.num_top : 2 * self.num_top]

    @property
    def chosen(self) -> np.ndarray:
        return self.packed.view(np.float32)[:, 2 * self.num_top : -1]

    @property
    def ranks(self) -> np.ndarray:
        return self.packed[:, -1]

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, positions: slice) -> TopLogprobs:
        return TopLogprobs(self.packed[positions], self.num_top, self.num_chosen)


def join(parts: Sequence[TopLogprobs]) -> TopLogprobs:
    """Consecutive positions as one."""
    return TopLogprobs(np.concatenate([part.packed for part in parts]), parts[0].num_top, parts[0].num_chosen)


@dataclass(slots=True)
class StepResult:
    """What the runner returns for a plan: arrays over `plan.draws`, and the scores of scoring sequences."""

    token_ids: np.ndarray  # int64 [num_draws]; -1 where the logits were not numbers
    raw_logprobs: np.ndarray  # float32 [num_draws], temperature 1, nothing filtered
    sampled_logprobs: np.ndarray  # float32 [num_draws], of the distribution that was drawn from
    kept_mass: np.ndarray  # float32 [num_draws], tempered probability mass that the filters kept
    entropy: np.ndarray  # float32 [num_draws], nats, of the tempered distribution before filters
    # index of the draw -> stop reason, where its sample ends with this token since its grammar allows no more
    completed: dict[int, int | None] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # index of the draw -> why it has no token
    # index of the draw -> the most likely tokens and their probabilities, of some draws, where drafters learn from them
    likely: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    # request_id -> float32 [len(target_token_ids)], raw logprob of each target token
    prompt_logprobs: dict[str, np.ndarray] = field(default_factory=dict)
    # index of the draw -> one position, where `params.logprobs` or `logprob_token_ids` ask for it
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    # request_id -> a position a target token, where `params.prompt_logprobs` asks for it
    prompt_top_logprobs: dict[str, TopLogprobs] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerStats:
    """Gauges and counters of the scheduler, cheap enough to read at every step."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0  # since start
    prefix_cache_queries: int = 0  # prompt tokens looked up since start
    prefix_cache_hits: int = 0  # prompt tokens found since start
    num_slots_allocated: int = 0  # KV slots of blocks in use now, each block counted once
    num_slots_used: int = 0  # of these, slots that hold a token's KV
    num_beam_tokens: int = 0  # sampled by beam searches since start: one a beam and step
    num_draft_blocks: int = 0  # of a drafter's own pool
    num_free_draft_blocks: int = 0
    num_drafter_tokens: int = 0  # known tokens that a drafter with weights has computed since start, its guesses aside
