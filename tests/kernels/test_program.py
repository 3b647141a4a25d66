"""Recorded programs: the same bits as direct calls, for new inputs, in memory that is shared and never leaks."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.cpu.program import NotRecordableError, Program, Workspace, record
from tests.support.kernels import assert_same_bits, num_threads, randn

WEIGHT = randn(96, 64, dtype=torch.bfloat16, seed=1)
DOWN = randn(64, 48, dtype=torch.bfloat16, seed=2)
NORM = randn(64, dtype=torch.bfloat16, seed=3)


def small_network(x: torch.Tensor) -> torch.Tensor:
    normed, total = rk.rms_norm(x, NORM, 1e-5)
    gated = rk.silu_and_mul(rk.linear(normed, WEIGHT))
    return rk.rms_norm(rk.linear(gated, DOWN, out_dtype=torch.float32), NORM, 1e-5, total)[1]


def workspace(num_bytes: int = 1 << 20) -> Workspace:
    return Workspace(torch.full((num_bytes,), 0x7F, dtype=torch.uint8))


@torch.inference_mode()
def poison(out: torch.Tensor) -> None:
    out.fill_(torch.nan)


def test_a_replay_computes_what_direct_calls_compute_for_new_inputs() -> None:
    x = randn(5, 64, seed=4)
    out, program = record(lambda: small_network(x), workspace())
    assert_same_bits(out, small_network(x))
    for seed in (5, 6):
        x.copy_(randn(5, 64, seed=seed))
        poison(out)
        with num_threads(1 + seed % 2):
            program.replay()
        assert_same_bits(out, small_network(x))


def test_programs_share_one_workspace() -> None:
    memory = workspace()
    inputs = [randn(rows, 64, seed=rows) for rows in (7, 1, 3)]
    recorded = [record(lambda x=x: small_network(x), memory) for x in inputs]
    for index in (2, 0, 1, 0):
        out, program = recorded[index]
        program.replay()
        assert_same_bits(out, small_network(inputs[index]))


def test_a_program_keeps_its_workspace_and_its_inputs_alive() -> None:
    def recorded() -> tuple[torch.Tensor, Program]:
        x = randn(300, 64, seed=4)
        return record(lambda: small_network(x), workspace())

    expected = small_network(randn(300, 64, seed=4))
    out, program = recorded()
    gc.collect()
    others = [torch.full((300, 64), torch.nan) for _ in range(50)]
    poison(out)
    program.replay()
    assert_same_bits(out, expected)
    assert all(other.isnan().all() for other in others)


def test_memory_is_used_again_once_no_tensor_needs_it() -> None:
    x = randn(4, 64, seed=1)

    def deep() -> torch.Tensor:
        total = x
        for _ in range(50):
            total = small_network(total)
        return total

    once, many = workspace(), workspace()
    record(lambda: small_network(x), once)
    out, program = record(deep, many)
    assert many.peak_bytes <= once.peak_bytes + 2 * x.nbytes
    expected = deep()
    poison(out)
    program.replay()
    assert_same_bits(out, expected)


def test_views_keep_their_memory_alive() -> None:
    memory = workspace(4096)
    first = memory.empty(16, 16, dtype=torch.float32)[2:4]
    second = memory.empty(16, 16, dtype=torch.float32)
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.eq(1.0).all()
    address = first.data_ptr() - 2 * 16 * 4
    del first
    assert memory.empty(16, 16, dtype=torch.float32).data_ptr() == address


def test_what_a_replay_could_not_do_is_refused() -> None:
    x = randn(2, 64, seed=1)
    cases: list[tuple[Callable[[], torch.Tensor], str]] = [
        (lambda: small_network(x) + 1, "aten.add"),
        (lambda: small_network(x.clone()), "aten.clone"),
        (lambda: rk.linear(torch.empty(2, 64, dtype=torch.bfloat16), WEIGHT), "aten.empty"),
        (lambda: rk.token_logprobs(small_network(x), torch.tensor([1, 2])), "not a view|cannot be part"),
    ]
    for function, message in cases:
        with pytest.raises(NotRecordableError, match=message):
            record(function, workspace())
    with pytest.raises(NotRecordableError, match=r"workspace of 256 bytes is too small"):
        record(lambda: small_network(x), workspace(256))
    assert_same_bits(small_network(x), record(lambda: small_network(x), workspace())[0])  # nothing is left behind


def test_a_value_out_of_range_stops_a_replay() -> None:
    ids = torch.tensor([1, 2])
    _, program = record(lambda: rk.embedding(ids, WEIGHT), workspace())
    ids[1] = 96
    with pytest.raises(RuntimeError, match=r"call 0 of the program \(embedding\)"):
        program.replay()


def test_times_name_every_kernel_and_count_its_calls() -> None:
    x = randn(3, 64, seed=1)
    out, program = record(lambda: small_network(x), workspace())
    expected = out.clone()
    poison(out)
    times = program.replay_timed()
    assert {name: calls for name, (calls, _) in times.items()} == {"rms_norm": 2, "linear": 2, "silu_and_mul": 1}
    assert all(seconds > 0 for _, seconds in times.values())
    assert_same_bits(out, expected)
