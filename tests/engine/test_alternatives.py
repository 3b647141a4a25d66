"""Guesses in the place of drafts: where one of them is right, tokens and arrays are what they would be without any."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rollout.engine.make_scheduler
import rollout_kernels
from rollout import LLM, RequestOutput, SamplingParams
from rollout.core.speculation import Guess, Speculation
from rollout.request import Request
from rollout.speculation.config import SpeculativeConfig
from tests.support.tiny import make_tiny_llama

ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
MOST, MOST_ALTERNATIVES = 3, 5


@dataclass
class Foreseen:
    """What samples will draw, by prompt, seed and index."""

    tokens: dict[tuple[tuple[int, ...], int, int], list[int]] = field(default_factory=dict)

    def learn(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            for sample in output.outputs:
                self.tokens[tuple(output.prompt_token_ids), sample.seed, sample.sample_index] = sample.token_ids


class Guesser:
    """A draft is right in half of the cases; where it is not, the right token is mostly among the alternatives."""

    def __init__(self, foreseen: Foreseen, request: Request) -> None:
        self.future = foreseen.tokens[tuple(request.prompt_token_ids), request.seed, request.sample_index]
        self.num_prompt_tokens = request.num_prompt_tokens
        self.random = random.Random(request.seed + request.sample_index)

    def guess(
        self, token_ids: list[int], most: int, least_chance: float, most_alternatives: int
    ) -> tuple[list[Guess], list[Guess]]:
        coming = self.future[len(token_ids) - self.num_prompt_tokens :][:most]
        drafts, alternatives, is_right = [], [], True
        for place, token_id in enumerate(coming):
            is_right = is_right and self.random.random() < 0.5
            drafts.append(Guess(token_id if is_right else (token_id + 1) % 64, 0.5, place))
            others = {self.random.randrange(64) for _ in range(2)} | (
                {token_id} if self.random.random() < 0.8 else set()
            )
            alternatives += [Guess(other, 0.2, place) for other in others - {drafts[-1].token_id}]
        self.random.shuffle(alternatives)
        return drafts, alternatives[:most_alternatives]

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return [guess.token_id for guess in self.guess(token_ids, most, 0.0, 0)[0]]

    def saw(self, position: int, token_id: int, likely: list[int], shares: list[float]) -> None:
        pass

    def close(self, token_ids: list[int]) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), near_uniform=True)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory": "8MiB"},
        {"kv_cache_memory": "8MiB", "block_size": 8, "kv_cache_dtype": "int8"},
        {"kv_cache_memory": "8MiB", "block_size": 24, "enforce_eager": True},
        {"kv_cache_memory": "160KiB", "block_size": 8, "max_num_batched_tokens": 24, "max_model_len": 96},
    ],
    ids=["recorded", "int8", "eager", "preempted"],
)
def test_tokens_and_arrays_are_those_without_guesses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    # case SD-02
    params = [
        SamplingParams(n=3, temperature=temperature, max_tokens=40, seed=seed, logprobs=2, ignore_eos=True, top_p=top_p)
        for seed, (temperature, top_p) in enumerate([(0.0, 1.0), (1.0, 1.0), (0.7, 0.9)])
    ]
    prompts = [{"prompt_token_ids": [1, *range(place, place + 11 + 9 * place)]} for place in range(3)]
    wanted = LLM(folder, **options).generate(prompts, params)
    foreseen = Foreseen()
    foreseen.learn(wanted)

    def make(config: SpeculativeConfig | None, guide: object, *, can_have_alternatives: bool) -> Speculation | None:
        assert can_have_alternatives
        guessing = Speculation(
            lambda request: Guesser(foreseen, request), MOST, 100, most_alternatives=MOST_ALTERNATIVES
        )
        return None if config is None else guessing

    monkeypatch.setattr(rollout.engine.make_scheduler, "make_speculation", make)
    llm = LLM(folder, speculative_config={"method": "suffix"}, **options)
    found = llm.generate(prompts, params)
    for one, other in zip(found, wanted, strict=True):
        for mine, expected in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == expected.token_ids
            for name in ARRAYS:
                assert getattr(mine, name).tobytes() == getattr(expected, name).tobytes(), name
            assert mine.logprobs is not None and expected.logprobs is not None
            assert list(mine.logprobs) == list(expected.logprobs)
    metrics = llm.get_metrics()
    assert metrics["accepted_alternative_tokens_total"] > 20
    assert metrics["kv_cache_usage"] == 0.0
    if "160KiB" in options.values():
        assert metrics["num_preemptions_total"] > 0


def test_the_reference_kernels_find_the_last_key_in_another_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollout_kernels.use_backend("reference"):
        test_tokens_and_arrays_are_those_without_guesses(folder, monkeypatch, {"kv_cache_memory": "8MiB"})
