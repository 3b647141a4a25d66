"""Medusa and EAGLE in a whole engine: outputs are those without them, and guesses those of the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout import LLM, RequestOutput, SamplingParams
from rollout.core.schedule import DraftPlan
from tests.support.drafters import eagle_reference, make_eagle, make_medusa, medusa_reference, target_features
from tests.support.tiny import make_tiny_llama

SHARED = list(range(40, 57))  # two blocks of eight, and one token
PROMPTS = [[*SHARED, 7, 8, 9], [20, 21], [*SHARED, 66], list(range(60, 95))]
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
HEADS = {"medusa": make_medusa, "eagle": make_eagle}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), tie=False)
    for method, make_heads in HEADS.items():
        make_heads(folder / method)
    return folder


def make(folder: Path, method: str | None, heads: Path | None = None, **options: Any) -> LLM:
    if method is not None:
        options["speculative_config"] = {
            "method": method,
            "model": str(heads or folder / method),
            "num_speculative_tokens": 3,
            "max_batch_for_speculation": 64,
            "only_if_faster": False,
        }
    return LLM(folder, **{"kv_cache_memory": "4MiB", "block_size": 8} | options)


def assert_same(mine: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
            for name in ARRAYS:
                assert np.array_equal(getattr(a, name), getattr(b, name)), name


@dataclass
class Watched:
    """What the drafter of an engine has guessed: the tokens that were known then, and the guesses behind them."""

    llm: LLM
    guesses: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        drafter = self.llm.collective_rpc(lambda worker: worker.drafter)[0]
        propose: Callable[[DraftPlan], dict[str, list[int]]] = drafter.propose

        def watched(plan: DraftPlan) -> dict[str, list[int]]:
            found = propose(plan)
            known = {request.request_id: request.token_ids for request in self.llm.engine.scheduler.unfinished()}
            self.guesses += [(list(known[request_id]), guesses) for request_id, guesses in found.items() if guesses]
            return found

        drafter.propose = watched


def reference(method: str, folder: Path) -> Callable[[list[int], int], list[int]]:
    """known tokens, number -> that many greedy guesses, by the formulas alone."""
    vocabulary = target_features(folder, range(131))[1]

    def medusa(known: list[int], num: int) -> list[int]:
        tensors = load_file(folder / "medusa/medusa_lm_head.safetensors")
        features, _, output = target_features(folder, known[:-1])
        hidden = [medusa_reference(tensors, features[-1], head, 1) for head in range(num)]
        return [int((output @ row).argmax()) for row in hidden]

    def eagle(known: list[int], num: int) -> list[int]:
        tensors = torch.load(folder / "eagle/pytorch_model.bin")
        features, _, output = target_features(folder, known[:-1])
        embedded = vocabulary[known[1:]]
        guesses: list[int] = []
        for _ in range(num):
            hidden = eagle_reference(tensors, embedded, features)[-1]
            guesses.append(int((output @ hidden).argmax()))
            embedded = torch.cat([embedded, vocabulary[guesses[-1:]]])
            features = torch.cat([features, hidden[None]])
        return guesses

    return medusa if method == "medusa" else eagle


SETTINGS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "eager": {"enforce_eager": True, "block_size": 16},
    "chunks": {"max_num_batched_tokens": 7},
    "recompute": {"kv_cache_memory": "190KiB"},
    "swap": {"kv_cache_memory": "190KiB", "preemption_mode": "swap", "swap_space": "1MiB"},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_guesses_come_from_the_sequence_alone(folder: Path, method: str, setting: str) -> None:
    llm = make(folder, method, **SETTINGS[setting])
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, n=2)
    watched = Watched(llm)
    wanted = make(folder, None).generate(PROMPTS, params)
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, params), wanted)
    llm.engine.scheduler.check_integrity()
    if setting in ("recompute", "swap"):
        assert llm.get_metrics()["num_preemptions_total"] > 0
    guess = reference(method, folder)
    checked = watched.guesses[:: max(1, len(watched.guesses) // 24)]
    assert len(checked) >= 12
    for known, guesses in checked:
        assert guesses == guess(known, len(guesses)), known


@pytest.mark.parametrize("method", HEADS)
def test_outputs_are_those_without_heads_whatever_is_asked_for(folder: Path, method: str) -> None:
    plain, llm = make(folder, None), make(folder, method)
    params = [
        SamplingParams(max_tokens=24, seed=3, ignore_eos=True, n=3, logprobs=2),
        SamplingParams(max_tokens=24, seed=4, temperature=0.7, top_p=0.8, stop_token_ids=range(30)),
        SamplingParams(max_tokens=24, seed=5, temperature=0.9, top_k=9, frequency_penalty=0.5),
        SamplingParams(max_tokens=3, seed=6, prompt_logprobs=1),
    ]
    for asked in (params, params[::-1]):
        assert_same(llm.generate(PROMPTS, asked), plain.generate(PROMPTS, asked))
    assert llm.get_metrics()["draft_tokens_total"] > 50
    assert_same(llm.generate(PROMPTS[0], params[0]), plain.generate(PROMPTS[0], params[0]))


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("level", [1, 2])
def test_heads_sleep_and_wake_with_the_engine(folder: Path, method: str, level: int) -> None:
    llm = make(folder, method)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    wanted = llm.generate(PROMPTS, params)
    report = llm.sleep(level)
    assert report.released["features"] > 0
    assert (report.released.get("drafter_kv_cache", 0) > 0) == (method == "eagle")
    assert (report.released.get("drafter", 0) > 0) == (level == 2)
    llm.wake_up()
    if level == 2:
        llm.reload_weights()
    watched = Watched(llm)
    assert_same(llm.generate(PROMPTS, params), wanted)
    guess = reference(method, folder)
    for known, guesses in watched.guesses[:6]:
        assert guesses == guess(known, len(guesses))


@pytest.mark.parametrize("method", HEADS)
def test_a_pool_of_another_size_has_features_too(folder: Path, method: str) -> None:
    llm = make(folder, method)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    wanted = llm.generate(PROMPTS, params)
    before = llm.memory_ledger()["features"].reserved
    llm.resize_kv_cache("2MiB")
    assert llm.memory_ledger()["features"].reserved < before
    watched = Watched(llm)
    assert_same(llm.generate(PROMPTS, params), wanted)
    guess = reference(method, folder)
    for known, guesses in watched.guesses[:6]:
        assert guesses == guess(known, len(guesses))
