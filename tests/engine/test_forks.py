"""Forks through `LLM`: a branch is the sample that is forced along its parent's tokens, wherever it leaves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout import LLM, RequestOutput, RolloutTree, SamplingParams
from tests.engine.test_resume import ARRAYS, PARAMS, PROMPT, assert_same
from tests.support.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True, tokenizer=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="8MiB", enable_prefix_caching=False)


def forced_alone(reference: LLM, output: RequestOutput, index: int, params: SamplingParams) -> None:
    """Sample `index` of a fork's output is the sample that is forced along what it has from its parent."""
    sample = output.outputs[index]
    forced = sample.token_ids[: sample.branch_position] or None
    alone = replace(params, n=1, seed=sample.seed, first_sample_index=sample.sample_index, forced_token_ids=forced)
    assert_same(sample, reference.generate(output.prompt_token_ids, alone)[0].outputs[0])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"enable_prefix_caching": False},
        {"block_size": 1},
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"kv_cache_memory": 9 * 16 * 1024, "block_size": 4},
        {"kv_cache_memory": 9 * 16 * 1024, "block_size": 4, "preemption_mode": "swap", "swap_space": "1MiB"},
    ],
    ids=lambda config: " ".join(config) or "default",
)
def test_forks_of_running_and_finished_samples(folder: Path, reference: LLM, config: dict[str, object]) -> None:
    # case SC-01
    llm = LLM(folder, **{"kv_cache_memory": "8MiB", "block_size": 4, **config})  # type: ignore[arg-type]
    (root_id,) = llm.enqueue(PROMPT, PARAMS)
    root = llm._delivery.groups[root_id]
    while min(sample.num_output_tokens for sample in root.samples) < 9:
        llm.step()
    children = [llm.fork(root_id, at=at, n=2, sample=at % 3) for at in (0, 4, 7)]
    children.append(llm.fork(root_id))
    for _ in range(4):
        llm.step()
    grandchild = llm.fork(children[1], at=4, n=3)
    outputs = {output.request_id: output for output in llm.wait_for_completion()}
    finished = outputs[root_id]
    late = llm.fork(finished, 11, 2, replace(PARAMS, n=2), sample=1)
    outputs |= {output.request_id: output for output in llm.wait_for_completion()}
    indices = []
    for request_id in (*children, grandchild, late):
        output = outputs[request_id]
        for index, sample in enumerate(output.outputs):
            forced_alone(reference, output, index, PARAMS)
            parent_id, parent_index = sample.parent or ("", -1)
            (parent,) = [other for other in outputs[parent_id].outputs if other.sample_index == parent_index]
            at = sample.branch_position
            assert sample.token_ids[:at] == parent.token_ids[:at]
            assert sample.token_ids != parent.token_ids
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(sample, name)[:at], getattr(parent, name)[:at])
            indices.append(sample.sample_index)
    assert sorted(indices) == list(range(3, 3 + len(indices)))
    assert [outputs[request_id].outputs[0].parent for request_id in (*children, grandchild, late)] == [
        (root_id, 0), (root_id, 1), (root_id, 1), (root_id, 0), (children[1], 5), (root_id, 1)
    ]  # fmt: skip
    plain = reference.generate(PROMPT, PARAMS)[0]
    for sample, alone in zip(finished.outputs, plain.outputs, strict=True):
        assert_same(sample, alone)
    llm.engine.scheduler.check_integrity()
    if config.get("kv_cache_memory"):
        assert llm.get_metrics()["num_preemptions_total"] > 0
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_a_fork_shares_the_kv_of_its_running_parent_without_a_cache(folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4, enable_prefix_caching=False)
    (root_id,) = llm.enqueue(PROMPT, replace(PARAMS, n=1))
    for _ in range(10):
        llm.step()
    computed, in_use = llm.engine.counters.num_computed_tokens, llm.engine.scheduler.stats()
    llm.fork(root_id, n=4)
    llm.step()
    assert (
        llm.engine.counters.num_computed_tokens == computed + 2
    )  # the parent's next, and the row that forks draw from
    now = llm.engine.scheduler.stats()
    assert now.num_running == 5
    assert in_use.num_free_blocks - now.num_free_blocks <= 2
    llm.step()
    now = llm.engine.scheduler.stats()
    assert in_use.num_free_blocks - now.num_free_blocks <= 6  # a partial block each, none of the 4 full ones
    llm.wait_for_completion()


def test_a_fork_can_be_forced_along_other_tokens(folder: Path, reference: LLM) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4)
    (root_id,) = llm.enqueue(PROMPT, PARAMS)
    for _ in range(8):
        llm.step()
    begun = llm._delivery.groups[root_id].samples[0].output_token_ids
    other = replace(PARAMS, n=1, seed=None, forced_token_ids=[*begun[:3], 50, 51])
    fork_id = llm.fork(root_id, 3, 2, other)
    output = {output.request_id: output for output in llm.wait_for_completion()}[fork_id]
    for index, sample in enumerate(output.outputs):
        assert sample.token_ids[:5] == [*begun[:3], 50, 51]
        assert (sample.num_forced_tokens, sample.seed) == (5, 5)
        forced = replace(other, seed=5, first_sample_index=3 + index)
        assert_same(sample, reference.generate(PROMPT, forced)[0].outputs[0])


