"""`LLM.stream`: what is yielded while samples grow, and what is left behind when nobody listens any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from rollout.errors import EngineAsleepError
from tests.engine.test_threads import in_thread
from tests.support.tiny import make_tiny_llama

PROMPTS = [[40, 41, 42], [60] * 20, [7]]
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
PARAMETERS = {
    "samples": SamplingParams(n=3, max_tokens=30, seed=5, ignore_eos=True),
    "ended by eos": SamplingParams(n=6, max_tokens=60, seed=6, temperature=2.0, logprobs=0),
    "logprobs": SamplingParams(n=2, max_tokens=12, seed=4, ignore_eos=True, logprobs=3, logprob_token_ids=[7, 9]),
    "stop strings": SamplingParams(n=4, max_tokens=60, seed=3, stop=["e", "ab", "Gx"], min_tokens=4, ignore_eos=True),
    "stop strings included": SamplingParams(
        n=4, max_tokens=60, seed=3, stop=["e", "a"], include_stop_str_in_output=True
    ),
    "without text": SamplingParams(n=2, max_tokens=10, seed=3, detokenize=False),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_llama(tmp_path_factory.mktemp("stream"), tokenizer=True, vocab_size=300)
    return LLM(folder, kv_cache_memory="8MiB", max_num_seqs=8, block_size=8)


@dataclass
class Joined:
    """The deltas of one sample, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ARRAYS})
    logprobs: list[Any] = field(default_factory=list)
    last: CompletionOutput | None = None

    def add(self, delta: CompletionOutput) -> None:
        assert self.last is None or self.last.finish_reason is None, "nothing comes after the end"
        assert delta.token_ids or delta.finish_reason is not None, "every delta brings something"
        self.text += delta.text
        self.token_ids += delta.token_ids
        for name in ARRAYS:
            assert len(getattr(delta, name)) == len(delta.token_ids)
            self.columns[name] += getattr(delta, name).tolist()
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        self.logprobs += delta.logprobs or []
        assert sum(span.end - span.start for span in delta.policy_versions) == len(delta.token_ids)
        self.last = delta

    def assert_is(self, whole: CompletionOutput) -> None:
        assert (self.text, self.token_ids, self.logprobs) == (whole.text, whole.token_ids, list(whole.logprobs or []))
        for name in ARRAYS:
            assert self.columns[name] == getattr(whole, name).tolist()
        assert self.last is not None
        for name in ("finish_reason", "stop_reason", "seed", "sample_index", "index"):
            assert getattr(self.last, name) == getattr(whole, name)


def joined(deltas: Iterable[RequestOutput]) -> dict[int, dict[int, Joined]]:
    """By prompt, as they began, and by index of the sample."""
    samples: dict[int, dict[int, Joined]] = {}
    finished: set[int] = set()
    for output in deltas:
        number = int(output.request_id)
        assert output.outputs and number not in finished
        finished |= {number} if output.finished else set()
        for delta in output.outputs:
            samples.setdefault(number, {}).setdefault(delta.index, Joined()).add(delta)
    assert finished == set(samples)
    first = min(samples)
    return {number - first: of_prompt for number, of_prompt in samples.items()}


def assert_idle(llm: LLM) -> None:
    metrics = llm.get_metrics()
    assert llm.num_unfinished == metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0
    assert metrics["kv_cache_usage"] == 0
    assert not llm._delivery.groups


@pytest.mark.parametrize("name", PARAMETERS)
def test_joined_deltas_are_the_final_output(name: str, llm: LLM) -> None:
    # case ST-01
    params = PARAMETERS[name]
    whole = llm.generate(PROMPTS, params)
    assert any(c.stop_reason in params.stop_strings for o in whole for c in o.outputs) == bool(params.stop_strings)
    streamed = joined(llm.stream(PROMPTS, replace(params, output_kind=RequestOutputKind.DELTA)))
    assert sorted(streamed) == [0, 1, 2]
    for number, output in enumerate(whole):
        assert sorted(streamed[number]) == list(range(params.n))
        for index, completion in enumerate(output.outputs):
            streamed[number][index].assert_is(completion)
    assert_idle(llm)


