"""Verification by rejection in a whole engine: the distribution and the numbers of the target, whatever is guessed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout_kernels
from rollout import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from rollout.core.speculation import Drafter, Speculation
from rollout.request import Request
from rollout.speculation.ngram import NgramDrafter
from tests.support.chi_square import chi_square
from tests.support.drafters import make_eagle, make_medusa
from tests.support.oracle import load_reference
from tests.support.sampling import log_softmax, simple_kept
from tests.support.tiny import make_tiny_llama

VOCAB = 16
PROMPT = [
    9,
    12,
    5,
    14,
    5,
    3,
    7,
    5,
    8,
    11,
    3,
    10,
    7,
    14,
    12,
    8,
    15,
    9,
    13,
    6,
    4,
    11,
    2,
    10,
    13,
    15,
    6,
    0,
    1,
    4,
    2,
    0,
    1,
    9,
]
FIRST = 5  # forced, since nobody guesses a sample's first token
TEMPERATURE, TOP_P = 0.7, 0.9
NUM_RUNS = 1200
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
NGRAM = {
    "method": "ngram",
    "prompt_lookup_min": 1,
    "num_speculative_tokens": 5,
    "max_batch_for_speculation": 1000,
    "only_if_faster": False,
    "verification": "rejection",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_llama(path / "other", vocab_size=VOCAB, hidden_size=32, eos_token_id=None, seed=1)
    make_medusa(path / "medusa", vocab_size=VOCAB, strength=0.02)
    make_eagle(path / "eagle", vocab_size=VOCAB)
    return make_tiny_llama(path, vocab_size=VOCAB, eos_token_id=None)


def make(folder: Path, speculative: object, **options: Any) -> LLM:
    return LLM(folder, kv_cache_memory="4MiB", block_size=8, speculative_config=speculative, **options)


@pytest.fixture(scope="module")
def logits(folder: Path) -> np.ndarray:
    """What transformers says behind the prompt and the first token, before each of the next three: float32
    [V, V, 3, V], where the first two axes are the first two of these."""
    model = load_reference(folder)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    known = torch.tensor([[*PROMPT, FIRST]]).expand(len(pairs), -1)
    with torch.no_grad():
        logits = model(torch.cat([known, pairs], 1)).logits[:, len(PROMPT) :]
    return logits.numpy().reshape(VOCAB, VOCAB, 3, VOCAB)


def joint(logits: np.ndarray, penalty: float = 0.0) -> np.ndarray:
    """The distribution of the three tokens, float64 [V, V, V]; `penalty` is subtracted from the logit of a token for
    each time that it has come behind the prompt."""
    joint = np.zeros((VOCAB, VOCAB, VOCAB))
    once = np.eye(VOCAB) * penalty
    for a, b in itertools.product(range(VOCAB), repeat=2):
        counts = np.cumsum([once[FIRST], once[a], once[b]], axis=0)
        first, second, third = (distribution(row) for row in (logits[a, b] - counts).astype(np.float32))
        joint[a, b] = first[a] * second[b] * third
    return joint


def distribution(row: np.ndarray) -> np.ndarray:
    kept = simple_kept(row, TEMPERATURE, top_p=TOP_P)
    probabilities = np.where(kept, np.exp(log_softmax(row.astype(np.float64) / TEMPERATURE)), 0.0)
    return probabilities / probabilities.sum()


class Steady(Speculation):
    """As many guesses as there may be, however many were wrong. `make_drafter` is None for a drafter with weights."""

    def __init__(self, make_drafter: Callable[[Request], Drafter] | None, most_drafts: int) -> None:
        super().__init__(make_drafter, most_drafts, most_sequences=1000)
        self._make, self._drafters = make_drafter, {}

    def is_worth_it(self, num_sequences: int, candidates: Sequence[Request]) -> bool:
        return True

    def length(self, request: Request) -> int:
        return self.most_drafts

    def drafts(self, request: Request, most: int) -> list[int]:
        assert self._make is not None
        if request.request_id not in self._drafters:
            self._drafters[request.request_id] = self._make(request)
        return self._drafters[request.request_id].propose(request.token_ids, min(most, self.most_drafts))


class Adversary:
    """Guesses a token that the target's filter leaves out, behind each of the first tokens; then any token."""

    def __init__(self, joint: np.ndarray) -> None:
        self._joint = joint

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        known = tuple(token_ids[len(PROMPT) + 1 :])
        if len(known) > 2:
            return [0] * most
        following = self._joint[known].reshape(VOCAB, -1).sum(1)
        return [int((following == 0).argmax())] * most

    def close(self, token_ids: list[int]) -> None:
        pass


