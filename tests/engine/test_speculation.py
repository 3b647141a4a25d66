"""Speculation in a whole engine: whatever is asked for, outputs are those without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import (
    LLM,
    BeamSearchParams,
    LogitsBatch,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputsParams,
)
from rollout.request import Request
from tests.support.tiny import make_tiny_llama

PROMPT = [*range(40, 60), *range(40, 60), *range(40, 44)]
PROMPTS = [PROMPT, [3, 4, 5], [7, 8] * 9, list(range(60, 100))]
ALWAYS = {"max_batch_for_speculation": 64, "only_if_faster": False}  # whatever this machine's clock says
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5, **ALWAYS}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8, **ALWAYS}
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, near_uniform=True)


def make(folder: Path, speculative: object, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory="4MiB", block_size=8, speculative_config=speculative, **options)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return make(folder, None)


@pytest.fixture(scope="module", params=["ngram", "suffix"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return make(folder, NGRAM if request.param == "ngram" else SUFFIX)


def accepted(llm: LLM) -> float:
    return llm.get_metrics()["accepted_draft_tokens_total"]


def assert_same(mine: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text) == (b.token_ids, b.text)
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
            for name in ARRAYS:
                assert np.array_equal(getattr(a, name), getattr(b, name)), name
                assert len(getattr(a, name)) == len(a.token_ids)
            assert (a.logprobs is None) == (b.logprobs is None)
            if a.logprobs is not None and b.logprobs is not None:
                assert list(a.logprobs) == list(b.logprobs)


class Repeats:
    """Draws the token of five places before again, mostly: so that guesses from the sample itself are right."""

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for row, output in zip(logits, batch.output_token_ids, strict=True):
            if len(output) >= 5:
                row[output[-5]] += 9
        return logits


# case SD-02
@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 1.0, "temperature": 0.8},
        {"min_p": 0.3, "temperature": 0.9},
        {"logit_bias": {41: 5.0}},
        {"bad_words": ["a", "e"]},
        {"allowed_token_ids": range(40, 50)},
        {"min_tokens": 12, "stop_token_ids": range(40, 80), "temperature": 1.0},
        {"logits_processors": [Repeats()], "temperature": 0.7},
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{30}")},
        {"top_k": 3, "temperature": 0.7},
        {"top_p": 0.5, "temperature": 0.7},
        {"forced_token_ids": PROMPT[:12], "temperature": 0.6},
        {"thinking_token_budget": 4},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_parameter_is_honoured(plain: LLM, llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 30, "seed": 3, "temperature": 0.0, "logprobs": 2, "n": 2, **fields})
    wanted = plain.generate(PROMPTS, params)
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, params), wanted)
    llm.engine.scheduler.check_integrity()


# case SD-03
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_each_prefix_also_beside_chunked_prompts(
    folder: Path, plain: LLM, temperature: float
) -> None:
    ask = SamplingParams(max_tokens=24, seed=1, temperature=temperature, logprobs=2, ignore_eos=True)
    params = [ask, replace(ask, logprobs=None), replace(ask, prompt_logprobs=1), replace(ask, logprobs=5)]
    wanted = plain.generate(PROMPTS, params)
    for method in (NGRAM, SUFFIX):
        llm = make(folder, method, max_num_batched_tokens=13)
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), wanted)
        assert accepted(llm) > 20 or (method, temperature) == (NGRAM, 0.8)
        tokens = [output.outputs[0].token_ids for output in wanted]
        scores = plain.score([[*prompt, *new] for prompt, new in zip(PROMPTS, tokens, strict=True)])
        for prompt, output, score in zip(PROMPTS, wanted, scores, strict=True):
            assert np.array_equal(output.outputs[0].raw_logprobs, score.logprobs[len(prompt) - 1 :])


SCHEMA = {
    "type": "object",
    "properties": {"temperature in degrees": {"type": "integer"}, "is it raining outside": {"type": "boolean"}},
    "required": ["temperature in degrees", "is it raining outside"],
}


# case SD-02
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_that_a_schema_prescribes_takes_few_steps(plain: LLM, llm: LLM, temperature: float) -> None:
    schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(n=2, seed=4, temperature=temperature, max_tokens=100, structured_outputs=schema)
    expected = plain.generate(PROMPTS, params)
    before = llm.get_metrics()["num_steps_total"]
    assert_same(llm.generate(PROMPTS, params), expected)
    most_tokens = max(len(sample.token_ids) for output in expected for sample in output.outputs)
    assert most_tokens >= 60  # 55 of them are prescribed, in five parts
    assert llm.get_metrics()["num_steps_total"] - before <= most_tokens - 30


@pytest.fixture(scope="module")
def seen(folder: Path, plain: LLM) -> tuple[LLM, Callable[..., SamplingParams], list[int]]:
    """An engine that has seen a sample of a prompt, so that it can guess all of it: parameters, and its tokens."""

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 40, "seed": 11, "ignore_eos": True, **fields})

    llm = make(folder, SUFFIX)
    output = llm.generate(PROMPT, params())[0]
    assert_same([output], plain.generate(PROMPT, params()))
    assert_same([output], llm.generate(PROMPT, params()))  # right guesses: from now on every step asks for some
    return llm, params, output.outputs[0].token_ids


# case SD-04
@pytest.mark.parametrize("place", [4, 5, 6, 11])
@pytest.mark.parametrize("cap", [2, 4, 5, 6, 7, 40])
@pytest.mark.parametrize("kind", ["id", "string", "included", "both"])
def test_a_stop_within_an_accepted_run_cuts_everything_behind_it(
    plain: LLM,
    seen: tuple[LLM, Callable[..., SamplingParams], list[int]],
    place: int,
    cap: int,
    kind: str,
) -> None:
    llm, params, tokens = seen
    tokenizer: Any = llm.get_tokenizer()
    word = tokenizer.decode(tokens[place - 1 : place + 1])
    fields: dict[str, Any] = {
        "id": {"stop_token_ids": [tokens[place]]},
        "string": {"stop": [word]},
        "included": {"stop": [word], "include_stop_str_in_output": True},
        "both": {"stop": [word], "stop_token_ids": [tokens[place + 2]]},
    }[kind]
    asked = params(max_tokens=cap, **fields)
    before, generated = accepted(llm), llm.get_metrics()["generation_tokens_total"]
    outputs = llm.generate(PROMPT, asked)
    assert_same(outputs, plain.generate(PROMPT, asked))
    assert len(outputs[0].outputs[0].token_ids) <= cap
    assert llm.get_metrics()["generation_tokens_total"] - generated == len(outputs[0].outputs[0].token_ids)
    if cap >= 4 and len(outputs[0].outputs[0].token_ids) >= 4:
        assert accepted(llm) > before
    deltas = list(llm.stream(PROMPT, replace(asked, output_kind=RequestOutputKind.DELTA)))
    assert "".join(delta.outputs[0].text for delta in deltas) == outputs[0].outputs[0].text
    assert [i for delta in deltas for i in delta.outputs[0].token_ids] == outputs[0].outputs[0].token_ids
    llm.engine.scheduler.check_integrity()


def test_a_sample_that_reaches_the_longest_length_ends_there(folder: Path) -> None:
    # case SD-04
    params = SamplingParams(max_tokens=None, seed=4, ignore_eos=True)
    outputs = [
        llm.generate(PROMPT, params)
        for llm in (make(folder, None, max_model_len=70), make(folder, SUFFIX, max_model_len=70))
        for _ in range(2)
    ]
    for mine in outputs[1:]:
        assert_same(mine, outputs[0])
    assert len(outputs[0][0].outputs[0].token_ids) == 70 - len(PROMPT)


def test_a_sample_that_has_been_seen_takes_fewer_steps(
    seen: tuple[LLM, Callable[..., SamplingParams], list[int]],
) -> None:
    llm, params, tokens = seen
    before = llm.get_metrics()
    assert llm.generate(PROMPT, params())[0].outputs[0].token_ids == tokens
    now = llm.get_metrics()
    changes = {name: now[name] - before[name] for name in now}
    assert changes["num_steps_total"] < 25 and changes["generation_tokens_total"] == 40
    num_accepted = changes["accepted_draft_tokens_total"]
    assert num_accepted == 40 - changes["num_steps_total"]
    assert num_accepted == sum(changes[f"accepted_draft_tokens_total_at_{place}"] for place in range(1, 9))
    assert changes["draft_tokens_total"] >= num_accepted


def test_aborted_and_resumed_samples_forks_and_searches_are_as_without(folder: Path, llm: LLM) -> None:
    plain = make(folder, None)  # forks have the next sample indices that their parent has left
    params = SamplingParams(max_tokens=40, seed=2, ignore_eos=True, n=2, temperature=0.5)
    wanted = plain.generate(PROMPTS, params)
    llm.generate(PROMPTS, params)
    for num_steps in (2, 5, 9):
        ids = llm.enqueue(PROMPTS, params)
        ended = [output for _ in range(num_steps) for output in llm.step()]
        llm.abort(ids)
        outputs = sorted([*ended, *llm.wait_for_completion()], key=lambda output: ids.index(output.request_id))
        assert_same(llm.resume(outputs, params), wanted)
    forks = []
    for each in (llm, plain):
        each.fork(wanted[0], at=7, n=2, sampling_params=params)
        forks.append(each.wait_for_completion())
    assert_same(forks[0], forks[1])
    beams = BeamSearchParams(3, 6, ignore_eos=True)
    for mine, theirs in zip(llm.beam_search(PROMPTS, beams), plain.beam_search(PROMPTS, beams), strict=True):
        assert [beam.tokens for beam in mine.sequences] == [beam.tokens for beam in theirs.sequences]
    llm.engine.scheduler.check_integrity()


def test_a_policy_update_makes_no_guess_wrong_for_good(folder: Path) -> None:
    params = SamplingParams(max_tokens=40, seed=2, ignore_eos=True)
    llm, other = make(folder, SUFFIX), make(folder, None)
    llm.generate(PROMPTS, params)
    for changed in (llm, other):
        weights = {name: tensor * 1.5 for name, tensor in changed.engine.parameters().items()}
        with changed.policy_update(version=1) as update:
            update.load(weights.items())
    wanted = other.generate(PROMPTS, params)
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, params), wanted)
    assert accepted(llm) > 40


@pytest.mark.slow
def test_replicas_speculate_too(folder: Path, plain: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True, n=2, logprobs=1)
    text = plain.generate(PROMPT, params)[0].outputs[0].text
    stopped = replace(params, stop=[text[20:22]])
    penalised = replace(params, frequency_penalty=-1.0, bad_words=["a", "e"])  # case SD-02
    structured = replace(params, structured_outputs=StructuredOutputsParams(regex="([ab]{3,5}!)+"))
    with make(folder, SUFFIX, data_parallel_size=2) as llm:
        for _ in range(3):  # a prompt does not always come to the same rank
            for asked in (params, stopped, penalised, structured):
                assert_same(llm.generate(PROMPTS, asked), plain.generate(PROMPTS, asked))
        assert accepted(llm) > 100
        assert llm.get_metrics()["kv_cache_usage"] == 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("ngram", "speculative_config='ngram'"),
        ({"num_speculative_tokens": 3}, "'method' is missing"),
        ({"method": "ngram", "drafts": 3}, "'drafts' is no field"),
        ({"method": "ngram", "model": "small"}, "model='small' is not used with method='ngram'"),
        ({"method": "medusa"}, "model=None is not valid"),
    ],
)
def test_what_is_not_valid_is_refused(folder: Path, value: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(folder, value)


def test_the_configuration_is_an_object_or_its_fields(folder: Path) -> None:
    config = make(folder, {"method": "ngram"}).config
    assert config.speculative_config == SpeculativeConfig("ngram")
    assert make(folder, SpeculativeConfig("suffix")).config.speculative_config == SpeculativeConfig("suffix")
    assert "draft_tokens_total" not in make(folder, None).get_metrics()


def test_drafters_learn_from_what_else_could_have_come(folder: Path, plain: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=2, ignore_eos=True, n=4)
    llm = make(folder, SUFFIX)
    seen: list[tuple[int, int, list[int], list[float]]] = []
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    tell = speculation.saw

    def listen(request: Request, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        seen.append((position, token_id, likely, shares))
        tell(request, position, token_id, likely, shares)

    speculation.saw = listen
    assert_same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
    assert len(seen) > 40
    assert all(position >= 3 and 0 < sum(shares) < 1.001 and len(likely) == 6 for position, _, likely, shares in seen)
    greedy = replace(params, temperature=0.0, n=1)
    seen.clear()
    llm.generate(PROMPTS, greedy)
    assert not seen