@pytest.mark.parametrize("name", PARAMETERS)
def test_cumulative_outputs_grow_into_the_final_one(name: str, llm: LLM) -> None:
    # case ST-01
    params = PARAMETERS[name]
    whole = llm.generate(PROMPTS, params)
    last: dict[str, RequestOutput] = {}
    for output in llm.stream(PROMPTS, params):
        assert [completion.index for completion in output.outputs] == list(range(params.n))
        earlier = last[output.request_id].outputs if output.request_id in last else []
        for before, now in zip(earlier, output.outputs, strict=False):
            assert now.text.startswith(before.text)  # nothing is taken back
            assert now.token_ids[: len(before.token_ids)] == before.token_ids
        last[output.request_id] = output
    for streamed, expected in zip(last.values(), whole, strict=True):
        assert streamed.finished and streamed.prompt_token_ids == expected.prompt_token_ids
        for mine, theirs in zip(streamed.outputs, expected.outputs, strict=True):
            assert (mine.text, mine.token_ids, mine.finish_reason) == (
                theirs.text,
                theirs.token_ids,
                theirs.finish_reason,
            )
            assert all(np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in ARRAYS)


def test_final_only_yields_one_output_a_prompt_as_they_end(llm: LLM) -> None:
    kinds = [
        SamplingParams(n=2, max_tokens=length, seed=1, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        for length in (20, 5, 10)
    ]
    outputs = list(llm.stream(PROMPTS, kinds))
    assert [len(output.outputs[1].token_ids) for output in outputs] == [5, 10, 20]
    assert all(output.finished for output in outputs)


def test_each_prompt_is_streamed_by_its_own_kind_and_generate_always_returns_whole_outputs(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=8, seed=1, ignore_eos=True, output_kind=kind) for kind in RequestOutputKind]
    by_request: dict[str, list[int]] = {}
    for output in llm.stream(PROMPTS, params):
        by_request.setdefault(output.request_id, []).append(len(output.outputs[0].token_ids))
    assert list(by_request.values()) == [list(range(1, 9)), [1] * 8, [8]]
    for kind in RequestOutputKind:
        completion = llm.generate([5, 6], replace(params[0], output_kind=kind))[0].outputs[0]
        assert len(completion.token_ids) == 8 and completion.text
    llm.enqueue([[5, 6]], params[1])
    ended = [output for _ in range(8) for output in llm.step()]
    assert [len(output.outputs[0].token_ids) for output in ended] == [8]


def test_text_that_may_begin_a_stop_string_is_held_back(llm: LLM) -> None:
    # case ST-01
    free = llm.generate([40, 41], SamplingParams(max_tokens=30, seed=2, ignore_eos=True))[0].outputs[0]
    start = next(i for i in range(8, len(free.text) - 4) if free.text.find(free.text[i : i + 4]) == i)
    stop = free.text[start : start + 4]
    params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, stop=stop, output_kind=RequestOutputKind.DELTA)
    text = ""
    for output in llm.stream([40, 41], params):
        text += output.outputs[0].text
        assert free.text[:start].startswith(text)
    assert text == free.text[:start] and output.outputs[0].stop_reason == stop


