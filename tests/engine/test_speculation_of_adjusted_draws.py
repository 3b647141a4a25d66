"""Drafts of samples whose draws look at their tokens: whatever is guessed, outputs are those without guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

import rollout.engine.make_scheduler
from rollout import (
    LLM,
    LogitsBatch,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputsParams,
)
from rollout.core.speculation import Guide, Speculation
from rollout.request import Request
from tests.support.tiny import make_tiny_llama

THINK = [ord(char) - 28 for char in "<think>"]
PROMPTS = [[*range(40, 60), *range(40, 60), 40, 41], [3, 4, 5, *THINK]]
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
MOST = 5  # drafts a step
JSON = {"type": "object", "properties": {"a": {"type": "boolean"}, "text": {"type": "string"}}, "required": ["a"]}


class Again:
    """Draws the token of three places before again, mostly."""

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for row, output in zip(logits, batch.output_token_ids, strict=True):
            if len(output) >= 3:
                row[output[-3]] += 5
        return logits


AGAIN = Again()
# Each alone, strongly. Drafts contain a token twice in one window: penalties of a row must see the drafts before it.
STRONG: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": 2.0, "allowed_token_ids": range(40, 46)},
    "presence_penalty": {"presence_penalty": 2.0, "allowed_token_ids": range(40, 50)},
    "negative": {"frequency_penalty": -2.0, "presence_penalty": -1.5},
    "repetition_penalty": {"repetition_penalty": 4.0},
    "repetition_encouraged": {"repetition_penalty": 0.3},
    "logit_bias": {"logit_bias": {41: 6.0, 42: 6.5, 43: -5.0}},
    "bad_words": {"bad_words": ["a", "ee", "ab", "q"], "logit_bias": {ord("e") - 28: 6.0}},
    "allowed_token_ids": {"allowed_token_ids": range(40, 44)},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": range(40, 90), "repetition_penalty": 1.5},
    "logits_processors": {"logits_processors": [AGAIN]},
    "of_transformers": {"logits_processors": [RepetitionPenaltyLogitsProcessor(2.0), AGAIN]},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="([ab]{3,5}!|c)+"), "min_tokens": 4},
    "json": {"structured_outputs": StructuredOutputsParams(json=JSON), "frequency_penalty": 0.7},
    "complete": {"structured_outputs": StructuredOutputsParams(regex="[ab]{7}|[ab]{5}"), "ignore_eos": True},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "top_k": {"top_k": 3, "presence_penalty": 0.5},
    "top_p": {"top_p": 0.5, "repetition_penalty": 1.3},
    "min_p": {"min_p": 0.3, "frequency_penalty": 0.3},
    "forced_token_ids": {"forced_token_ids": [40, 41, 40], "frequency_penalty": 1.0},
    "repetition_detection": {"frequency_penalty": -2.0, "repetition_detection": RepetitionDetectionParams(3, 1, 4)},
    "stop": {"stop": ["b", "7"], "presence_penalty": -0.5, "stop_token_ids": [50, 51]},
}

Key = tuple[tuple[int, ...], int, int]


@dataclass
class Guesses:
    """What drafters know of samples, and how often they tell it."""

    known: dict[Key, list[int]] = field(default_factory=dict)
    rightness: float = 1.0
    are_guided: bool = True  # those that a grammar forbids are left out

    def learn(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            for sample in output.outputs:
                key = tuple(output.prompt_token_ids), sample.seed, sample.sample_index
                assert self.known.setdefault(key, sample.token_ids) == sample.token_ids


class Guesser:
    """The sample's own tokens, each with a probability; or else one of those around, an id that ends it, or any."""

    def __init__(self, guesses: Guesses, request: Request) -> None:
        self.guesses = guesses
        self.request = request
        self.random = random.Random(request.seed)

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        request = self.request
        key = tuple(request.prompt_token_ids), request.seed, request.sample_index
        future = self.guesses.known.get(key, [])[len(token_ids) - request.num_prompt_tokens :]
        drafts: list[int] = []
        for place in range(most):
            is_right = place < len(future) and self.random.random() < self.guesses.rightness
            others = [*token_ids[-2:], *drafts[-2:], 2, self.random.randrange(131)]
            drafts.append(future[place] if is_right else self.random.choice(others))
        return drafts

    def close(self, token_ids: list[int]) -> None:
        pass


