"""Makes recorded and captured decode steps for a runner, once it has its pool."""

from __future__ import annotations

import torch

from rollout.platform.platform import Memory, Platform
from rollout.worker.decode_program import DecodePrograms
from rollout.worker.graphs import DecodeGraphs
from rollout.worker.runner import Runner


def decode_graphs(runner: Runner, max_rows: int, max_blocks: int, platform: Platform) -> DecodeGraphs:
    """Steps of up to `max_rows` rows, over sequences of up to `max_blocks` blocks, to be captured when they come."""
    return DecodeGraphs(
        runner.model,
        runner.kv_caches,
        runner.block_size,
        max_rows,
        max_blocks,
        runner.inputs,
        platform.step_capture(),
        platform.device,
        features=runner.features,
    )


def decode_programs(
    runner: Runner, max_rows: int, max_blocks: int, platform: Platform, owner: str
) -> tuple[DecodePrograms, Memory]:
    """The same on a CPU, to be recorded; and the memory of their activations, for the ledger."""
    logits = 4 * max_rows * runner.model.shape.vocab_size
    # No page is held before it is written, so the generous part costs nothing where it is not needed.
    memory = platform.memory(owner, 2 * logits + (256 << 20), huge_pages=False)
    programs = DecodePrograms(
        runner.model,
        runner.kv_caches,
        runner.block_size,
        max_rows,
        max_blocks,
        memory.carve((memory.num_bytes,), torch.uint8),
        features=runner.features,
    )
    return programs, memory
