"""Deltas hold a part of their samples: whoever needs whole ones refuses them, and says what to collect instead."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from rollout import LLM, RequestOutput, RequestOutputKind, RolloutTree, SamplingParams, Session
from tests.support.tiny import make_tiny_llama

PROMPT = [40, 41, 42]
PARAMS = SamplingParams(n=2, max_tokens=8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True, tokenizer=True)
    return LLM(folder, kv_cache_memory="4MiB")


def outputs_of(llm: LLM, kind: RequestOutputKind, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return list(llm.stream(PROMPT, replace(params, output_kind=kind)))


def append(llm: LLM, output: RequestOutput) -> object:
    session = Session(llm)
    session.add_token_ids(PROMPT)
    return session.append_sample(output.outputs[0])


USES: dict[str, Callable[[LLM, RequestOutput], object]] = {
    "resume": lambda llm, output: llm.resume(output, PARAMS),
    "fork": lambda llm, output: llm.fork(output, at=1, sampling_params=replace(PARAMS, n=1)),
    "tree": lambda llm, output: RolloutTree.from_outputs([output]),
    "session": append,
    "diagnose": lambda llm, output: llm.diagnose([output], llm.shared_model()),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.parametrize("place", [0, 3, -1], ids=["first", "middle", "last"])
def test_a_delta_is_refused_where_a_whole_sample_is_needed(
    llm: LLM, use: Callable[[LLM, RequestOutput], object], place: int
) -> None:
    delta = outputs_of(llm, RequestOutputKind.DELTA)[place]
    for each in (delta, pickle.loads(pickle.dumps(delta)), replace(delta, is_delta=False)):
        with pytest.raises(ValueError, match=r"is a delta.*CUMULATIVE or FINAL_ONLY"):
            use(llm, each)
    assert llm.num_unfinished == 0


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_outputs_of_the_other_kinds_are_taken(llm: LLM, kind: RequestOutputKind) -> None:
    output = outputs_of(llm, kind)[-1]
    assert not output.is_delta and not any(sample.is_delta for sample in output.outputs)
    for use in USES.values():
        use(llm, output)
    llm.wait_for_completion()


def test_dictionaries_say_what_is_a_delta(llm: LLM) -> None:
    delta = outputs_of(llm, RequestOutputKind.DELTA)[0].to_dict()
    whole = llm.generate(PROMPT, replace(PARAMS, output_kind=RequestOutputKind.DELTA))[0].to_dict()
    assert (delta["is_delta"], delta["outputs"][0]["is_delta"]) == (True, True)
    assert (whole["is_delta"], whole["outputs"][0]["is_delta"]) == (False, False)


def test_only_the_first_delta_has_the_logprobs_of_the_prompt(llm: LLM) -> None:
    params = replace(PARAMS, prompt_logprobs=1)
    (whole,) = llm.generate(PROMPT, params)
    first, *others = outputs_of(llm, RequestOutputKind.DELTA, params)
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert others and all(output.prompt_logprobs is None for output in others)
    assert all(output.prompt_logprobs for output in outputs_of(llm, RequestOutputKind.CUMULATIVE, params))