class Undeterred(Speculation):
    """Drafts as much as it can, whether or not it was right."""

    def verified(
        self, request: Request, num_drafted: int, num_accepted: int, *, was_wrong: bool, is_text: bool
    ) -> None:
        self.num_drafted[0] += num_drafted
        self.num_accepted[0] += num_accepted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True, near_uniform=True)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, kv_cache_memory="8MiB", block_size=8)


@pytest.fixture(scope="module")
def guesses() -> Guesses:
    return Guesses()


@pytest.fixture(scope="module")
def patched(guesses: Guesses) -> Iterator[None]:
    """Engines made meanwhile that speculate guess as `guesses` says."""

    def make(config: SpeculativeConfig | None, guide: Guide, *, can_have_alternatives: bool) -> Speculation | None:
        if config is None:
            return None
        known = guide if guesses.are_guided else None
        return Undeterred(lambda request: Guesser(guesses, request), MOST, 1000, rate=1.0, guide=known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.engine.make_scheduler, "make_speculation", make)
        yield


@pytest.fixture(scope="module")
def llm(folder: Path, patched: None) -> LLM:
    return LLM(folder, kv_cache_memory="8MiB", block_size=8, speculative_config={"method": "ngram"})


def counts(llm: LLM) -> tuple[int, int]:
    metrics = llm.get_metrics()
    return metrics["draft_tokens_total"], metrics["accepted_draft_tokens_total"]  # type: ignore[return-value]


def assert_same(mine: list[RequestOutput], wanted: list[RequestOutput], names: list[str] | None = None) -> None:
    for index, (one, other) in enumerate(zip(mine, wanted, strict=True)):
        about = names[index] if names else index
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text) == (b.token_ids, b.text), about
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), about
            for name in ARRAYS:
                assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), (about, name)
                assert len(getattr(a, name)) == len(a.token_ids)
            assert (a.logprobs is None) == (b.logprobs is None)
            if a.logprobs is not None and b.logprobs is not None:
                assert list(a.logprobs) == list(b.logprobs), about


# cases SD-02, SD-03
@pytest.mark.parametrize(
    ("temperature", "mode"), [(0.0, "raw_logprobs"), (0.8, "processed_logprobs"), (1.0, "raw_logprobs")]
)
def test_every_parameter_is_honoured_whatever_is_guessed(
    folder: Path, patched: None, guesses: Guesses, temperature: float, mode: str
) -> None:
    asked = [
        SamplingParams(
            **{"temperature": temperature, "max_tokens": 22, "seed": 9 * number, "n": 2, "logprobs": 2, **fields}
        )
        for number, fields in enumerate(STRONG.values())
    ]
    prompts = [prompt for prompt in PROMPTS for _ in asked]
    params = [replace(one, seed=100 * place + (one.seed or 0)) for place in range(len(PROMPTS)) for one in asked]
    options: dict[str, Any] = {"kv_cache_memory": "8MiB", "block_size": 8, "logprobs_mode": mode}
    wanted = LLM(folder, **options).generate(prompts, params)
    guesses.known.clear()
    guesses.learn(wanted)
    guesses.are_guided = mode == "raw_logprobs"
    llm = LLM(folder, **options, speculative_config={"method": "ngram"})
    guesses.are_guided = True
    for rightness, least, most in ((1.0, 0.75, 1.0), (0.8, 0.2, 0.8), (0.0, 0.0, 0.3)):
        guesses.rightness = rightness
        before = counts(llm)
        assert_same(llm.generate(prompts, params), wanted, len(PROMPTS) * list(STRONG))
        num_drafted, num_accepted = (now - then for now, then in zip(counts(llm), before, strict=True))
        assert num_drafted > 500 and least <= num_accepted / num_drafted <= most
    llm.engine.scheduler.check_integrity()
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_right_guesses_save_steps_for_every_parameter(llm: LLM, plain: LLM, guesses: Guesses) -> None:
    """Each request alone, so that none of them is served without drafts unnoticed."""
    # case SD-02
    guesses.rightness = 1.0
    for name, fields in STRONG.items():
        params = SamplingParams(**{"temperature": 0.8, "max_tokens": 22, "seed": 7, **fields})
        guesses.known.clear()
        wanted = plain.generate(PROMPTS[1], params)
        guesses.learn(wanted)
        before = llm.get_metrics()["num_steps_total"]
        assert_same(llm.generate(PROMPTS[1], params), wanted, [name])
        num_steps = llm.get_metrics()["num_steps_total"] - before
        num_free = len(wanted[0].outputs[0].token_ids) - len(fields.get("forced_token_ids", ()))
        assert num_steps <= 2 + num_free // (MOST + 1), name


CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.3],
    "frequency_penalty": [0.0, 1.0, -1.0],
    "presence_penalty": [0.0, 0.8],
    "repetition_penalty": [1.0, 2.0, 0.5],
    "logit_bias": [None, {41: 3.0, 60: 4.0}],
    "bad_words": [None, ["e", "aa", "ab"]],
    "allowed_token_ids": [None, range(35, 110)],
    "min_tokens": [0, 6],
    "stop_token_ids": [None, [41, 60, 61]],
    "logits_processors": [None, [AGAIN]],
    "last": [
        {},
        {"thinking_token_budget": 3},
        {"structured_outputs": StructuredOutputsParams(regex="([a-z]|<th){2,9}|[A-Z ]+")},
        {"structured_outputs": StructuredOutputsParams(json_object=True)},
    ],
    "top_p": [1.0, 0.8],
    "ignore_eos": [False, True],
    "stop": [None, ["t", "a"]],
    "n": [1, 3],
}


@settings(max_examples=25, deadline=None)
@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 1), st.fixed_dictionaries({k: st.sampled_from(v) for k, v in CHOICES.items()})),
        min_size=1,
        max_size=4,
    ),
    rightness=st.sampled_from([0.3, 0.8, 1.0]),
    num_aborted=st.integers(0, 3),
)
def test_combinations_of_parameters_are_honoured_also_when_aborted_and_resumed(
    llm: LLM,
    plain: LLM,
    guesses: Guesses,
    wanted: list[tuple[int, dict[str, Any]]],
    rightness: float,
    num_aborted: int,
) -> None:
    # case SD-02
    prompts, params = [], []
    for seed, (prompt, fields) in enumerate(wanted):
        others = dict(fields)
        last = others.pop("last")
        if last.get("thinking_token_budget") is not None:
            others["allowed_token_ids"] = None
            others["bad_words"] = None
        prompts.append(PROMPTS[prompt])
        params.append(SamplingParams(max_tokens=16, seed=seed, **others, **last))
    expected = plain.generate(prompts, params)
    guesses.known.clear()
    guesses.learn(expected)
    guesses.rightness = rightness
    ids = llm.enqueue(prompts, params)
    ended = [output for _ in range(num_aborted) for output in llm.step()]
    if num_aborted:
        llm.abort(ids)
    outputs = sorted([*ended, *llm.wait_for_completion()], key=lambda output: ids.index(output.request_id))
    unfinished = [i for i, o in enumerate(outputs) if any(s.finish_reason == "abort" for s in o.outputs)]
    resumed = llm.resume([outputs[i] for i in unfinished], [params[i] for i in unfinished])
    for index, output in zip(unfinished, resumed, strict=True):
        outputs[index] = output
    assert_same(outputs, expected)
    llm.engine.scheduler.check_integrity()


def test_preempted_and_forked_samples_are_as_without_guesses(folder: Path, patched: None, guesses: Guesses) -> None:
    # case SD-02
    fields: dict[str, Any] = {"n": 3, "max_tokens": 30, "ignore_eos": True, "frequency_penalty": 1.0}
    many = [STRONG["regex"], STRONG["bad_words"], STRONG["json"], {"thinking_token_budget": 4}]
    params = [SamplingParams(**{**fields, **each, "seed": number}) for number, each in enumerate(many)]
    for preemption_mode in ("recompute", "swap"):
        options: dict[str, Any] = {"block_size": 4, "preemption_mode": preemption_mode, "swap_space": "4MiB"}
        if preemption_mode == "recompute":
            options["swap_space"] = 0
        engines = [
            LLM(folder, kv_cache_memory="8MiB", **options),
            LLM(folder, kv_cache_memory="640KiB", speculative_config={"method": "ngram"}, **options),
        ]
        expected = engines[0].generate(2 * PROMPTS, params)
        guesses.known.clear()
        guesses.learn(expected)
        guesses.rightness = 0.7
        assert_same(engines[1].generate(2 * PROMPTS, params), expected)
        assert engines[1].get_metrics()["num_preemptions_total"] > 0
        forked = []
        for each in engines:
            each.fork(expected[1], at=5, n=2, sampling_params=replace(params[1], n=2))
            forked.append(each.wait_for_completion())
            guesses.learn(forked[0])
        assert_same(forked[1], forked[0])


