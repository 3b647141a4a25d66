"""Recorded decode steps give the bits of the model's Python, and step aside where they cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from rollout import LLM, RequestOutput, SamplingParams
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
