"""How many KV blocks fit: what a step takes at its peak, from steps that really run, and what is left beside it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.core.schedule import Draw, ScheduledSequence, SchedulePlan
from rollout.sampling_params import SamplingParams

_MARGIN = 64 << 20  # bytes of a device that stay free: fragments of the allocator, lazily loaded modules


@dataclass(frozen=True, slots=True)
class KVPoolSize:
    """Blocks of the device's pool and of the host's swap pool, the bytes of one block over all layers, and blocks of a
    drafter's own pool, which are smaller."""

    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    num_draft_blocks: int = 0


def short_step(num_tokens: int, num_rows: int, block_size: int, adapter_slot: int = -1) -> SchedulePlan:
    """One prompt of `num_tokens` with `num_rows` draws from its last token: enough to know the bytes of a token."""
    blocks = list(range(-(-num_tokens // block_size)))
    return SchedulePlan(
        sequences=[ScheduledSequence("profile", 0, [0] * num_tokens, blocks, adapter_slot=adapter_slot)],
        draws=[Draw("profile", 0, SamplingParams(), 0, index, num_tokens) for index in range(num_rows)],
        num_scheduled_tokens=num_tokens,
    )


def full_step(
    num_tokens: int, num_seqs: int, longest: int, block_size: int, adapter_slot: int = -1
) -> tuple[SchedulePlan, int]:
    """The largest step there can be, and the KV blocks that it writes: `num_tokens` tokens in as many sequences as can
    be (at most `num_seqs`), one draw from each, block tables as wide as those of sequences of `longest` tokens.

    More than `num_seqs` x `longest` tokens cannot be scheduled at once, so that the step may have fewer.
    """
    num_seqs = min(num_seqs, num_tokens)
    num_tokens = min(num_tokens, num_seqs * longest)
    lengths = [num_tokens // num_seqs + (index < num_tokens % num_seqs) for index in range(num_seqs)]
    width = -(-longest // block_size)
    plan, first = SchedulePlan(num_scheduled_tokens=num_tokens), 0
    for index, length in enumerate(lengths):
        own = list(range(first, first - (-length // block_size)))
        first += len(own)
        # Blocks beyond a sequence's own tokens are never read: only the table's width matters.
        block_ids = own + own[:1] * (width - len(own))
        plan.sequences.append(
            ScheduledSequence(f"profile-{index}", 0, [0] * length, block_ids, adapter_slot=adapter_slot)
        )
        plan.draws.append(Draw(f"profile-{index}", index, SamplingParams(), 0, 0, length))
    return plan, first


def split_budget(budget: int, block_bytes: int, draft_block_bytes: int, most_draft_blocks: int) -> tuple[int, int]:
    """Blocks of the engine's pool and of a drafter's own, from one budget of bytes. The drafter's has at most
    `most_draft_blocks`, and not more than the engine's."""
    both = budget // (block_bytes + draft_block_bytes)
    if both < most_draft_blocks:
        return both, both
    return (budget - most_draft_blocks * draft_block_bytes) // block_bytes, most_draft_blocks


def kv_budget(total: int, utilization: float, weights: int, step: int, free: int | None) -> int:
    """Bytes for the KV pool, 0 or less where nothing is left.

    The engine takes `utilization` of the device's `total` bytes for its `weights`, a `step` and the pool. Where the
    device knows its `free` bytes (weights are already there, the step is not), the pool may not need more than those.
    """
    budget = int(total * utilization) - weights - step
    return budget if free is None else min(budget, free - step - _MARGIN)
