"""Contract 1: tokens and logprobs depend on weights, prompt, parameters, seed and sample index, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout import (
    LLM,
    BeamSearchOutput,
    BeamSearchParams,
    CompletionOutput,
    LogitsBatch,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.support.drafters import make_eagle, make_medusa
from tests.support.tiny import make_tiny_llama

SHARED = list(range(40, 75))


def halve_what_is_written(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
    """A logits processor; it looks at one row at a time."""
    for row, output in zip(logits, batch.output_token_ids, strict=True):
        row[output] /= 2
    return logits


PROMPTS = [
    [3],
    SHARED,
    [*SHARED, 9, 8],
    [*SHARED[:20], 7],
    list(range(100, 60, -1)),
    [11, 12] * 9,
    SHARED,
    [5, 4, 3, 2],
    [*SHARED[:18], 7, 7],
    [7, 8, 9],
    [*SHARED[:20], 8],
    [9, 8, 7],
    SHARED[:30],
    [11, 12, *(ord(char) - 28 for char in "<think>")],
]
GRAMMAR = StructuredOutputsParams(json_object=True)
PARAMS = [
    SamplingParams(max_tokens=20, seed=1, ignore_eos=True, n=3),
    SamplingParams(max_tokens=25, seed=2, n=4, temperature=0.7),
    SamplingParams(max_tokens=12, seed=3, top_k=5),
    SamplingParams(max_tokens=30, seed=4, top_p=0.8, min_tokens=4),
    SamplingParams(max_tokens=16, temperature=0),
    SamplingParams(max_tokens=22, seed=5, min_p=0.1, n=2, stop_token_ids=[20, 21, 22, 23]),
    SamplingParams(max_tokens=25, seed=6, ignore_eos=True, stop=["e", "Z", "7q", "x", "("], n=3),
    SamplingParams(max_tokens=40, seed=7, temperature=1.3, n=2, ignore_eos=True),
    SamplingParams(max_tokens=24, seed=8, n=3, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 3.0}),
    SamplingParams(
        max_tokens=20,
        seed=9,
        n=2,
        presence_penalty=0.4,
        allowed_token_ids=range(40, 70),
        top_p=0.95,
        logits_processors=[halve_what_is_written],
        repetition_detection=RepetitionDetectionParams(2, 1, 3),
    ),
    SamplingParams(max_tokens=14, seed=8, n=2, structured_outputs=GRAMMAR, stop_token_ids=[20], logit_bias={97: 4.0}),
    SamplingParams(
        max_tokens=9, seed=9, n=2, structured_outputs=StructuredOutputsParams(regex="[ab]{3,12}"), ignore_eos=True
    ),
    SamplingParams(max_tokens=30, seed=8, n=2, ignore_eos=True, forced_token_ids=[*SHARED[30:], *range(3, 20)]),
    SamplingParams(max_tokens=25, seed=7, n=2, thinking_token_budget=6, bad_words=["a", "e", "Ab"], temperature=0.8),
]
BEAMS = BeamSearchParams(3, 5, ignore_eos=True)
BEAM_PROMPTS = [SHARED, PROMPTS[-1]]
ALWAYS = {"max_batch_for_speculation": 100, "only_if_faster": False}
SPECULATION = [
    {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, **ALWAYS},
    {"method": "suffix", "num_speculative_tokens": 16},
    {"method": "draft_model", "num_speculative_tokens": 3, **ALWAYS},  # which is the model itself
    {"method": "medusa", "num_speculative_tokens": 2, **ALWAYS},  # whose heads say what the model has said before
    {"method": "eagle", "num_speculative_tokens": 3, **ALWAYS},  # a random layer
]
HEADS = ("medusa", "eagle")
ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")


def with_model(speculative: dict[str, object] | None, setting: dict[str, object]) -> dict[str, object] | None:
    """A draft model is the model itself, where there is one; heads lie in its folder."""
    if speculative is None or speculative["method"] not in ("draft_model", *HEADS):
        return speculative
    folder = Path(str(setting["model"]))
    return {
        **speculative,
        "model": str(folder if speculative["method"] == "draft_model" else folder / str(speculative["method"])),
    }


def same(a: CompletionOutput, b: CompletionOutput) -> bool:
    return (
        a.token_ids == b.token_ids
        and a.text == b.text
        and a.finish_reason == b.finish_reason
        and a.stop_reason == b.stop_reason
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)
    )


def same_search(a: BeamSearchOutput, b: BeamSearchOutput) -> bool:
    return all(
        x.output_token_ids == y.output_token_ids
        and x.score == y.score
        and np.array_equal(x.output_logprobs, y.output_logprobs)
        for x, y in zip(a.sequences, b.sequences, strict=True)
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16", "reference", "int8"])
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    dtype = torch.bfloat16 if request.param in ("bfloat16", "int8") else torch.float32
    folder = make_tiny_llama(
        tmp_path_factory.mktemp("model"), head_dim=20, num_kv_heads=2, dtype=dtype, near_uniform=True, tokenizer=True
    )
    make_medusa(folder / "medusa", strength=0.0)
    make_eagle(folder / "eagle")
    kernels = "reference" if request.param == "reference" else "auto"
    int8 = request.param == "int8"  # weights and activations of the matrix products, and the KV cache
    quantised = {"quantization": "int8" if int8 else None, "kv_cache_dtype": "int8" if int8 else "auto"}
    return {"model": folder, "kernels": kernels, **quantised}


@pytest.fixture(scope="module")
def expected(setting: dict[str, object]) -> list[list[CompletionOutput]]:
    """Every prompt alone, in a large pool, without a cache, in one chunk."""
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm = LLM(**setting, kv_cache_memory="16MiB", enable_prefix_caching=False)  # type: ignore[arg-type]
        outputs.append(llm.generate(prompt, params)[0].outputs)
    return outputs


@pytest.fixture(scope="module")
def found(setting: dict[str, object]) -> list[BeamSearchOutput]:
    """Every search alone, likewise."""
    llm = LLM(**setting, kv_cache_memory="16MiB", enable_prefix_caching=False)  # type: ignore[arg-type]
    return [llm.beam_search(prompt, BEAMS)[0] for prompt in BEAM_PROMPTS]


@settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    block_size=st.sampled_from([1, 3, 4, 8, 16, 32]),
    budget=st.integers(1, 80),
    max_num_seqs=st.integers(1, 20),
    spare_tokens=st.integers(0, 200),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    num_threads=st.sampled_from([1, 2]),
    speculative=st.sampled_from([None, *SPECULATION]),
    order=st.permutations(range(len(PROMPTS))),
)
def test_outputs_are_bit_identical_under_every_option(
    setting: dict[str, object],
    expected: list[list[CompletionOutput]],
    found: list[BeamSearchOutput],
    block_size: int,
    budget: int,
    max_num_seqs: int,
    spare_tokens: int,
    prefix_caching: bool,
    preemption_mode: str,
    policy: str,
    num_threads: int,
    speculative: dict[str, object] | None,
    order: list[int],
) -> None:
    # cases SC-01, SE-02, SE-04
    has_features = speculative is not None and speculative["method"] in HEADS
    block_bytes = _slot_bytes(setting, has_features) * (-(-block_size // 16) * 16)
    num_blocks = -(-(75 + spare_tokens) // block_size) + 1
    threads = torch.get_num_threads()
    try:
        llm = LLM(
            **setting,  # type: ignore[arg-type]
            kv_cache_memory=num_blocks * block_bytes,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=prefix_caching,
            preemption_mode=preemption_mode,
            swap_space=num_blocks * block_bytes if preemption_mode == "swap" else 0,
            scheduling_policy=policy,
            num_threads=num_threads,
            speculative_config=with_model(speculative, setting),
        )
        priority = [i % 3 for i in range(len(order))] if policy == "priority" else None
        outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], priority=priority)
        searches = llm.beam_search(BEAM_PROMPTS, BEAMS)
    finally:
        torch.set_num_threads(threads)
    for index, output in zip(order, outputs, strict=True):
        assert all(same(a, b) for a, b in zip(output.outputs, expected[index], strict=True)), PROMPTS[index]
    assert all(map(same_search, searches, found))
    llm.engine.scheduler.check_integrity()
    assert llm.get_metrics()["kv_cache_usage"] == 0


def _slot_bytes(setting: dict[str, object], has_features: bool = False) -> int:
    """Bytes of one token's place in the KV pool, and of its feature beside it."""
    bfloat16 = '"bfloat16"' in (Path(str(setting["model"])) / "config.json").read_text()
    feature = 64 * (2 if bfloat16 else 4) if has_features else 0
    vector = 32 * (2 if bfloat16 else 4)  # padded head_dim
    if setting["kv_cache_dtype"] == "int8":
        vector = 32 + 4  # and a scale
    return 2 * 2 * 2 * vector + feature  # layers, k and v, kv heads


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forced_preemption_changes_nothing(
    setting: dict[str, object],
    expected: list[list[CompletionOutput]],
    preemption_mode: str,
    prefix_caching: bool,
) -> None:
    # case SC-01
    block_bytes = _slot_bytes(setting) * 16
    llm = LLM(
        **setting,  # type: ignore[arg-type]
        kv_cache_memory=22 * block_bytes,
        block_size=4,
        preemption_mode=preemption_mode,
        swap_space=40 * block_bytes if preemption_mode == "swap" else 0,
        enable_prefix_caching=prefix_caching,
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    assert llm.get_metrics()["num_preemptions_total"] >= 3
    for output, wanted in zip(outputs, expected, strict=True):
        assert all(same(a, b) for a, b in zip(output.outputs, wanted, strict=True))


@pytest.mark.parametrize(
    ("method", "preemption_mode"), [("suffix", "recompute"), ("suffix", "swap"), ("draft_model", "recompute")]
)
def test_drafts_that_are_mostly_right_change_nothing(
    setting: dict[str, object], expected: list[list[CompletionOutput]], method: str, preemption_mode: str
) -> None:
    # cases SD-01, SD-02
    block_bytes = _slot_bytes(setting) * 16
    llm = LLM(
        **setting,  # type: ignore[arg-type]
        kv_cache_memory=26 * block_bytes,
        block_size=4,
        preemption_mode=preemption_mode,
        swap_space=40 * block_bytes if preemption_mode == "swap" else 0,
        max_num_batched_tokens=50,
        speculative_config=with_model({"method": method, "num_speculative_tokens": 5, **ALWAYS}, setting),
    )
    counts: list[tuple[float, float]] = []
    for _ in range(2):  # the second time every sample has been seen
        outputs = llm.generate(PROMPTS, PARAMS)
        for output, wanted in zip(outputs, expected, strict=True):
            assert all(same(a, b) for a, b in zip(output.outputs, wanted, strict=True))
        metrics = llm.get_metrics()
        counts.append((metrics["draft_tokens_total"], metrics["accepted_draft_tokens_total"]))
    assert counts[1][1] - counts[0][1] > 100
    assert llm.get_metrics()["num_preemptions_total"] > 0
    llm.engine.scheduler.check_integrity()
    assert llm.get_metrics()["kv_cache_usage"] == 0


def test_greedy_samples_are_the_same_where_drafts_are_verified_by_rejection(setting: dict[str, object]) -> None:
    # case SD-01
    greedy = [replace(params, temperature=0) for params in PARAMS]
    wanted = LLM(**setting, kv_cache_memory="16MiB").generate(PROMPTS, greedy)  # type: ignore[arg-type]
    llm = LLM(
        **setting,  # type: ignore[arg-type]
        kv_cache_memory=26 * _slot_bytes(setting) * 16,
        block_size=4,
        max_num_batched_tokens=50,
        speculative_config={**SPECULATION[0], "verification": "rejection"},
    )
    for mine, other in zip(llm.generate(PROMPTS, greedy), wanted, strict=True):
        assert all(same(a, b) for a, b in zip(mine.outputs, other.outputs, strict=True))
    metrics = llm.get_metrics()
    assert metrics["accepted_draft_tokens_total"] > 50 and metrics["num_preemptions_total"] > 0


def test_an_aborted_sample_resumes_as_if_it_had_never_stopped(
    setting: dict[str, object], expected: list[list[CompletionOutput]]
) -> None:
    llm = LLM(**setting, kv_cache_memory="16MiB", block_size=8)  # type: ignore[arg-type]
    for num_steps in (1, 4, 11):
        ids = llm.enqueue(PROMPTS, PARAMS)
        ended = [output for _ in range(num_steps) for output in llm.step()]
        llm.abort(ids)
        outputs = ended + llm.wait_for_completion()
        assert sorted(output.request_id for output in outputs) == sorted(ids)
        params = [PARAMS[ids.index(output.request_id)] for output in outputs]
        for output in llm.resume(outputs, params):
            for resumed, whole in zip(output.outputs, expected[ids.index(output.request_id)], strict=True):
                assert same(resumed, whole)