class Peeking:
    """Guesses what the sample's noise makes of the target's own distribution, where that is the most likely token, and
    otherwise nothing: whether there is a guess depends on the noise."""

    def __init__(self, joint: np.ndarray, request: Request) -> None:
        self._joint, self._request = joint, request

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        known = tuple(token_ids[len(PROMPT) + 1 :])
        if len(known) > 2:
            return []
        following = torch.from_numpy(self._joint[known].reshape(VOCAB, -1).sum(1)).float()
        one, none = torch.ones(1), torch.zeros(1, dtype=torch.int64)
        drawn = rollout_kernels.sample(
            following.log()[None],
            temperature=one,
            top_k=none.int(),
            top_p=one,
            min_p=none.float(),
            seed=none + self._request.seed,
            sample_index=none + self._request.sample_index,
            position=none + len(token_ids),
        ).token_ids.item()
        return [int(drawn)] if drawn == following.argmax() else []

    def close(self, token_ids: list[int]) -> None:
        pass


MODELS = {"itself": ("draft_model", ""), "other": ("draft_model", "other"), "medusa": ("medusa", "medusa")}
MODELS |= {"eagle": ("eagle", "eagle")}


# case SD-01
@pytest.mark.slow
@pytest.mark.parametrize(
    ("verification", "kind", "num_guesses"),
    [("rejection", kind, 3) for kind in ("ngram", "penalty", "adversary", "peeking", *MODELS)]
    + [("rejection", kind, 1) for kind in ("ngram", "other")]
    + [("coupled", kind, 3) for kind in ("ngram", "other")],
)
def test_three_tokens_have_the_targets_joint_distribution(
    folder: Path, logits: np.ndarray, monkeypatch: pytest.MonkeyPatch, verification: str, kind: str, num_guesses: int
) -> None:
    penalty = 0.5 if kind == "penalty" else 0.0
    wanted = joint(logits, penalty)

    def drafter(request: Request) -> Drafter:
        if kind == "peeking":
            return Peeking(wanted, request)
        return Adversary(wanted) if kind == "adversary" else NgramDrafter(1, 5)

    speculation = Steady(None if kind in MODELS else drafter, num_guesses)
    monkeypatch.setattr("rollout.engine.make_scheduler.make_speculation", lambda *_, **__: speculation)
    config: dict[str, Any] = {**NGRAM, "verification": verification}
    if kind in MODELS:
        config |= {"method": MODELS[kind][0], "model": str(folder / MODELS[kind][1]), "num_speculative_tokens": 3}
        del config["prompt_lookup_min"]
    llm = make(folder, config)
    params = SamplingParams(n=NUM_RUNS, max_tokens=5, temperature=TEMPERATURE, top_p=TOP_P, forced_token_ids=[FIRST])
    outputs = llm.generate(PROMPT, replace(params, frequency_penalty=penalty))[0].outputs
    tokens = np.array([output.token_ids for output in outputs])[:, 1:4]
    assert chi_square(tokens, wanted) > 1e-3
    if penalty:
        assert chi_square(tokens, joint(logits)) < 1e-3
    assert all(np.isfinite(output.sampled_logprobs[1:]).all() for output in outputs)
    num_drafts, num_accepted = sum(speculation.num_drafted), sum(speculation.num_accepted)
    assert num_drafts > NUM_RUNS / 2
    if kind == "itself":
        assert num_accepted > 0.999 * num_drafts
    elif kind == "adversary":
        assert num_accepted == 0
    else:
        assert 0.01 * num_drafts < num_accepted < 0.9 * num_drafts


