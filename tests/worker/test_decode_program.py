"""Recorded decode steps give the bits of the model's Python, and step aside where they cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from rollout import LLM, RequestOutput, SamplingParams
from rollout.core.schedule import Draw, ScheduledSequence, SchedulePlan, StepResult
from rollout.worker.decode_program import MOST_DECODE_ROWS
from rollout.worker.runner import Runner
from tests.support.tiny import make_tiny_llama

PROMPTS = [[7, 8, 9], [7, 8, 9, 10, 11, 12, 13], [20], list(range(40, 60))]
PARAMS = SamplingParams(max_tokens=14, seed=3, ignore_eos=True, n=2)


def runner_of(llm: LLM) -> Runner:
    return llm.collective_rpc(lambda worker: worker.runner)[0]


def assert_equal(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        for a, b in zip(output.outputs, wanted.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert np.array_equal(a.raw_logprobs, b.raw_logprobs)
            assert np.array_equal(a.entropy, b.entropy)


def test_replayed_and_eager_steps_agree_bit_for_bit(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    eager = LLM(folder, kv_cache_memory="8MiB", block_size=4, enforce_eager=True)
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4)
    assert runner_of(eager).decode_programs is None
    expected = eager.generate(PROMPTS, PARAMS)
    for _ in range(2):
        assert_equal(llm.generate(PROMPTS, PARAMS), expected)
    programs = runner_of(llm).decode_programs
    assert programs is not None and programs.problem is None
    assert 8 in programs.recorded_sizes


def test_a_short_pool_of_blocks_changes_block_tables_and_nothing_else(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    expected = LLM(folder, kv_cache_memory="8MiB", block_size=4, enforce_eager=True).generate(PROMPTS, PARAMS)
    llm = LLM(folder, kv_cache_memory="100KiB", block_size=4)
    assert_equal(llm.generate(PROMPTS, PARAMS), expected)
    assert llm.get_metrics()["num_preemptions_total"] > 0


def test_hooks_on_modules_are_called_in_every_step(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    llm.generate(PROMPTS, PARAMS)
    seen: list[int] = []
    model = llm.collective_rpc(lambda worker: worker.model)[0]
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    handle.remove()
    assert seen == [3, 1, 1, 1, 1]


def test_a_forward_that_was_replaced_and_global_hooks_are_called_in_every_step(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    for _ in range(2):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    mlp = llm.collective_rpc(lambda worker: worker.model)[0].model.layers[0].mlp
    seen: list[int] = []
    forward = mlp.forward
    mlp.forward = lambda x, *rest: (seen.append(len(x)), forward(x, *rest))[1]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    del mlp.forward
    assert seen == [3, 1, 1, 1, 1]
    handle = register_module_forward_hook(lambda module, inputs, output: seen.append(0) if module is mlp else None)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    handle.remove()
    assert seen[5:] == [0] * 5


def test_a_model_that_computes_with_torch_runs_eagerly_and_says_why(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    expected = LLM(folder, kv_cache_memory="8MiB").generate(PROMPTS, PARAMS)
    llm = LLM(folder, kv_cache_memory="8MiB")
    model = llm.collective_rpc(lambda worker: worker.model)[0]
    forward = model.model.norm.forward
    changed = {"forward": lambda self, x, residual: forward(x * 1.0, residual)}
    model.model.norm.__class__ = type("Norm", (type(model.model.norm),), changed)
    for _ in range(2):
        assert_equal(llm.generate(PROMPTS, PARAMS), expected)
    programs = runner_of(llm).decode_programs
    assert programs is not None and programs.problem is not None
    assert "aten.mul" in programs.problem


def test_the_backend_in_force_decides(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB", kernels="reference")
    llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
    programs = runner_of(llm).decode_programs
    assert programs is not None and not programs.recorded_sizes


@pytest.mark.parametrize("level", [1, 2])
def test_programs_survive_sleep(level: int, tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    expected = llm.generate(PROMPTS, PARAMS)
    programs = runner_of(llm).decode_programs
    assert programs is not None
    sizes = set(programs.recorded_sizes)
    report = llm.sleep(level)
    assert report.released["workspace"] > 0
    llm.wake_up()
    if level == 2:
        llm.reload_weights()
    assert_equal(llm.generate(PROMPTS, PARAMS), expected)
    assert set(programs.recorded_sizes) == sizes


def test_outputs_do_not_change_when_the_workspace_is_used_again(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    first = llm.generate(PROMPTS, PARAMS)
    kept = [torch.tensor(completion.raw_logprobs) for output in first for completion in output.outputs]
    llm.generate([[5] * 9] * 3, PARAMS)
    now = [torch.tensor(completion.raw_logprobs) for output in first for completion in output.outputs]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def token_at(sequence: int, position: int) -> int:
    return 3 + (17 * sequence + 5 * position + position**2) % 120


def step_of(starts: list[int], lengths: list[int], block_size: int, rows: list[int] | None = None) -> SchedulePlan:
    """Sequence i, whose tokens follow from their positions, computes `lengths[i]` of them from `starts[i]` on, and
    draws from all of their rows, or from the `rows` that are given."""
    plan = SchedulePlan(num_scheduled_tokens=sum(lengths))
    width = -(-MOST_TOKENS // block_size)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = start + length
        tokens = [token_at(number, position) for position in range(start, end)]
        blocks = [number * width + block for block in range(-(-end // block_size))]
        plan.sequences.append(ScheduledSequence(f"r{number}", start, tokens, blocks))
        params = SamplingParams(temperature=[0.0, 0.7, 1.0][number % 3], top_k=[0, 20][number % 2])
        for row in range(length) if rows is None else rows:
            place = start + 1 + (row if row >= 0 else length - 1)
            plan.draws.append(Draw(f"r{number}", number, params, 5, number, place, row=row))
    return plan


def drawn(result: StepResult, plan: SchedulePlan) -> dict[tuple[str, int], tuple[float, ...]]:
    """Everything that was drawn, by request and position."""
    arrays = (result.raw_logprobs, result.sampled_logprobs, result.kept_mass, result.entropy)
    rows = zip(result.token_ids.tolist(), *(array.tolist() for array in arrays), strict=True)
    return {(draw.request_id, draw.position): row for draw, row in zip(plan.draws, rows, strict=True)}


def eager_one_by_one(runner: Runner, block_size: int) -> dict[tuple[str, int], tuple[float, ...]]:
    """All draws of all sequences by eager steps with one row a sequence, after which the pool holds all keys."""
    programs, runner.decode_programs = runner.decode_programs, None
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for position in range(MOST_TOKENS):
        plan = step_of([position] * NUM_SEQUENCES, [1] * NUM_SEQUENCES, block_size)
        found |= drawn(runner.execute(plan), plan)
    runner.decode_programs = programs
    return found


MOST_TOKENS, NUM_SEQUENCES = 90, 5
# Orders matter: a step must not see what a longer one before it left in the buffers.
STEPS: list[tuple[list[int], list[int]]] = [
    ([60], [5]),
    ([7, 0, 70, 33, 15], [1, 1, 1, 1, 1]),
    ([62, 3], [2, 3]),
    ([63], [MOST_DECODE_ROWS]),
    ([15, 64, 31, 1], [5, 5, 5, 5]),
    ([0, 80, 48, 16, 72], [17, 1, 9, 2, 4]),
    ([80], [1]),
    ([14, 63], [4, 1]),
    ([5, 66, 62, 2], [1, 9, 3, 7]),
]


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "dtype": "bfloat16"},
        {"block_size": 16, "dtype": "float32"},
        {"block_size": 20, "dtype": "bfloat16", "kv_cache_dtype": "int8"},
        {"block_size": 16, "dtype": "bfloat16", "quantization": "int8"},
    ],
    ids=str,
)
def test_steps_with_several_rows_a_sequence_give_the_bits_of_one_row_each(
    options: dict[str, Any], tmp_path: Path
) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB", max_num_seqs=6, **options)
    runner = runner_of(llm)
    programs = runner.decode_programs
    assert programs is not None
    expected = eager_one_by_one(runner, options["block_size"])
    for starts, lengths in STEPS * 2:
        plan = step_of(starts, lengths, options["block_size"])
        found = drawn(runner.execute(plan), plan)
        assert len(found) == sum(lengths) and found == {key: expected[key] for key in found}
    # Which rows belong to which sequence takes no recording of its own.
    assert programs.problem is None and programs.recorded_sizes == [1, 5, 17, 20, 33]


def test_steps_with_more_undrawn_rows_or_many_rows_are_left_to_the_model(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB", block_size=16, max_num_seqs=2)
    runner = runner_of(llm)
    expected = eager_one_by_one(runner, 16)
    programs = runner.decode_programs
    assert programs is not None
    for plan in (
        step_of([30], [4], 16, rows=[-1]),  # the end of a prompt
        step_of([30], [3], 16, rows=[-1, -1, -1]),  # that of three samples
        step_of([30, 2], [4, 4], 16, rows=[1, 2]),
        step_of([30], [MOST_DECODE_ROWS + 1], 16),
        step_of([30, 9, 4], [MOST_DECODE_ROWS, MOST_DECODE_ROWS, 1], 16),  # more than the buffers hold
    ):
        found = drawn(runner.execute(plan), plan)
        assert found and found == {key: expected[key] for key in found}
    assert programs.problem is None and programs.recorded_sizes == []
    plan = step_of([30, 2], [3, 3], 16, rows=[1, 2])  # a row of each whose token is known: its KV was elsewhere
    for _ in range(2):
        found = drawn(runner.execute(plan), plan)
        assert found and found == {key: expected[key] for key in found}
    assert programs.problem is None and programs.recorded_sizes == [6]


def test_forced_tokens_in_small_chunks_are_computed_by_recorded_steps(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    (drawn_freely,) = LLM(folder, kv_cache_memory="4MiB").generate([7, 8, 9], params)
    forced = replace(params, forced_token_ids=drawn_freely.outputs[0].token_ids[:8])
    llm = LLM(folder, kv_cache_memory="4MiB", block_size=4, max_num_batched_tokens=3)
    assert_equal(llm.generate([7, 8, 9], forced), [drawn_freely])
    programs = runner_of(llm).decode_programs
    assert programs is not None and programs.recorded_sizes == [1, 3]
