"""Samples that are forced, or stopped and resumed, or forked: bit for bit what an uninterrupted sample is."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.support.tiny import make_tiny_llama

ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
PROMPT = [40, 41, 42, 43, 44, 45, 46]
PARAMS = SamplingParams(n=3, max_tokens=20, seed=5, temperature=1.2, top_k=40, ignore_eos=True)


def assert_same(a: CompletionOutput, b: CompletionOutput) -> None:
    assert a.token_ids == b.token_ids
    assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def cut(output: CompletionOutput, count: int) -> CompletionOutput:
    """What `output` would be, had it been aborted after `count` tokens."""
    arrays = {name: getattr(output, name)[:count] for name in ARRAYS}
    spans = [span._replace(end=min(span.end, count)) for span in output.policy_versions if span.start < count]
    return replace(
        output,
        token_ids=output.token_ids[:count],
        finish_reason="abort",
        stop_reason=None,
        policy_versions=spans,
        **arrays,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True, tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="8MiB", block_size=4)


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RequestOutput:
    return llm.generate(PROMPT, PARAMS)[0]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 3, "block_size": 3},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 11},
        {"kernels": "reference"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_memory": 5 * 16 * 1024, "block_size": 8, "preemption_mode": "recompute"},
        {"kv_cache_memory": 5 * 16 * 1024, "block_size": 8, "preemption_mode": "swap", "swap_space": "1MiB"},
    ],
    ids=lambda config: " ".join(config) or "default",
)
@pytest.mark.parametrize("num_forced", [9, 20])
def test_forced_tokens_have_the_arrays_of_the_sample_that_drew_them(
    folder: Path, config: dict[str, object], num_forced: int
) -> None:
    base = {key: value for key, value in config.items() if key in ("kernels", "kv_cache_dtype")}
    drawn = LLM(folder, **base, kv_cache_memory="8MiB").generate(PROMPT, PARAMS)[0].outputs  # type: ignore[arg-type]
    llm = LLM(folder, **{"kv_cache_memory": "8MiB", **config})  # type: ignore[arg-type]
    params = [
        replace(PARAMS, n=1, first_sample_index=sample.sample_index, forced_token_ids=sample.token_ids[:num_forced])
        for sample in drawn
    ]
    for _ in range(2):  # the second time with all blocks cached
        for output, sample in zip(llm.generate([PROMPT] * 3, params), drawn, strict=True):
            assert_same(output.outputs[0], sample)
            assert output.outputs[0].num_forced_tokens == num_forced
    if "preemption_mode" in config and num_forced < 20:  # 20 are computed at once, and end there
        assert llm.get_metrics()["num_preemptions_total"] > 0
    assert llm.get_metrics()["kv_cache_usage"] == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.3},
        {"logit_bias": {9: 4.0}, "allowed_token_ids": range(3, 60)},
        {"bad_words": ["e", "th"]},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{0,60}")},
        {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": [30, 31, 32, 33]},
        {"stop": ["a", "e", "qz"], "min_tokens": 5},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_forced_and_resumed_draws_see_the_tokens_before_them(folder: Path, extra: dict[str, object]) -> None:
    # case SP-03
    params = replace(PARAMS, **extra)  # type: ignore[arg-type]
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4, max_num_batched_tokens=7)
    drawn = llm.generate(PROMPT, params)[0]
    for sample in drawn.outputs:
        for count in {1, len(sample.token_ids) // 2, len(sample.token_ids)}:
            forced = replace(params, n=1, first_sample_index=sample.sample_index)
            forced = replace(forced, forced_token_ids=sample.token_ids[:count])
            assert_same(llm.generate(PROMPT, forced)[0].outputs[0], sample)
    for count in (0, 1, 5, 11):
        parts = [cut(sample, count) if count < len(sample.token_ids) else sample for sample in drawn.outputs]
        (resumed,) = llm.resume(replace(drawn, outputs=parts), params)
        for now, before in zip(resumed.outputs, drawn.outputs, strict=True):
            assert_same(now, before)


def test_more_rows_than_logits_are_held_at_once_are_drawn_in_several_goes(llm: LLM) -> None:
    params = replace(PARAMS, n=2, max_tokens=320, logprobs=1)
    (whole,) = llm.generate([PROMPT], params)
    forced = [
        replace(params, n=1, first_sample_index=index, forced_token_ids=whole.outputs[index].token_ids[:300])
        for index in range(2)
    ]
    computed = llm.engine.counters.num_steps
    outputs = llm.generate([PROMPT] * 2, forced)
    assert llm.engine.counters.num_steps == computed + 21  # all 600 forced tokens in the first
    for output, sample in zip(outputs, whole.outputs, strict=True):
        assert_same(output.outputs[0], sample)
        assert output.outputs[0].logprobs == sample.logprobs


def test_samples_go_their_own_ways_behind_the_forced_tokens(llm: LLM, whole: RequestOutput) -> None:
    forced = whole.outputs[1].token_ids[:8]
    outputs = llm.generate(PROMPT, replace(PARAMS, forced_token_ids=forced))[0].outputs
    assert_same(outputs[1], whole.outputs[1])
    assert [output.token_ids[:8] for output in outputs] == [forced] * 3
    assert len({tuple(output.token_ids) for output in outputs}) == 3


def test_what_filters_and_min_tokens_leave_out_can_be_forced_and_has_no_mass(llm: LLM) -> None:
    greedy = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0]
    other = [*greedy.token_ids[:3], greedy.token_ids[3] + 1]
    forced = llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0, forced_token_ids=other))[0].outputs[0]
    assert forced.token_ids == other
    assert forced.sampled_logprobs.tolist() == [0, 0, 0, -np.inf]
    scores = llm.score([*PROMPT, *other])[0].logprobs[len(PROMPT) - 1 :]
    np.testing.assert_array_equal(forced.raw_logprobs, scores)
    params = SamplingParams(max_tokens=6, min_tokens=5, seed=1, forced_token_ids=[9, 2, 9])  # 2 is EOS
    banned = llm.generate(PROMPT, params)[0].outputs[0]
    assert banned.token_ids[:3] == [9, 2, 9]
    assert banned.sampled_logprobs[1] == -np.inf
    assert np.isfinite(banned.sampled_logprobs[[0, 2]]).all()


def test_an_end_among_forced_tokens_counts_only_as_the_last(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=1, forced_token_ids=[9, 2, 9], stop_token_ids=[9])
    output = llm.generate(PROMPT, params)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([9, 2, 9], "stop", 9)
    forced = [57, 58, 59, 60]
    text = llm.get_tokenizer().decode(forced)
    assert len(text) == 4
    for stop, expected in ((text[1:3], None), (text[2:], text[2:]), (text[3], text[3])):
        params = SamplingParams(max_tokens=4, seed=1, forced_token_ids=forced, stop=stop)
        output = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.token_ids == forced
        assert output.stop_reason == expected, stop
        assert output.finish_reason == ("length" if expected is None else "stop")


def test_forced_tokens_must_fit(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"forced_token_ids=.*at most max_tokens"):
        SamplingParams(max_tokens=2, forced_token_ids=[1, 2, 3])
    with pytest.raises(ValueError, match="forced_token_ids holds 131: ids must be from 0 to 130"):
        llm.generate(PROMPT, SamplingParams(forced_token_ids=[131]))
    with pytest.raises(ValueError, match="more than max_model_len=512"):
        llm.generate([1] * 505, SamplingParams(max_tokens=None, forced_token_ids=[1] * 8))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_a_resumed_sample_is_the_uninterrupted_one(llm: LLM, whole: RequestOutput, cuts: Sequence[int]) -> None:
    samples = [output if count == 20 else cut(output, count) for output, count in zip(whole.outputs, cuts, strict=True)]
    (resumed,) = llm.resume(replace(whole, outputs=samples), PARAMS)
    assert resumed.finished
    for index, (now, before) in enumerate(zip(resumed.outputs, whole.outputs, strict=True)):
        assert_same(now, before)
        assert (now.index, now.seed, now.sample_index) == (index, before.seed, before.sample_index)
        assert now.policy_versions == before.policy_versions
        assert (now is samples[index]) == (cuts[index] == 20)
    assert resumed.prompt_token_ids == PROMPT


def test_abort_and_resume_as_often_as_one_likes(folder: Path, whole: RequestOutput) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4)
    (request_id,) = llm.enqueue(PROMPT, PARAMS)
    for _ in range(4):
        llm.step()
    llm.abort([request_id])
    (output,) = llm.wait_for_completion()
    assert [len(sample.token_ids) for sample in output.outputs] == [4, 4, 4]
    for round_number in range(3):
        results: list[list[RequestOutput]] = []
        before = llm.engine.counters.num_generated_tokens
        thread = threading.Thread(target=lambda: results.append(llm.resume(output, PARAMS)))  # noqa: B023 - joined here
        thread.start()
        while llm.engine.counters.num_generated_tokens < before + 6 and thread.is_alive():
            time.sleep(0.001)
        llm.sleep(level=round_number % 2)  # aborts
        thread.join()
        llm.wake_up()
        ((output,),) = results
        assert {sample.finish_reason for sample in output.outputs} <= {"abort", "length"}
    (output,) = llm.resume([output], PARAMS)
    for now, before_all in zip(output.outputs, whole.outputs, strict=True):
        assert_same(now, before_all)


def test_what_a_newer_policy_samples_is_told(folder: Path, whole: RequestOutput) -> None:
    llm = LLM(folder, kv_cache_memory="8MiB", block_size=4)
    (request_id,) = llm.enqueue({"prompt_token_ids": PROMPT, "cache_salt": "salt"}, PARAMS)
    for _ in range(6):
        llm.step()
    receipts = [llm.receipt]
    llm.reload_weights()  # aborts, and the weights are the same ones under the next version
    receipts.append(llm.receipt)
    (partial,) = llm.wait_for_completion()
    assert (partial.request_id, partial.cache_salt) == (request_id, "salt")
    (resumed,) = llm.resume(partial, PARAMS)
    for sample, before in zip(resumed.outputs, whole.outputs, strict=True):
        assert sample.policy_versions == [(0, 0, 6), (1, 6, 20)]
        assert_same(sample, before)
    assert (resumed.policy_version, resumed.request_id, resumed.cache_salt) == (1, request_id, "salt")
    assert resumed.receipt_ids == {version: receipt.id for version, receipt in enumerate(receipts) if receipt}


def test_outputs_and_parameters_that_do_not_belong_together_are_refused(llm: LLM, whole: RequestOutput) -> None:
    partial = replace(whole, outputs=[cut(output, 6) for output in whole.outputs])
    short = replace(partial.outputs[1], entropy=partial.outputs[1].entropy[:5])
    for output, params, message in (
        (partial, replace(PARAMS, seed=4), r"outputs\[0\]\.outputs\[0\]: seed=4 is not valid: .* drawn with seed 5"),
        (partial, replace(PARAMS, max_tokens=6), "max_tokens=6 is not valid: .* there are 6 already"),
        (partial, replace(PARAMS, forced_token_ids=[1]), "the sample begins with other tokens"),
        (replace(partial, outputs=[short]), replace(PARAMS, n=1), r"entropy has the shape \(5,\) for 6 tokens"),
        (replace(partial, prompt_token_ids=[]), PARAMS, r"outputs\[0\]: the prompt is empty"),
        (RequestOutput("x", None, [1], [], error="bad"), PARAMS, "was refused: bad"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.resume([output], params)
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.resume([partial], [PARAMS, PARAMS])
    assert llm.num_unfinished == 0
    assert llm.resume([whole], PARAMS)[0] is whole
    assert llm.resume([], PARAMS) == []


@pytest.mark.parametrize("data_parallel_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_resumed_is_aborted_by_the_id_of_its_output(
    folder: Path, whole: RequestOutput, data_parallel_size: int
) -> None:
    with LLM(folder, kv_cache_memory="8MiB", data_parallel_size=data_parallel_size) as other:
        params = replace(PARAMS, n=1, max_tokens=400)
        part = replace(whole, request_id="7", outputs=[cut(whole.outputs[0], 4)])
        results: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: results.extend(other.resume(part, params)))
        thread.start()
        while not other.num_unfinished and thread.is_alive():
            time.sleep(0.001)
        other.abort("7")
        thread.join(60)
        (result,) = results
        assert result.request_id == "7"
        assert result.outputs[0].finish_reason == "abort" and 4 <= len(result.outputs[0].token_ids) < 400
        (again,) = other.resume(result, replace(params, max_tokens=20))
        assert_same(again.outputs[0], whole.outputs[0])


def test_an_id_that_two_have_means_the_request_of_this_engine(folder: Path, whole: RequestOutput) -> None:
    other = LLM(folder, kv_cache_memory="8MiB")
    own = other.enqueue([PROMPT, PROMPT], replace(PARAMS, n=1))
    parts = [replace(whole, request_id=own[0], outputs=[cut(whole.outputs[0], 4)])]
    # the resumed samples run under the engine's next number, which is no id that anybody was given
    results: list[RequestOutput] = []
    held = threading.Event()

    def hold(logits: torch.Tensor, batch: object) -> torch.Tensor:
        held.wait(30)
        return logits

    params = replace(PARAMS, n=1, logits_processors=[hold])
    thread = threading.Thread(target=lambda: results.extend(other.resume(parts, params)))
    thread.start()
    while other.num_unfinished < 3:
        time.sleep(0.001)
    held.set()
    other.abort([own[0], "2"])
    outputs = other.wait_for_completion()
    thread.join(60)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length"]
    assert_same(results[0].outputs[0], whole.outputs[0])


def test_a_string_is_one_request_id(llm: LLM) -> None:
    ids = llm.enqueue([PROMPT] * 12, replace(PARAMS, n=1))
    two_digits = next(request_id for request_id in ids if len(request_id) > 1 and set(request_id) - {request_id[0]})
    llm.abort(two_digits)
    ended = {output.request_id: output.outputs[0].finish_reason for output in llm.wait_for_completion()}
    assert ended == {request_id: "abort" if request_id == two_digits else "length" for request_id in ids}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 1}, "n=1 is not valid: the output has 3 samples"),
        ({"n": 5}, "n=5 is not valid: the output has 3 samples"),
        ({"first_sample_index": 3}, "first_sample_index=3 is not valid: that of the interrupted call was 0"),
    ],
    ids=["fewer samples", "more samples", "other indices"],
)
def test_parameters_of_another_call_do_not_resume(
    llm: LLM, whole: RequestOutput, change: dict[str, int], message: str
) -> None:
    part = replace(whole, outputs=[cut(sample, 3 + index) for index, sample in enumerate(whole.outputs)])
    with pytest.raises(ValueError, match=message):
        llm.resume(part, replace(PARAMS, **change))  # type: ignore[arg-type]
    assert llm.num_unfinished == 0


def test_the_parameters_of_the_call_resume_whatever_they_are(llm: LLM) -> None:
    first = replace(PARAMS, first_sample_index=5)
    (root,) = llm.enqueue(PROMPT, first)
    for _ in range(6):
        llm.step()
    fork, inherited = llm.fork(root, at=2, n=2, sampling_params=replace(first, n=1)), llm.fork(root, at=3, n=4)
    for _ in range(3):
        llm.step()
    llm.abort([root, fork, inherited])
    parts = llm.wait_for_completion()
    assert [len(part.outputs) for part in parts] == [3, 2, 4]
    resumed = llm.resume(parts, [first, replace(first, n=1), replace(first, n=1)])
    assert (
        llm.resume(parts, [first, replace(PARAMS, n=2), replace(PARAMS, n=4)])[2].outputs[0].finish_reason == "length"
    )
    for output in resumed:
        for sample in output.outputs:
            given = sample.token_ids[: sample.branch_position]
            own = replace(PARAMS, n=1, first_sample_index=sample.sample_index, forced_token_ids=given or None)
            assert_same(sample, replace(llm.generate(PROMPT, own)[0].outputs[0], index=sample.index))


@pytest.mark.parametrize("wrong", [7, "7", [7]])
def test_what_is_no_output_is_not_resumed(llm: LLM, wrong: object) -> None:
    with pytest.raises(TypeError, match="RequestOutput"):
        llm.resume(wrong, PARAMS)  # type: ignore[arg-type]
