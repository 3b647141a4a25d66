"""What a step takes at its peak besides weights and KV, from steps that really run on a small pool of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rollout.core.schedule import ScheduledSequence, SchedulePlan
from rollout.platform.platform import Platform
from rollout.worker.graphs import DecodeGraphs
from rollout.worker.pool_layout import PoolLayout, zeros_on
from rollout.worker.runner import Runner
from rollout.worker.sizing import full_step, short_step


@dataclass(frozen=True, slots=True)
class LargestStep:
    """How large a step can be. `adapter_slot`: 0 where its rows may have LoRA adapters, which takes more memory."""

    num_tokens: int
    num_seqs: int
    num_logits: int  # rows of logits, of which a step with several rows a sequence has more than sequences
    longest: int  # tokens of a sequence
    adapter_slot: int = -1


@contextmanager
def set_aside(runner: Runner) -> Iterator[None]:
    """The runner without its pool, features and recorded steps, which it has again afterwards."""
    kept = runner.kv_caches, runner.features, runner.decode_programs, runner.decode_graphs
    runner.features = runner.decode_programs = runner.decode_graphs = None
    try:
        yield
    finally:
        runner.kv_caches, runner.features, runner.decode_programs, runner.decode_graphs = kept


def measure_peak(
    runner: Runner, layout: PoolLayout, platform: Platform, step: LargestStep, execute: Callable[[SchedulePlan], object]
) -> int:
    """Bytes of the largest step's activations and logits: from the step itself, where the device measures exactly, or
    from a shorter one. The runner is set aside, and is left with a pool for the step."""
    zeros = zeros_on(platform.device)
    most = platform.max_profile_tokens
    if most is None:
        plan, num_blocks = full_step(step.num_tokens, step.num_seqs, step.longest, layout.block_size, step.adapter_slot)
        runner.kv_caches = layout.caches(num_blocks, zeros)
        return platform.measure_peak(lambda: execute(plan))
    shape = runner.model.shape
    tokens = min(most, step.num_tokens, shape.max_position_embeddings)
    plan = short_step(tokens, min(step.num_seqs, tokens), layout.block_size, step.adapter_slot)
    runner.kv_caches = layout.caches(-(-tokens // layout.block_size), zeros)
    measured = platform.measure_peak(lambda: execute(plan))
    return int(measured / tokens * step.num_tokens) + 4 * step.num_logits * shape.vocab_size


def measure_graphs(graphs: DecodeGraphs, adapter_slot: int) -> int:
    """Bytes of the whole ladder of captured steps: its two largest are captured, and all but the first taken to be as
    large as the second, since they share its memory pool. Nothing stays captured."""
    sizes: list[int] = []
    for size in graphs.ladder[:-3:-1]:
        sequences = [ScheduledSequence("profile", 0, [0], [0], adapter_slot=adapter_slot)] * size
        with torch.inference_mode():
            graphs.run(sequences)
        sizes.append(graphs.num_bytes)
    graphs.release()
    more = sizes[1] - sizes[0] if len(sizes) > 1 else 0
    return sizes[0] + more * (len(graphs.ladder) - 1)