def test_what_cannot_be_forked_is_refused(folder: Path) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4)
    ends = SamplingParams(max_tokens=8, seed=1, stop_token_ids=[9], forced_token_ids=[7, 9])
    (request_id,) = llm.enqueue(PROMPT, ends)
    (stopped,) = llm.step()
    refusals = [
        ((request_id,), {}, "is not in flight: give its RequestOutput"),
        ((stopped, 1), {}, "sampling_params=None is not valid"),
        (
            (stopped, 3),
            {"sampling_params": PARAMS},
            "at=3 is not valid: it must be from 0 to 1, since",
        ),
        ((stopped, -1), {"sampling_params": PARAMS}, "at=-1 is not valid"),
        ((stopped, 1, 0), {"sampling_params": PARAMS}, "n=0 is not valid"),
        ((stopped, 1, 2), {"sampling_params": PARAMS}, r"sampling_params.n=3 is not valid: it must be 1, or n=2"),
        ((stopped, 1), {"sample": 1}, "sample=1 is not valid: it must be from 0 to 0"),
        ((stopped, 1), {"sampling_params": SamplingParams(max_tokens=1)}, "max_tokens=1 is not valid"),
        ((stopped, 1), {"sampling_params": SamplingParams(forced_token_ids=[8])}, "forced_token_ids is not valid"),
        ((stopped, 1), {"sampling_params": SamplingParams(), "priority": 1}, "priority is not used"),
    ]
    for positional, named, message in refusals:
        with pytest.raises(ValueError, match=message):
            llm.fork(*positional, **named)  # type: ignore[arg-type]
    assert llm.num_unfinished == 0
    llm.fork(stopped, 1, sampling_params=SamplingParams(max_tokens=4))
    assert len(llm.wait_for_completion()[0].outputs[0].token_ids) <= 4


@pytest.mark.parametrize("budget", [5, 64])
def test_the_most_likely_tokens_come_along(folder: Path, budget: int) -> None:
    # case LP-04
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4, max_num_batched_tokens=budget)
    params = replace(PARAMS, logprobs=3, logprob_token_ids=[9, 4], prompt_logprobs=2)
    (whole,) = llm.generate(PROMPT, params)
    (forced,) = llm.generate(PROMPT, replace(params, n=1, forced_token_ids=whole.outputs[0].token_ids[:13]))
    assert_same(forced.outputs[0], whole.outputs[0])
    assert forced.outputs[0].logprobs == whole.outputs[0].logprobs
    assert forced.prompt_logprobs == whole.prompt_logprobs
    (request_id,) = llm.enqueue(PROMPT, params)
    for _ in range(12):
        llm.step()
    fork_id = llm.fork(request_id, at=3, n=2, sample=1)
    llm.step()
    llm.abort([request_id])
    partial, fork = llm.wait_for_completion()
    (resumed,) = llm.resume(partial, params)
    assert resumed.prompt_logprobs == whole.prompt_logprobs
    for sample, wanted in zip(resumed.outputs, whole.outputs, strict=True):
        assert_same(sample, wanted)
        assert sample.logprobs == wanted.logprobs
    assert (fork.request_id, fork.prompt_logprobs) == (fork_id, None)
    for sample in fork.outputs:
        given = {"first_sample_index": sample.sample_index, "forced_token_ids": sample.token_ids[:3]}
        alone = replace(params, n=1, prompt_logprobs=None, **given)
        (wanted,) = llm.generate(PROMPT, alone)[0].outputs
        assert_same(sample, wanted)
        assert sample.logprobs == wanted.logprobs
        assert sample.logprobs is not None and len(sample.logprobs) == 20


def test_sample_indices_of_forks_are_not_chosen(folder: Path, reference: LLM) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB")
    params = replace(PARAMS, n=2, first_sample_index=3)
    (parent,) = llm.generate(PROMPT, params)
    with pytest.raises(ValueError, match="first_sample_index=9 is not valid: leave it at 0"):
        llm.fork(parent, 2, 1, replace(params, n=1, first_sample_index=9))
    assert llm.num_unfinished == 0
    for given in (params, replace(params, first_sample_index=0)):  # the parent's own may stay
        llm.fork(parent, 2, 2, given, sample=1)
    outputs = llm.wait_for_completion()
    assert [sample.sample_index for output in outputs for sample in output.outputs] == [5, 6, 7, 8]
    forced_alone(reference, outputs[1], 0, PARAMS)


def test_forks_with_another_seed_are_of_that_seed(folder: Path, reference: LLM) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB")
    (parent,) = llm.generate(PROMPT, PARAMS)
    llm.fork(parent, 2, 2, replace(PARAMS, n=2, seed=8))
    (output,) = llm.wait_for_completion()
    assert [(sample.seed, sample.sample_index) for sample in output.outputs] == [(8, 0), (8, 1)]
    forced_alone(reference, output, 0, PARAMS)


@pytest.mark.parametrize("wrong", [7, None, [7]])
def test_what_is_no_request_is_not_forked(reference: LLM, wrong: object) -> None:
    with pytest.raises(TypeError, match="it must be a request id or a RequestOutput"):
        reference.fork(wrong, at=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="RequestOutput"):
        RolloutTree.from_outputs(wrong)  # type: ignore[arg-type]


def test_a_tree_of_one_output(reference: LLM) -> None:
    (output,) = reference.generate(PROMPT, PARAMS)
    assert RolloutTree.from_outputs(output) == RolloutTree.from_outputs([output])
