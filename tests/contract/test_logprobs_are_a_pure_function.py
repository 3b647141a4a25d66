"""Contract 1 for the logprobs beside the tokens: bit-identical whatever runs along, in both modes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout import LLM, RequestOutput, SamplingParams
from rollout.logprobs import Logprobs
from tests.support.tiny import make_tiny_llama

SHARED = list(range(40, 75))
PROMPTS = [SHARED, [*SHARED, 9, 8], [3], SHARED[:20], [11, 12] * 9, SHARED]
PARAMS = [
    SamplingParams(max_tokens=20, seed=1, n=3, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=2, logprobs=0, top_k=5, temperature=0.7, logprob_token_ids=[5, 130]),
    SamplingParams(max_tokens=16, logprobs=131, prompt_logprobs=0, temperature=0),
    SamplingParams(
        max_tokens=24, seed=3, n=2, logprobs=2, forced_token_ids=[*SHARED[20:], 4, 5], repetition_penalty=1.4
    ),
    SamplingParams(
        max_tokens=14, seed=4, top_p=0.6, logprobs=4, prompt_logprobs=131, min_tokens=9, presence_penalty=0.5
    ),
    SamplingParams(max_tokens=10, seed=5, allowed_token_ids=range(60), logprob_token_ids=[70, 8]),
]
OPTIONS: list[dict[str, Any]] = [
    {"block_size": 1, "max_num_batched_tokens": 7},
    {"block_size": 4, "max_num_batched_tokens": 33, "max_num_seqs": 3},
    {"block_size": 4, "num_blocks": 22},
    {"block_size": 4, "num_blocks": 22, "preemption_mode": "swap", "enable_prefix_caching": False},
]
SLOT_BYTES = 2 * 2 * 2 * 32 * 4  # layers, k and v, kv heads, padded head_dim, float32


@pytest.fixture(scope="module", params=["raw_logprobs", "processed_logprobs"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=20, num_kv_heads=2, near_uniform=True)
    return {"model": folder, "max_logprobs": -1, "logprobs_mode": request.param}


@pytest.fixture(scope="module")
def expected(setting: dict[str, Any]) -> list[RequestOutput]:
    """Every prompt alone, in a large pool, without a cache, in one chunk."""
    llm = LLM(**setting, kv_cache_memory="16MiB", enable_prefix_caching=False)
    return [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def assert_same_logprobs(one: Logprobs[Any] | None, other: Logprobs[Any] | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        for name in ("logprobs", "token_ranks", "top_token_ids", "top_logprobs", "chosen_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one == other


def assert_same(found: RequestOutput, wanted: RequestOutput) -> None:
    assert_same_logprobs(found.prompt_logprobs, wanted.prompt_logprobs)
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert_same_logprobs(one.logprobs, other.logprobs)


@pytest.mark.parametrize("options", OPTIONS, ids=["small_chunks", "few_seats", "recompute", "swap"])
def test_logprobs_are_bit_identical_under_every_option(
    options: dict[str, Any], setting: dict[str, Any], expected: list[RequestOutput]
) -> None:
    # cases LP-04, LP-05, SC-01
    options = dict(options)
    pool = options.pop("num_blocks", 300) * 16 * SLOT_BYTES
    swap = {"swap_space": pool} if options.get("preemption_mode") == "swap" else {}
    llm = LLM(**setting, **options, **swap, kv_cache_memory=pool)
    for order in (range(len(PROMPTS)), reversed(range(len(PROMPTS)))):
        places = list(order)
        outputs = llm.generate([PROMPTS[place] for place in places], [PARAMS[place] for place in places])
        for place, output in zip(places, outputs, strict=True):
            assert_same(output, expected[place])
    if pool < 100 * 16 * SLOT_BYTES:
        assert llm.get_metrics()["num_preemptions_total"] >= 3


def test_resumed_samples_have_the_logprobs_of_whole_ones(
    setting: dict[str, Any], expected: list[RequestOutput]
) -> None:
    llm = LLM(**setting, kv_cache_memory="16MiB", block_size=8)
    for num_steps in (1, 5):
        ids = llm.enqueue(PROMPTS, PARAMS)
        ended = [output for _ in range(num_steps) for output in llm.step()]
        llm.abort(ids)
        parts = ended + llm.wait_for_completion()
        places = [ids.index(part.request_id) for part in parts]
        for place, output in zip(places, llm.resume(parts, [PARAMS[place] for place in places]), strict=True):
            assert_same(output, expected[place])


def test_a_sample_does_not_go_on_with_other_logprobs_than_it_began_with(
    setting: dict[str, Any], expected: list[RequestOutput]
) -> None:
    llm = LLM(**setting, kv_cache_memory="16MiB")
    for params in (
        SamplingParams(max_tokens=20, logprobs=4),
        SamplingParams(max_tokens=20, logprob_token_ids=[1]),
        SamplingParams(max_tokens=20, logprobs=3, logprob_token_ids=[1]),
    ):
        with pytest.raises(ValueError, match="the first 5 tokens, which are there already, come with logprobs=3"):
            llm.fork(expected[0], at=5, n=2, sampling_params=params)
    llm.fork(expected[0], at=5, n=1, sampling_params=SamplingParams(max_tokens=8, logprobs=3))
    (output,) = llm.wait_for_completion()
    logprobs, before = output.outputs[0].logprobs, expected[0].outputs[0].logprobs
    assert logprobs is not None and before is not None and len(logprobs) == len(output.outputs[0].token_ids) > 5
    assert logprobs[:5] == before[:5]