TEXT = [*range(40, 60), *range(40, 60), *range(40, 44)]
PROMPTS = [TEXT, [3, 4, 5], [7, 8] * 9, list(range(60, 100))]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, with a tokenizer, that repeats itself; at temperature 0.03 some three tokens are likely everywhere."""
    return make_tiny_llama(tmp_path_factory.mktemp("writer"), tokenizer=True, near_uniform=True, tie=False)


@pytest.fixture(scope="module")
def plain(writer: Path) -> LLM:
    return make(writer, None)


@pytest.fixture(scope="module")
def llm(writer: Path) -> LLM:
    return make(writer, NGRAM)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 40, "seed": 3, "temperature": 0.03, "logprobs": 2, "ignore_eos": True, **fields}
    )


def accepted(llm: LLM) -> float:
    return llm.get_metrics()["accepted_draft_tokens_total"]


def assert_same(mine: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.finish_reason, a.stop_reason) == (b.token_ids, b.finish_reason, b.stop_reason)
            for name in ARRAYS:
                assert np.array_equal(getattr(a, name), getattr(b, name)), name
            assert list(a.logprobs or ()) == list(b.logprobs or ())


# case SD-01
@pytest.mark.parametrize("fields", [{}, {"min_tokens": 12, "stop_token_ids": range(40, 80), "ignore_eos": False}])
def test_greedy_outputs_are_those_without_speculation(plain: LLM, llm: LLM, fields: dict[str, Any]) -> None:
    asked = params(temperature=0.0, **fields)
    before = accepted(llm)
    assert_same(llm.generate(PROMPTS, asked), plain.generate(PROMPTS, asked))
    assert accepted(llm) > before + 10


# case SD-03
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_p": 0.4},
        {"top_k": 2, "temperature": 1.0},
        {"min_p": 0.4},
        {"frequency_penalty": 0.05},
        {"logit_bias": {81: 0.1}, "bad_words": ["a"]},
        {"allowed_token_ids": range(40, 90)},
        {"structured_outputs": StructuredOutputsParams(regex="[ab]{60}")},
    ],
)
def test_all_numbers_are_those_of_the_same_tokens_forced(writer: Path, mode: str, fields: dict[str, Any]) -> None:
    llm, plain = (
        make(writer, speculative, logprobs_mode=mode, max_num_batched_tokens=13) for speculative in (NGRAM, None)
    )
    asked = params(**fields)
    outputs = llm.generate(PROMPTS, asked)
    assert accepted(llm) > 4
    forced = [replace(asked, forced_token_ids=output.outputs[0].token_ids) for output in outputs]
    assert_same(outputs, plain.generate(PROMPTS, forced))


def test_the_same_guesses_give_the_same_tokens(writer: Path) -> None:
    outputs, again = (make(writer, NGRAM).generate(PROMPTS, params(n=2)) for _ in range(2))
    assert_same(again, outputs)
    assert all(mine.outputs[0].token_ids != mine.outputs[1].token_ids for mine in outputs)
    # Guesses come from the sequence alone, but how many there are depends on how often others were right.
    steady = make(writer, {**NGRAM, "num_speculative_tokens": 1})
    alone = [steady.generate(prompt, params(n=2, max_tokens=6))[0] for prompt in PROMPTS]
    assert_same(steady.generate(PROMPTS, params(n=2, max_tokens=6)), alone)


def test_greedy_tokens_are_those_without_speculation_also_where_nothing_is_guessed(writer: Path, plain: LLM) -> None:
    llm = make(writer, {**NGRAM, "max_batch_for_speculation": 1})
    assert_same(llm.generate(PROMPTS, params(temperature=0.0)), plain.generate(PROMPTS, params(temperature=0.0)))
    assert accepted(llm) == 0


class Knowing:
    """Guesses what it has been told."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return self._token_ids[len(token_ids) : len(token_ids) + most]

    def close(self, token_ids: list[int]) -> None:
        pass


# case SD-04
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_ends_a_sample_within_an_accepted_run(
    writer: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    # With only one token left by the filter, every right guess stands.
    asked = params(temperature=temperature, top_k=1)
    whole = plain.generate(PROMPTS[1], asked)[0].outputs[0].token_ids
    knowing = Knowing([*PROMPTS[1], *whole])
    steady = Steady(lambda request: knowing, 5)
    monkeypatch.setattr("rollout.engine.make_scheduler.make_speculation", lambda *_, **__: steady)
    llm = make(writer, NGRAM)
    place = next(i for i in range(3, 40) if whole.index(whole[i]) == i)
    for cap in (place, place + 1, place + 2):
        limited = replace(asked, stop_token_ids=[whole[place]], max_tokens=cap)
        outputs = llm.generate(PROMPTS[1], limited)
        assert outputs[0].outputs[0].token_ids == whole[: min(cap, place + 1)]
        assert outputs[0].outputs[0].finish_reason == ("length" if cap == place else "stop")
        assert_same(outputs, plain.generate(PROMPTS[1], limited))
    assert_same(llm.generate(PROMPTS[1], asked), plain.generate(PROMPTS[1], asked))
    assert accepted(llm) > 30
    llm.engine.scheduler.check_integrity()


def test_preempted_samples_come_to_their_ends(writer: Path) -> None:
    llm = LLM(writer, kv_cache_memory="256KiB", block_size=8, speculative_config=NGRAM)
    outputs = llm.generate(PROMPTS, params(n=4, logprobs=None, max_tokens=60))
    metrics = llm.get_metrics()
    assert metrics["num_preemptions_total"] > 0 and metrics["kv_cache_usage"] == 0 and accepted(llm) > 0
    assert all(len(output.token_ids) == 60 for group in outputs for output in group.outputs)


@pytest.mark.slow
def test_replicas_verify_by_rejection_too(writer: Path, plain: LLM) -> None:
    greedy = params(temperature=0.0)
    with make(writer, NGRAM, data_parallel_size=2) as llm:
        assert_same(llm.generate(PROMPTS, greedy), plain.generate(PROMPTS, greedy))
        outputs = llm.generate(PROMPTS, params(top_k=2))
        assert accepted(llm) > 10
    forced = [params(top_k=2, forced_token_ids=output.outputs[0].token_ids) for output in outputs]
    assert_same(outputs, plain.generate(PROMPTS, forced))