def test_leaving_the_loop_aborts_all_samples_and_frees_their_blocks(llm: LLM) -> None:
    # case SC-04
    params = SamplingParams(n=4, max_tokens=300, seed=1, ignore_eos=True)
    for count, _ in enumerate(llm.stream(PROMPTS, params)):
        if count == 5:
            break
    assert_idle(llm)
    iterator = llm.stream(PROMPTS, params)
    iterator.close()  # before anything was asked for
    assert_idle(llm)
    iterator = llm.stream([[], *PROMPTS], params, on_invalid="return")
    assert "empty" in (next(iterator).error or "")
    iterator.close()  # after what was refused
    assert_idle(llm)
    outputs = llm.generate([[9, 9], [5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == [[9, 9], [5]]


def test_an_interrupted_stream_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # case SC-04
    iterator = llm.stream(PROMPTS, SamplingParams(n=4, max_tokens=300, seed=1, ignore_eos=True))
    next(iterator)

    def interrupted() -> list:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    monkeypatch.undo()
    assert_idle(llm)


def test_aborting_a_prompt_ends_all_its_samples_with_what_they_have(llm: LLM) -> None:
    # case SC-04
    params = SamplingParams(n=4, max_tokens=300, seed=1, ignore_eos=True)
    whole = llm.generate(PROMPTS, replace(params, max_tokens=20))
    ids = llm.enqueue(PROMPTS, params)
    for _ in range(6):
        assert llm.step() == []
    llm.abort([ids[0], ids[2], ids[0], "unknown"])
    ended = {output.request_id: output for output in llm.step()}
    assert sorted(ended) == sorted([ids[0], ids[2]])
    for number in (0, 2):
        for mine, theirs in zip(ended[ids[number]].outputs, whole[number].outputs, strict=True):
            assert mine.finish_reason == "abort" and mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            assert mine.text == llm.get_tokenizer().decode(mine.token_ids, skip_special_tokens=True)
    assert llm.num_unfinished == 4
    llm.abort(ids)  # two of them have ended already
    assert [output.request_id for output in llm.wait_for_completion()] == [ids[1]]
    llm.abort(ids)
    assert_idle(llm)


def test_a_stream_ends_by_an_abort_from_its_own_loop(llm: LLM) -> None:
    # case SC-04
    params = SamplingParams(n=2, max_tokens=300, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    deltas = []
    for count, output in enumerate(llm.stream([5, 6, 7], params)):
        deltas.append(output)
        if count == 3:
            llm.abort([output.request_id])
    samples = joined(deltas)[0]
    assert {sample.last.finish_reason for sample in samples.values() if sample.last} == {"abort"}
    assert deltas[-1].finished
    assert_idle(llm)


def test_streams_and_generate_in_threads_get_their_own_outputs(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=40, seed=3, ignore_eos=True)
    batches = [[[10 * i + j] * 5 for j in range(3)] for i in range(1, 5)]
    alone = [llm.generate(batch, params) for batch in batches]
    delta = replace(params, output_kind=RequestOutputKind.DELTA)
    works: list[Callable[[], Any]] = [
        lambda: joined(llm.stream(batches[0], delta)),
        lambda: joined(llm.stream(batches[1], delta)),
        lambda: llm.generate(batches[2], params),
        lambda: joined(llm.stream(batches[3], delta)),
    ]
    results: list[Any] = [wait() for wait in [in_thread(work) for work in works]]
    for number in (0, 1, 3):
        for of_prompt, expected in zip(results[number].values(), alone[number], strict=True):
            for index, completion in enumerate(expected.outputs):
                of_prompt[index].assert_is(completion)
    assert [c.token_ids for o in results[2] for c in o.outputs] == [c.token_ids for o in alone[2] for c in o.outputs]
    assert_idle(llm)


def test_a_stream_that_the_garbage_collector_closes_during_a_step_is_ended_by_the_next(llm: LLM) -> None:
    # case SC-04
    iterator = llm.stream(PROMPTS, SamplingParams(n=4, max_tokens=300, seed=1, ignore_eos=True))
    next(iterator)
    with llm._lock:  # as in a step of this thread: waiting for the lock would never end
        iterator.close()
    assert llm.num_unfinished == 12
    assert len(llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    assert_idle(llm)


def test_a_policy_update_between_two_outputs_ends_the_samples_or_lets_them_go_on(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="8MiB")
    weights = {name: tensor + 0.05 for name, tensor in llm.engine.parameters().items()}
    params = SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    for version, mode in enumerate(("keep", "abort"), start=1):
        deltas = []
        for output in llm.stream([5, 6, 7], params):
            deltas.append(output)
            if len(deltas) == 4:
                with llm.policy_update(in_flight=mode) as update:  # type: ignore[arg-type]
                    update.load(weights.items())
        assert [delta.policy_version for delta in deltas[:4]] == [version - 1] * 4
        samples = joined(deltas)[0]
        reason, count = ("length", 12) if mode == "keep" else ("abort", 4)
        assert all(s.last and s.last.finish_reason == reason and len(s.token_ids) == count for s in samples.values())
        assert deltas[-1].policy_version == version - (mode == "abort")
        assert all(span.start == 0 for delta in deltas for c in delta.outputs for span in c.policy_versions)


def test_a_stream_of_a_sleeping_engine_says_why_there_is_nothing(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    llm.sleep(1)
    with pytest.raises(EngineAsleepError):
        next(llm.stream([5, 6]))
    llm.wake_up()
    iterator = llm.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    next(iterator)
    llm.sleep(1)
    assert [completion.finish_reason for output in iterator for completion in output.outputs] == ["abort"]
    llm.wake_up()
    with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
        next(llm.stream([[5], []]))
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 1 prompts"):
        llm.stream([5], [SamplingParams()] * 2)
    assert_idle(llm)