class Recorder:
    """Remembers what it was given, row by row, and adds a bias that depends on it."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[tuple[list[int], list[int], bytes]]] = {}

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for row, *texts, seed, index in zip(
            logits, batch.prompt_token_ids, batch.output_token_ids, batch.seeds, batch.sample_indices, strict=True
        ):
            prompt, output = texts
            self.rows.setdefault((seed, index), []).append((list(prompt), list(output), row.numpy().tobytes()))
            row[(sum(output) * 7 + len(output)) % 131] += 4
            output.append(7)  # the lists are its own
            prompt.clear()
        return logits


@pytest.mark.parametrize("rightness", [0.0, 0.6, 1.0])
def test_processors_get_what_they_get_without_guesses(plain: LLM, llm: LLM, guesses: Guesses, rightness: float) -> None:
    # case SD-02
    seen, given = Recorder(), Recorder()
    common: dict[str, Any] = {"n": 2, "max_tokens": 18, "seed": 5, "ignore_eos": True, "frequency_penalty": 0.8}
    expected = plain.generate(PROMPTS[0], SamplingParams(logits_processors=[seen], **common))
    guesses.known.clear()
    guesses.learn(expected)
    guesses.rightness = rightness
    assert_same(llm.generate(PROMPTS[0], SamplingParams(logits_processors=[given], **common)), expected)
    assert given.rows.keys() == seen.rows.keys()
    for key, rows in seen.rows.items():
        assert len(rows) == 18
        assert [row for row in rows if row not in given.rows[key]] == []
        real = [row for row in given.rows[key] if row in rows]
        assert sorted({len(output) for _, output, _ in real}) == list(range(18))
        for prompt, output, _ in given.rows[key]:  # all others are behind guesses, which go on from the real tokens
            assert prompt == PROMPTS[0]
            if rightness == 1.0:
                assert output == rows[-1][1][: len(output)]


class Strict:
    """Knows only the tokens of some outputs: whatever else comes is an error, for all rows of the call."""

    def __init__(self, outputs: list[list[int]], limit: int) -> None:
        self.outputs = outputs
        self.limit = limit

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for output in batch.output_token_ids:
            if not any(known[: len(output)] == output for known in self.outputs) or len(output) >= self.limit:
                raise KeyError(f"never heard of {len(output)}")
        return logits


@pytest.mark.parametrize("limit", [100, 6, 5])
@pytest.mark.parametrize("rightness", [0.0, 0.6, 1.0])
def test_a_processor_that_a_wrong_guess_breaks_ends_nobody(
    plain: LLM, llm: LLM, guesses: Guesses, rightness: float, limit: int
) -> None:
    """What ends a request is what would end it without guesses."""
    # case SD-02
    params = [
        SamplingParams(seed=seed, max_tokens=14, ignore_eos=True, presence_penalty=0.5, logits_processors=[AGAIN])
        for seed in (1, 2)
    ]
    free = plain.generate(PROMPTS, params)
    guesses.known.clear()
    guesses.learn(free)
    guesses.rightness = rightness
    strict = Strict([output.outputs[0].token_ids for output in free], limit)
    params = [replace(one, logits_processors=[AGAIN, strict]) for one in params]
    if limit > 14:
        assert_same(llm.generate(PROMPTS, params), free)
        return
    for prompt, asked, output in zip(PROMPTS, params, free, strict=True):
        expected = plain.generate(prompt, asked)
        assert_same(llm.generate(prompt, asked), expected)
        sample = expected[0].outputs[0]
        assert (sample.finish_reason, sample.token_ids) == ("error", output.outputs[0].token_ids[:limit])
        assert sample.stop_reason == f"logits processor Strict raised KeyError: 'never heard of {limit}'"


def test_a_row_of_wrong_numbers_behind_a_wrong_guess_is_forgotten(plain: LLM, llm: LLM, guesses: Guesses) -> None:
    # case SD-02
    def not_twice(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        for row, output in zip(logits, batch.output_token_ids, strict=True):
            row[output] = -torch.inf
            if len(set(output)) < len(output):
                row[:] = torch.nan
        return logits

    params = SamplingParams(n=2, seed=3, max_tokens=20, ignore_eos=True, logits_processors=[not_twice])
    expected = plain.generate(PROMPTS[0], params)
    guesses.known.clear()
    guesses.learn(expected)
    for rightness in (0.0, 0.5, 1.0):
        guesses.rightness = rightness
        assert_same(llm.generate(PROMPTS[0], params), expected)
    assert {sample.finish_reason for sample in expected[0].outputs} == {"length"}
    assert all(np.unique(sample.token_ids).size == 20 for sample in expected[0].outputs)
