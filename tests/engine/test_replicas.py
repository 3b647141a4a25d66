"""`LLM(data_parallel_size=2)`: engines in two processes do what one in this process does, bit for bit."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from transformers import RepetitionPenaltyLogitsProcessor

from rollout import (
    LLM,
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    generate_sessions,
)
from rollout.core.beam import BeamOptions
from rollout.engine.transfer import Unpacker, pack_family
from rollout.errors import EngineAsleepError, EngineClosedError
from rollout.request import Request
from tests.support.extension import (
    OwnError,
    delay_steps,
    fail_in_step,
    process_id,
    sum_of_parameter,
    torch_threads,
    unpicklable_result,
)
from tests.support.logits_processors import Favour
from tests.support.policies import InFlight, assert_is_beginning, assert_same_samples, random_prompt, slow_steps
from tests.support.processes import is_running
from tests.support.tiny import make_tiny_llama

EXTENSION = "tests.support.extension.WorkerExtension"
PROMPTS = [random_prompt(4 + 3 * seed, seed) for seed in range(6)]
LONG = SamplingParams(n=2, max_tokens=300, seed=5, ignore_eos=True)


@dataclass(frozen=True)
class Engines:
    """The same model in this process, and in two others."""

    one: LLM
    two: LLM

    def sleep_and_wake(self) -> None:
        self.two.sleep(1)
        self.two.wake_up()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("replicas"), tokenizer=True)
    options = {"kv_cache_memory": "4MiB", "block_size": 8, "worker_extension_cls": EXTENSION}
    with LLM(folder, **options) as one, LLM(folder, **options, data_parallel_size=2) as two:
        yield Engines(one, two)
        assert_closes_with_nothing_left(two)


def assert_closes_with_nothing_left(llm: LLM) -> None:
    """Here, and not in a test, since each engine costs seconds. Requests in flight end with what they have."""
    engine = llm._engine
    pids, folder = engine.process_ids, engine._group._folder  # type: ignore[attr-defined]
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    whole = llm.generate(PROMPTS, LONG)
    llm.collective_rpc(delay_steps, args=(0.02,))
    with InFlight(llm, PROMPTS, LONG) as flight:
        flight.wait_for_steps(10)
        llm.close()
    for part, full in zip(flight.outputs, whole, strict=True):
        for a, b in zip(part.outputs, full.outputs, strict=True):
            assert_is_beginning(a, b)
    assert not any(map(is_running, pids)) and not folder.exists()
    with pytest.raises(EngineClosedError, match="make a new LLM"):
        llm.generate(PROMPTS)
    with pytest.raises(EngineClosedError):
        llm.sleep(1)
    llm.close()  # nothing happens


def assert_same_outputs(mine: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    """Everything in the outputs but how much of a prompt was cached, which depends on where it ran."""
    assert_same_samples(mine, theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.prompt_token_ids, a.prompt, a.policy_version, a.receipt_id) == (
            b.prompt_token_ids,
            b.prompt,
            b.policy_version,
            b.receipt_id,
        )
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.text, x.finish_reason, x.stop_reason, x.seed, x.sample_index, x.policy_versions) == (
                y.text,
                y.finish_reason,
                y.stop_reason,
                y.seed,
                y.sample_index,
                y.policy_versions,
            )


# Generation


def test_searches_are_those_of_one_engine(engines: Engines) -> None:
    # case BS-01
    params = BeamSearchParams(4, 30, length_penalty=0.6, early_stopping="never")
    for mine, theirs in zip(
        engines.two.beam_search(PROMPTS, params), engines.one.beam_search(PROMPTS, params), strict=True
    ):
        assert (mine.error, mine.policy_version, mine.receipt_id) == (None, theirs.policy_version, theirs.receipt_id)
        assert mine.kv_blocks_saved > 0
        for a, b in zip(mine.sequences, theirs.sequences, strict=True):
            assert (a.output_token_ids, a.score, a.text, a.finish_reason) == (
                b.output_token_ids,
                b.score,
                b.text,
                b.finish_reason,
            )
            np.testing.assert_array_equal(a.output_logprobs, b.output_logprobs)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=4, max_tokens=40, seed=11),
        SamplingParams(n=3, max_tokens=60, stop=["e", "ab"], temperature=1.5, top_p=0.9, seed=3, logprobs=0),
        SamplingParams(temperature=0, max_tokens=20, seed=1, stop_token_ids=[7, 9], min_tokens=3),
        SamplingParams(
            n=2,
            max_tokens=30,
            seed=4,
            frequency_penalty=0.4,
            repetition_penalty=1.2,
            logit_bias={9: 2.0},
            allowed_token_ids=range(3, 120),
            bad_words=["a", "he"],
            thinking_token_budget=7,
            repetition_detection=RepetitionDetectionParams(3, 1, 3),
            logits_processors=[Favour(5, 1.5), RepetitionPenaltyLogitsProcessor(1.1)],
        ),
        SamplingParams(n=2, max_tokens=30, seed=4, ignore_eos=True, logits_processors=Favour(5, 1.5, limit=4)),  # type: ignore[arg-type]
        SamplingParams(
            n=2,
            max_tokens=30,
            seed=4,
            structured_outputs=StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", 7, None]}}),
        ),
        SamplingParams(max_tokens=9, ignore_eos=True, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ],
    ids=["samples", "stop strings", "greedy", "adjusted logits", "processor that fails", "schema", "choice"],
)
def test_outputs_are_those_of_one_engine_bit_for_bit(engines: Engines, params: SamplingParams) -> None:
    assert_same_outputs(engines.one.generate(PROMPTS, params), engines.two.generate(PROMPTS, params))
    assert engines.two.num_unfinished == 0


def test_a_bad_schema_is_refused_before_any_rank_hears_of_it(engines: Engines) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "nope"}))
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured_outputs.json=.*Invalid type: nope"):
        engines.two.generate(PROMPTS[:2], [SamplingParams(), bad])
    assert engines.two.num_unfinished == 0
    outputs = engines.two.generate(PROMPTS[:2], [SamplingParams(max_tokens=3), bad], on_invalid="return")
    assert outputs[0].error is None and "Invalid type" in (outputs[1].error or "")


def test_streams_join_to_the_outputs_of_one_engine(engines: Engines) -> None:
    # cases ST-01, SC-04
    params = SamplingParams(
        n=3, max_tokens=60, stop=["e", "ab"], seed=3, temperature=1.5, output_kind=RequestOutputKind.DELTA
    )
    whole = engines.one.generate(PROMPTS, params)
    texts: dict[tuple[int, int], str] = {}
    token_ids: dict[tuple[int, int], list[int]] = {}
    for output in engines.two.stream(PROMPTS, params):
        for delta in output.outputs:
            key = (int(output.request_id), delta.index)
            texts[key] = texts.get(key, "") + delta.text
            token_ids[key] = token_ids.get(key, []) + delta.token_ids
            assert len(delta.raw_logprobs) == len(delta.token_ids)
    assert [texts[key] for key in sorted(texts)] == [c.text for o in whole for c in o.outputs]
    assert [token_ids[key] for key in sorted(token_ids)] == [c.token_ids for o in whole for c in o.outputs]
    for _ in engines.two.stream(PROMPTS, LONG):
        break
    metrics = engines.two.get_metrics()
    assert engines.two.num_unfinished == metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage"] == 0


def test_sessions_go_on_as_with_one_engine(engines: Engines) -> None:
    # case PR-05
    params = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in range(4)]
    sessions = [
        [llm.session([{"role": "user", "content": "hi"}]) for _ in params] for llm in (engines.one, engines.two)
    ]
    for turn in range(2):
        for group in sessions:
            generate_sessions(group, params, use_tqdm=False)
            for session in group if turn == 0 else []:
                session.add([{"role": "user", "content": "and?"}])
    for mine, theirs in zip(*sessions, strict=True):
        assert mine.token_ids == theirs.token_ids and mine.turns == theirs.turns
        assert np.array_equal(mine.raw_logprobs, theirs.raw_logprobs)


def test_seeds_that_the_engine_gives_are_those_of_one_engine(tmp_path: Path, engines: Engines) -> None:
    params = SamplingParams(n=2, max_tokens=30)
    fresh = LLM(engines.one.config.model, kv_cache_memory="4MiB")
    first = engines.two.generate(PROMPTS, params)
    number = int(first[0].request_id)
    for _ in range(number):  # running numbers count prompts
        next(fresh._admission._numbers)
    assert_same_samples(fresh.generate(PROMPTS, params), first)


def test_chat_and_text_prompts_work(engines: Engines) -> None:
    conversation = [{"role": "user", "content": "hello there"}]
    params = SamplingParams(max_tokens=20, seed=2)
    assert_same_outputs(engines.one.chat(conversation, params), engines.two.chat(conversation, params))
    texts = ["the sea", "a hat"]
    assert_same_outputs(engines.one.generate(texts, params), engines.two.generate(texts, params))


def test_scores_are_those_of_one_engine(engines: Engines) -> None:
    mine, theirs = engines.two.score(PROMPTS), engines.one.score(PROMPTS)
    for a, b in zip(mine, theirs, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_logprobs_are_those_of_one_engine(engines: Engines) -> None:
    params = SamplingParams(n=2, max_tokens=20, seed=4, logprobs=3, logprob_token_ids=[7, 1], prompt_logprobs=2)
    mine, theirs = engines.two.generate(PROMPTS, params), engines.one.generate(PROMPTS, params)
    for llm in (engines.one, engines.two):
        llm.fork(theirs[1], at=2, n=3, sampling_params=replace(params, n=1, prompt_logprobs=None))
    (my_forks,), (their_forks,) = engines.two.wait_for_completion(), engines.one.wait_for_completion()
    for a, b in zip([*mine, my_forks], [*theirs, their_forks], strict=True):
        assert a.prompt_logprobs == b.prompt_logprobs and a.logprobs_mode == b.logprobs_mode
        assert all(x.logprobs == y.logprobs and x.logprobs for x, y in zip(a.outputs, b.outputs, strict=True))
    scores = [llm.score(PROMPTS, prompt_logprobs=2) for llm in (engines.one, engines.two)]
    assert [score.prompt_logprobs for score in scores[0]] == [score.prompt_logprobs for score in scores[1]]
    assert scores[0][2].prompt_logprobs == theirs[2].prompt_logprobs


def test_a_string_is_one_tag_on_every_rank(engines: Engines) -> None:
    with pytest.raises(ValueError, match="level=True is not valid"):
        engines.two.sleep(True)
    engines.two.sleep(1)
    with pytest.raises(ValueError, match=r"tags=\['kv'\] is not valid"):
        engines.two.wake_up("kv")
    engines.two.wake_up("kv_cache")
    assert not engines.two.is_sleeping


def test_each_prompt_goes_with_its_samples_to_the_rank_with_least_work(engines: Engines) -> None:
    before = [snapshot.counters.num_generated_tokens for snapshot in engines.two._engine.snapshots()]
    params = [SamplingParams(n=n, max_tokens=20, seed=1, ignore_eos=True) for n in (8, 2, 2, 3)]
    engines.two.generate([PROMPTS[0]] * 4, params)
    after = [snapshot.counters.num_generated_tokens for snapshot in engines.two._engine.snapshots()]
    # 8 samples on rank 0; then 2, 2 and 3 on rank 1, which never has more to do than rank 0.
    assert [b - a for a, b in zip(before, after, strict=True)] == [8 * 20, 7 * 20]


def test_enqueued_prompts_come_from_step_and_wait(engines: Engines) -> None:
    params = SamplingParams(n=2, max_tokens=25, seed=6, ignore_eos=True)
    expected = {tuple(output.prompt_token_ids): output for output in engines.one.generate(PROMPTS, params)}
    engines.two.enqueue(PROMPTS[:3], params)
    outputs: list[RequestOutput] = []
    while len(outputs) < 3:
        outputs += engines.two.step()
    ids = engines.two.enqueue(PROMPTS[3:], params)
    waited = engines.two.wait_for_completion()
    assert [output.request_id for output in waited] == ids
    outputs += waited
    assert_same_samples(outputs, [expected[tuple(output.prompt_token_ids)] for output in outputs])
    assert engines.two.step() == []  # nothing to wait for


def test_two_threads_get_their_own_outputs(engines: Engines) -> None:
    expected = [engines.one.generate(PROMPTS[i : i + 2], LONG) for i in (0, 2)]
    with InFlight(engines.two, PROMPTS[0:2], LONG) as first, InFlight(engines.two, PROMPTS[2:4], LONG) as second:
        pass
    assert_same_samples(first.outputs, expected[0])
    assert_same_samples(second.outputs, expected[1])


def test_aborted_requests_return_what_was_sampled(engines: Engines) -> None:
    whole = engines.one.generate(PROMPTS[:2], LONG)
    with slow_steps(engines.two):
        ids = engines.two.enqueue(PROMPTS[:2], LONG)
        engines.two.step()
        engines.two.abort([*ids, "unknown"])
    aborted = engines.two.wait_for_completion()
    assert [output.request_id for output in aborted] == ids
    for part, full in zip(aborted, whole, strict=True):
        for a, b in zip(part.outputs, full.outputs, strict=True):
            assert_is_beginning(a, b)
    assert_blocks_are_free(engines.two)


def assert_blocks_are_free(llm: LLM) -> None:
    assert llm.num_unfinished == 0
    for snapshot in llm._engine.snapshots():
        assert snapshot.stats.num_free_blocks == snapshot.stats.num_blocks


def test_a_bad_prompt_is_refused_before_any_is_queued(engines: Engines) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\].*ids must be from 0 to 130"):
        engines.two.generate([PROMPTS[0], [999]])
    tight = SamplingParams(max_tokens=400)
    assert engines.two.num_unfinished == 0
    outputs = engines.two.generate([PROMPTS[0], [999]], tight, on_invalid="return")
    assert outputs[1].error is not None and outputs[0].outputs[0].token_ids


def test_an_error_of_a_step_is_raised_and_no_token_is_lost(engines: Engines) -> None:
    params = SamplingParams(n=2, max_tokens=30, seed=8, ignore_eos=True)
    expected = engines.one.generate(PROMPTS[:2], params)
    engines.two.collective_rpc(fail_in_step, args=(1, 2))
    engines.two.enqueue(PROMPTS[:2], params)
    outputs: list[RequestOutput] = []
    with pytest.raises(OSError, match="fell off the bus") as caught:
        while engines.two.num_unfinished:
            outputs += engines.two.step()
    assert "rank 1" in caught.value.__notes__[0]
    while engines.two.num_unfinished:
        outputs += engines.two.step()
    outputs.sort(key=lambda output: int(output.request_id))
    assert_same_samples(outputs, expected)
    assert_blocks_are_free(engines.two)


def test_an_error_of_a_step_ends_the_generate_that_gets_it(engines: Engines) -> None:
    engines.two.collective_rpc(fail_in_step, args=(0, 3))
    with pytest.raises(OSError, match="fell off the bus"):
        engines.two.generate(PROMPTS, LONG)
    assert_blocks_are_free(engines.two)
    params = SamplingParams(max_tokens=10, seed=8)
    assert_same_samples(engines.two.generate(PROMPTS, params), engines.one.generate(PROMPTS, params))


# The engine as a whole


def test_sleep_on_all_ranks_returns_what_was_sampled_and_refuses_until_woken(engines: Engines) -> None:
    # case SW-05
    whole = engines.one.generate(PROMPTS[:2], LONG)
    with slow_steps(engines.two), InFlight(engines.two, PROMPTS[:2], LONG) as flight:
        flight.wait_for_steps(10)
        report = engines.two.sleep(1)
    assert report.released["rank 0 kv_cache"] > 0 and report.released["rank 1 kv_cache"] > 0
    assert report.total_released == sum(report.released.values())
    for part, full in zip(flight.outputs, whole, strict=True):
        for a, b in zip(part.outputs, full.outputs, strict=True):
            assert_is_beginning(a, b)
    assert engines.two.is_sleeping and "kv_cache" in engines.two.sleeping_tags
    with pytest.raises(EngineAsleepError):
        engines.two.generate(PROMPTS, LONG)
    engines.two.wake_up()
    assert not engines.two.is_sleeping
    assert_same_samples(engines.two.generate(PROMPTS[:2], LONG), whole)


def test_metrics_count_all_ranks(engines: Engines) -> None:
    before = engines.two.get_metrics()
    engines.two.generate(PROMPTS, SamplingParams(n=2, max_tokens=10, ignore_eos=True))
    after = engines.two.get_metrics()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == len(PROMPTS) * 2 * 10
    assert after["kv_cache_blocks"] == 2 * engines.one.get_metrics()["kv_cache_blocks"]
    assert after.keys() == engines.one.get_metrics().keys()


def test_the_ledger_has_every_owner_of_every_rank(engines: Engines) -> None:
    one, two = engines.one.memory_ledger(), engines.two.memory_ledger()
    assert {entry.owner for entry in two.entries} == {
        f"rank {rank} {entry.owner}" for rank in (0, 1) for entry in one.entries
    }
    assert two["rank 1 weights"].reserved == one["weights"].reserved
    assert two.process_resident > two.accounted > 0


def test_receipts_are_equal_on_all_ranks_and_verified_anew(engines: Engines) -> None:
    assert engines.two.verify() == engines.two.receipt
    assert engines.two.receipt is not None and engines.one.receipt is not None
    assert engines.two.receipt.id == engines.one.receipt.id


def test_reset_prefix_cache_forgets_on_all_ranks(engines: Engines) -> None:
    prompt, params = random_prompt(40), SamplingParams(max_tokens=2)
    cached = [engines.two.generate([prompt] * 2, params)[i].num_cached_tokens for _ in range(2) for i in range(2)]
    assert cached[2:] == [32, 32]
    assert engines.two.reset_prefix_cache()
    assert [output.num_cached_tokens for output in engines.two.generate([prompt] * 2, params)] == [0, 0]


def test_what_needs_one_process_says_so(engines: Engines) -> None:
    with pytest.raises(ValueError, match=r"shared_model\(\) is not supported with data_parallel_size=2"):
        engines.two.shared_model()
    with pytest.raises(ValueError, match=r"profile\(\) is not supported with data_parallel_size=2"):
        engines.two.profile()
    with pytest.raises(ValueError, match="data_parallel_size=2"):
        _ = engines.two.engine
    with pytest.raises(ValueError, match="lora_request is not supported with data_parallel_size=2"):
        engines.two.generate(PROMPTS, lora_request="style")
    with pytest.raises(ValueError, match="enable_lora=True is not supported with data_parallel_size=2"):
        LLM(engines.two.config.model, data_parallel_size=2, enable_lora=True)


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_data_parallel_size_is_checked(value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data_parallel_size=.* is not valid: it must be an integer of at least 1"):
        LLM(make_tiny_llama(tmp_path), data_parallel_size=value)


def test_the_replicas_share_the_cores(engines: Engines) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert engines.two.collective_rpc(torch_threads) == [share, share]


# Calls of the workers


def test_an_extension_is_called_on_every_rank_in_order(engines: Engines) -> None:
    assert engines.one.collective_rpc("scaled_layers", args=(10,), kwargs={"plus": 3}) == [23]
    assert engines.two.collective_rpc("scaled_layers", args=(10,), kwargs={"plus": 3}) == [23, 23]
    (here,) = engines.one.collective_rpc("rank_and_process")
    there = engines.two.collective_rpc("rank_and_process")
    assert here == (0, os.getpid())
    assert [rank for rank, _ in there] == [0, 1]
    assert len({os.getpid(), *(process for _, process in there)}) == 3


def test_a_callable_gets_the_worker_and_returns_tensors(engines: Engines) -> None:
    name = "model.norm.weight"
    (expected,) = engines.one.collective_rpc(sum_of_parameter, args=(name,))
    assert engines.two.collective_rpc(sum_of_parameter, kwargs={"name": name}) == [expected, expected]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_raised_here_with_the_remote_traceback(engines: Engines, rank: int) -> None:
    with pytest.raises(FileNotFoundError, match="no such book") as caught:
        engines.two.collective_rpc("fail_on_rank", args=(rank, FileNotFoundError, "no such book"))
    (note,) = caught.value.__notes__
    assert f"rank {rank}" in note and "in fail_on_rank" in note and "FileNotFoundError: no such book" in note
    with pytest.raises(EngineAsleepError, match="engine's own"):
        engines.two.collective_rpc("fail_on_rank", args=(rank, EngineAsleepError, "engine's own"))
    with pytest.raises(RuntimeError, match=r"OwnError: of the user"):
        engines.two.collective_rpc("fail_on_rank", args=(rank, OwnError, "of the user"))
    if rank == 0:
        with pytest.raises(FileNotFoundError):
            engines.one.collective_rpc("fail_on_rank", args=(rank, FileNotFoundError, "no such book"))
    assert engines.two.collective_rpc("rank_and_process")[rank][0] == rank


def test_of_several_errors_that_of_the_lowest_rank_is_raised(engines: Engines) -> None:
    with pytest.raises(ValueError, match="has no such public method") as caught:
        engines.two.collective_rpc("missing")
    assert "rank 0" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match=r"use LLM\.sleep instead"):
        engines.two.collective_rpc("sleep", args=(1,))


def test_a_time_limit_names_the_ranks_and_the_late_answer_is_dropped(engines: Engines) -> None:
    with pytest.raises(TimeoutError, match=r"no answer after 0\.3 s from rank 1"):
        engines.two.collective_rpc("sleep_on_rank", timeout=0.3, args=(1, 3.0))
    # The next call waits for the rank to come back, and gets its own answer.
    assert engines.two.collective_rpc(process_id) == engines.two._engine.process_ids  # type: ignore[attr-defined]
    assert engines.two.collective_rpc("rank_and_process", timeout=120)[1][0] == 1
    params = SamplingParams(max_tokens=10, seed=8)
    assert_same_samples(engines.two.generate(PROMPTS, params), engines.one.generate(PROMPTS, params))
    with pytest.raises(ValueError, match="timeout=0 is not valid"):
        engines.two.collective_rpc("rank_and_process", timeout=0)


def test_forced_resumed_and_forked_samples_are_those_of_one_engine(engines: Engines) -> None:
    params = SamplingParams(n=3, max_tokens=40, seed=12, ignore_eos=True, logprobs=2, frequency_penalty=0.4)
    whole = engines.one.generate(PROMPTS, params)
    forced = replace(params, forced_token_ids=whole[0].outputs[2].token_ids[:25], stop=["q", "z"])
    assert_same_outputs(engines.two.generate(PROMPTS, forced), engines.one.generate(PROMPTS, forced))
    ids = engines.two.enqueue(PROMPTS, params)
    samples = engines.two._delivery.groups[ids[3]].samples
    while samples[1].num_output_tokens < 5:
        engines.two.step()
    fork_id = engines.two.fork(ids[3], at=5, n=2, sample=1)
    engines.two.abort(ids)
    *parts, fork = engines.two.wait_for_completion()
    assert fork.request_id == fork_id
    resumed = engines.two.resume(parts, params)
    assert_same_samples(resumed, whole)
    for output, wanted in zip(resumed, whole, strict=True):
        assert [sample.logprobs for sample in output.outputs] == [sample.logprobs for sample in wanted.outputs]
    for sample in fork.outputs:
        alone = replace(params, n=1, first_sample_index=sample.sample_index)
        alone = replace(alone, forced_token_ids=whole[3].outputs[1].token_ids[:5])
        (output,) = engines.one.generate(PROMPTS[3], alone)
        assert_same_samples([replace(fork, outputs=[sample])], [output])
        assert sample.logprobs == output.outputs[0].logprobs


def test_what_cannot_be_sent_is_refused_here(engines: Engines) -> None:
    with pytest.raises(ValueError, match="the call cannot be sent to a worker process"):
        engines.two.collective_rpc(lambda worker: worker.rank)
    with pytest.raises(TypeError, match="cannot pickle"):
        engines.two.collective_rpc(unpicklable_result)
    mixed = [SamplingParams(), SamplingParams(logits_processors=[lambda logits, batch: logits])]
    with pytest.raises(ValueError, match=r"prompts\[1\]: logits_processors cannot be sent to a worker process"):
        engines.two.generate(PROMPTS[:2], mixed)
    assert engines.two.num_unfinished == 0


def test_a_request_is_sent_whole() -> None:
    given = {
        "request_id": "7-0",
        "group_id": "7",
        "prompt_token_ids": [5, 130, 2**31 - 1],
        "params": SamplingParams(n=2, stop=["x"], stop_token_ids=[4], seed=2**63 - 1, temperature=0.3, min_tokens=2),
        "seed": 2**63 - 1,
        "sample_index": 3,
        "max_tokens": 17,
        "eos_token_ids": frozenset({2, 9}),
        "stop_token_ids": frozenset({4}),
        "priority": -3,
        "arrival": 12,
        "cache_salt": "salt",
        "scores_prompt": True,
        "token_ids": [5, 130, 2**31 - 1, 8, 9],
        "entropy": array("f", [0.0, 0.0]),
        "policy_spans": [(0, 0), (3, 1)],
        "branch_position": 2,
        "beam_options": BeamOptions(3, 0.5, "never"),
    }
    leader = Request(**given)
    leader.siblings = [Request(**{**given, "request_id": "7-1", "sample_index": 4})]
    state = {"rank", "token_ids", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "status", "siblings"}
    state |= {"finish_reason", "stop_reason", "policy_version", "policy_spans", "raw_logprobs", "sampled_logprobs"}
    state |= {"kept_mass", "entropy", "prompt_logprobs", "sample_state", "num_forced_tokens", "beam_result"}
    state |= {"top_logprobs", "prompt_top_logprobs"}
    state |= {"parent", "forked_from"}  # of no use to a worker, and named by its handle
    refused = {"lora_request", "adapter_slot", "adapter_key"}
    assert Unpacker().requests(pack_family(leader, [4, 5], 3), parent := Request(**given))[0].forked_from is parent
    # A new field has to be sent as well.
    assert {field.name for field in fields(Request)} == given.keys() | state | refused
    for sent, arrived in zip((leader, *leader.siblings), Unpacker().requests(pack_family(leader, [4, 5])), strict=True):
        assert {name: getattr(arrived, name) for name in given} == {name: getattr(sent, name) for name in given}
