"""Seeds, several samples, and independence from the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rollout import LLM, CompletionOutput, SamplingParams
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.tiny import make_tiny_llama


def same(a: CompletionOutput, b: CompletionOutput) -> bool:
    """Equal tokens, and equal arrays bit for bit."""
    return a.token_ids == b.token_ids and all(
        np.array_equal(getattr(a, field), getattr(b, field))
        for field in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_of_one_seeded_prompt_differ_and_repeat(prefix_caching: bool, tmp_path: Path) -> None:
    # case SE-01
    folder = make_tiny_llama(tmp_path, tie=False, near_uniform=True)
    llm = LLM(folder, kv_cache_memory="8MiB", enable_prefix_caching=prefix_caching)
    params = SamplingParams(n=8, seed=7, max_tokens=16, ignore_eos=True)
    prompt = list(range(3, 40))
    first, second = (llm.generate(prompt, params)[0].outputs for _ in range(2))
    assert len({tuple(c.token_ids) for c in first}) == 8
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    neighbours = [[50 + i] * 5 for i in range(6)]
    crowd = llm.generate([*neighbours, prompt], [SamplingParams(max_tokens=9)] * 6 + [params])[-1].outputs
    assert all(same(a, b) for a, b in zip(first, crowd, strict=True))
    other = LLM(folder, kv_cache_memory="8MiB", enable_prefix_caching=not prefix_caching)
    assert all(same(a, b) for a, b in zip(first, other.generate(prompt, params)[0].outputs, strict=True))
    alone = [
        llm.generate(prompt, SamplingParams(seed=7, first_sample_index=i, max_tokens=16, ignore_eos=True))[0].outputs[0]
        for i in range(8)
    ]
    assert all(same(a, b) for a, b in zip(first, alone, strict=True))


def test_frequencies_over_many_seeds_match_the_reference(tmp_path: Path) -> None:
    # case SE-01
    folder = make_tiny_llama(tmp_path, vocab_size=131, tie=False)
    prompt = [4, 8, 15, 16]
    expected = reference_logprobs(load_reference(folder), prompt)[-1].exp().numpy()
    llm = LLM(folder, kv_cache_memory="16MiB", max_num_seqs=512)
    counts = np.zeros(131)
    for seed in range(20):
        output = llm.generate(prompt, SamplingParams(n=1000, seed=seed, max_tokens=1, ignore_eos=True))[0]
        np.add.at(counts, [c.token_ids[0] for c in output.outputs], 1)
    order = np.argsort(expected)
    common = expected[order] * counts.sum() >= 5
    observed = np.append(counts[order][common], counts[order][~common].sum())
    wanted = np.append(expected[order][common], expected[order][~common].sum()) * counts.sum()
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_a_seeded_request_is_the_same_alone_and_in_any_company(tmp_path: Path) -> None:
    # case SE-02
    folder = make_tiny_llama(tmp_path, tie=False, near_uniform=True)
    seeded = SamplingParams(seed=123, max_tokens=24, ignore_eos=True)
    prompt = list(range(20, 45))
    alone = LLM(folder, kv_cache_memory="8MiB").generate(prompt, seeded)[0].outputs[0]
    neighbour = SamplingParams(max_tokens=30, ignore_eos=True)
    filtered = SamplingParams(max_tokens=30, top_p=0.5, top_k=3, ignore_eos=True)
    seeded_neighbour = SamplingParams(max_tokens=30, seed=9, ignore_eos=True)
    configs: tuple[dict[str, Any], ...] = (
        {},
        {"max_num_batched_tokens": 8},
        {"kv_cache_memory": 120_000, "block_size": 4},
    )
    for config in configs:
        for params in (neighbour, filtered, seeded_neighbour):
            for count in (1, 15):
                options: dict[str, Any] = {"kv_cache_memory": "8MiB"} | config
                llm = LLM(folder, **options)
                others = [[60 + i, 3] for i in range(count)]
                first = llm.generate([prompt, *others], [seeded] + [params] * count)[0].outputs[0]
                last = llm.generate([*others, prompt], [params] * count + [seeded])[-1].outputs[0]
                assert same(alone, first) and same(alone, last)
                if "block_size" in config and count == 15:
                    assert llm.get_metrics()["num_preemptions_total"] > 0


def test_greedy_is_greedy_however_it_is_asked_for_and_whatever_stands_beside_it(tmp_path: Path) -> None:
    # case SE-04
    folder = make_tiny_llama(tmp_path, near_uniform=True)
    llm = LLM(folder, kv_cache_memory="16MiB", max_num_batched_tokens=64)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 131, 3 + i % 20).tolist() for i in range(32)]

    def run(indices: list[int], **params: float | int) -> dict[int, CompletionOutput]:
        asked = SamplingParams(max_tokens=12, ignore_eos=True, **params)  # type: ignore[arg-type]
        outputs = llm.generate([prompts[i] for i in indices], asked)
        return {i: output.outputs[0] for i, output in zip(indices, outputs, strict=True)}

    greedy = run(list(range(32)), temperature=0)
    assert all((c.sampled_logprobs == 0).all() for c in greedy.values())
    for params in ({"temperature": 0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}):
        for indices in ([0], [5, 3], [9, 1, 4, 30, 2, 8, 7], generator.permutation(32).tolist()):
            for index, completion in run(indices, **params).items():
                assert completion.token_ids == greedy[index].token_ids
                assert np.array_equal(completion.raw_logprobs, greedy[index].raw_logprobs)
