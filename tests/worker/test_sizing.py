"""The steps that are measured at the start, and the arithmetic of what is left for KV."""

from __future__ import annotations

import pytest

from rollout.platform.platform import platform_for
from rollout.worker.sizing import full_step, kv_budget, short_step


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "longest", "block_size"),
    [(2048, 256, 8192, 16), (100, 7, 64, 16), (5, 256, 64, 4), (4096, 2, 512, 32)],
)
def test_the_largest_step_is_full_and_its_tables_are_as_wide_as_can_be(
    num_tokens: int, num_seqs: int, longest: int, block_size: int
) -> None:
    plan, num_blocks = full_step(num_tokens, num_seqs, longest, block_size)
    lengths = [len(sequence.token_ids) for sequence in plan.sequences]
    assert len(lengths) == min(num_seqs, num_tokens)
    assert sum(lengths) == plan.num_scheduled_tokens == min(num_tokens, num_seqs * longest)
    assert max(lengths) - min(lengths) <= 1 and max(lengths) <= longest
    assert [draw.sequence_index for draw in plan.draws] == list(range(len(lengths)))
    written: set[int] = set()
    for sequence in plan.sequences:
        assert len(sequence.block_ids) == -(-longest // block_size)
        own = set(sequence.block_ids[: -(-len(sequence.token_ids) // block_size)])
        assert own.isdisjoint(written)  # no two sequences write one block
        written |= own
    assert written == set(range(num_blocks))


def test_the_short_step_is_one_prompt_with_many_draws() -> None:
    plan = short_step(100, 3, 16)
    assert len(plan.sequences) == 1 and len(plan.sequences[0].token_ids) == 100
    assert plan.sequences[0].block_ids == list(range(7))
    assert [draw.sequence_index for draw in plan.draws] == [0, 0, 0]


def test_the_pool_gets_its_share_but_not_more_than_is_free() -> None:
    gib = 1 << 30
    assert kv_budget(80 * gib, 0.5, 10 * gib, 2 * gib, None) == 28 * gib
    assert kv_budget(80 * gib, 0.5, 10 * gib, 2 * gib, 70 * gib) == 28 * gib
    assert kv_budget(80 * gib, 0.9, 10 * gib, 2 * gib, 30 * gib) == 28 * gib - (64 << 20)  # others use the device too
    assert kv_budget(80 * gib, 0.1, 10 * gib, 2 * gib, 70 * gib) < 0


def test_a_device_that_is_not_there_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.platform.cuda.unavailable_reason", lambda: "torch was built without CUDA")
    with pytest.raises(ValueError, match="device='cuda' cannot be used: torch was built without CUDA"):
        platform_for("cuda")
    assert platform_for("auto").device.type == platform_for("cpu").device.type == "cpu"
