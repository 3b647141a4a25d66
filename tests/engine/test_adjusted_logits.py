"""Penalties, biases and masks: what a token is drawn from, against a small sampler over transformers' logits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rollout import LLM, LogitsBatch, SamplingParams
from tests.support.oracle import load_reference, reference_logits
from tests.support.tiny import make_tiny_llama

VOCAB = 131
PROMPT = [7, 7, 9, 40, 7, 55, 9]


def distribution(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """Log-probabilities float64 [V] of the next token, in the documented order."""
    x = logits.astype(np.float64)
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count
        x[token] -= params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    x /= params.temperature or 1.0
    if params.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in params.allowed_token_ids]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    order = sorted(range(len(x)), key=lambda t: -p[t])
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[[t for t, mass in zip(order, before, strict=True) if mass >= params.top_p]] = 0
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum())


ADJUSTED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 1.3},
    "frequency below 0": {"frequency_penalty": -0.4},
    "presence": {"presence_penalty": 1.9},
    "bias": {"logit_bias": {7: 2.5, 60: -3.0, 130: 1.0, 0: 4.0}},
    "allowed": {"allowed_token_ids": [7, 9, 31, 32, 63, 64, 130, 0]},
    "all": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.7,
        "logit_bias": {7: 1.5, 12: 3.0},
        "allowed_token_ids": [*range(0, 131, 2), 7, 9],
        "temperature": 0.8,
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", ADJUSTED)
def test_sampled_logprobs_are_those_of_the_adjusted_distribution(name: str, kernels: str, tmp_path: Path) -> None:
    # case SP-03
    folder = make_tiny_llama(tmp_path, near_uniform=name != "bias")
    reference = load_reference(folder)
    llm = LLM(folder, kv_cache_memory="4MiB", kernels=kernels)
    params = SamplingParams(n=3, max_tokens=12, seed=5, ignore_eos=True, **ADJUSTED[name])
    for completion in llm.generate(PROMPT, params)[0].outputs:
        rows = reference_logits(reference, [*PROMPT, *completion.token_ids]).numpy()[len(PROMPT) - 1 :]
        for place, token_id in enumerate(completion.token_ids):
            expected = distribution(rows[place], PROMPT, completion.token_ids[:place], params)
            assert completion.sampled_logprobs[place] == pytest.approx(expected[token_id], abs=2e-4)
            raw = rows[place] - rows[place].max()
            raw = raw - np.log(np.exp(raw).sum())
            assert completion.raw_logprobs[place] == pytest.approx(raw[token_id], abs=1e-4)


@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty"])
def test_the_first_token_knows_no_penalty_of_the_prompt(field: str, tmp_path: Path) -> None:
    # case SP-03
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    plain = SamplingParams(max_tokens=1, seed=1)
    penalised = replace(plain, **{field: 2.0})  # type: ignore[arg-type]
    first, second = (llm.generate(PROMPT, params)[0].outputs[0] for params in (plain, penalised))
    assert first.sampled_logprobs == second.sampled_logprobs


@pytest.mark.parametrize(
    "adjusted",
    [
        {"frequency_penalty": 1.2, "presence_penalty": 0.5, "repetition_penalty": 1.5},
        {"logit_bias": {3: 2.0, 7: -1.0}, "top_p": 0.85, "frequency_penalty": -0.8},
    ],
    ids=["penalties", "bias and top_p"],
)
def test_frequencies_of_pairs_of_tokens_are_the_adjusted_probabilities(
    adjusted: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_llama(tmp_path, near_uniform=True)
    reference = load_reference(folder)
    llm = LLM(folder, kv_cache_memory="32MiB", max_num_seqs=4000)
    allowed = [3, 7, 9, 40, 130]
    params = SamplingParams(n=4000, max_tokens=2, seed=11, ignore_eos=True, allowed_token_ids=allowed, **adjusted)
    prompt = [7, 40, 8]
    seen = Counter(tuple(completion.token_ids) for completion in llm.generate(prompt, params)[0].outputs)
    first = distribution(reference_logits(reference, prompt).numpy()[-1], prompt, [], params)
    expected = {}
    for a, b in itertools.product(allowed, allowed):
        if first[a] > -np.inf:
            second = distribution(reference_logits(reference, [*prompt, a]).numpy()[-1], prompt, [a], params)
            expected[a, b] = 4000 * np.exp(first[a] + second[b])
    possible = {pair: count for pair, count in expected.items() if count > 0}
    assert seen.keys() <= possible.keys()
    result = chisquare([seen[pair] for pair in possible], list(possible.values()))
    assert result.pvalue > 1e-3


def test_masks_take_mass_away_and_kept_mass_tells_how_much(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    reference = load_reference(folder)
    allowed = [1, 64, 99]
    params = SamplingParams(max_tokens=6, seed=3, temperature=0.7, ignore_eos=True, allowed_token_ids=allowed)
    completion = LLM(folder, kv_cache_memory="4MiB").generate(PROMPT, params)[0].outputs[0]
    rows = reference_logits(reference, [*PROMPT, *completion.token_ids]).double().numpy()[len(PROMPT) - 1 : -1] / 0.7
    p = np.exp(rows - rows.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(completion.kept_mass, p[:, allowed].sum(axis=1), rtol=1e-3)
    chosen = p[np.arange(6), completion.token_ids]
    np.testing.assert_allclose(completion.sampled_logprobs + np.log(completion.kept_mass), np.log(chosen), atol=1e-3)


def test_greedy_is_the_argmax_of_the_adjusted_logits(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, near_uniform=True)
    reference = load_reference(folder)
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, frequency_penalty=1.0, logit_bias={5: 1.0, 6: 1.1}
    )
    output = LLM(folder, kv_cache_memory="4MiB").generate(PROMPT, params)[0].outputs[0].token_ids
    rows = reference_logits(reference, [*PROMPT, *output]).numpy()[len(PROMPT) - 1 : -1]
    assert output == [int(distribution(row, PROMPT, output[:place], params).argmax()) for place, row in enumerate(rows)]
    assert len(set(output)) > 3


def test_min_tokens_and_allowed_ids_hold_together(tmp_path: Path) -> None:
    # case ST-03
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="8MiB")
    params = SamplingParams(n=50, seed=1, min_tokens=4, max_tokens=12, allowed_token_ids=[2, 50, 51])
    for completion in llm.generate(PROMPT, params)[0].outputs:
        assert set(completion.token_ids) <= {2, 50, 51} and 2 not in completion.token_ids[:4]
    nothing = SamplingParams(min_tokens=1, allowed_token_ids=[2])
    completion = llm.generate(PROMPT, nothing)[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == ([], "error")
    assert completion.stop_reason == "no token was left to draw"


def test_ids_outside_the_vocabulary_are_refused_and_a_neighbour_is_untouched(tmp_path: Path) -> None:
    # case ST-05
    llm = LLM(make_tiny_llama(tmp_path), kv_cache_memory="4MiB")
    good = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    expected = llm.generate([5, 6], good)[0].outputs[0]
    llm.enqueue([5, 6], good)
    llm.step()
    for token_id in (-1, VOCAB, VOCAB + 1000, 2**31):
        for field, value in {
            "logit_bias": {token_id: 1.0},
            "allowed_token_ids": [3, token_id],
            "stop_token_ids": [token_id],
        }.items():
            with pytest.raises(ValueError, match=field):
                llm.generate([5], SamplingParams(**{field: value}))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompt_token_ids"):
            llm.generate([5, token_id], good)
    for key in ("abc", "-3", "1.5", None, 1.5, True):
        with pytest.raises(ValueError, match="logit_bias"):
            SamplingParams(logit_bias={key: 1.0})  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1.0}  # type: ignore[dict-item]
    output = llm.wait_for_completion()[0].outputs[0]
    assert output.token_ids == expected.token_ids
    assert np.array_equal(output.sampled_logprobs, expected.sampled_logprobs)


def test_greedy_settings_agree_in_every_batch_shape(tmp_path: Path) -> None:
    # case SE-04
    folder = make_tiny_llama(tmp_path)
    llm = LLM(folder, kv_cache_memory="8MiB")
    generator = np.random.default_rng(3)
    prompts = [generator.integers(3, VOCAB, size).tolist() for size in generator.integers(1, 30, 32)]
    adjusted: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "frequency_penalty": 0.3, "logit_bias": {9: 0.5}}
    settings = [
        SamplingParams(temperature=0, **adjusted),
        SamplingParams(temperature=1, top_k=1, seed=1, **adjusted),
        SamplingParams(temperature=1, top_p=1e-6, seed=2, **adjusted),
    ]
    alone = [llm.generate(prompt, settings[0])[0].outputs[0].token_ids for prompt in prompts]
    for params in settings:
        for size in (2, 7, 32):
            order = generator.permutation(size).tolist()
            outputs = llm.generate([prompts[i] for i in order], params)
            assert [output.outputs[0].token_ids for output in outputs] == [alone[i] for i in order]


def test_neighbours_without_parameters_of_the_kind_are_bit_equal(tmp_path: Path) -> None:
    llm = LLM(make_tiny_llama(tmp_path, tokenizer=True), kv_cache_memory="8MiB")
    plain = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True, temperature=i % 3) for i in range(4)]
    adjusted = [
        SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=1.0, n=2),
        SamplingParams(max_tokens=12, ignore_eos=True, allowed_token_ids=[5]),
        SamplingParams(max_tokens=12, ignore_eos=True, bad_words=["a", "e"]),
        SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={3: 100.0}),
    ]
    alone = [llm.generate([8, 9, i], params)[0].outputs[0] for i, params in enumerate(plain)]
    mixed = [params for pair in zip(plain, adjusted, strict=True) for params in pair]
    together = llm.generate([[8, 9, i // 2] for i in range(8)], mixed)[::2]
    for expected, output in zip(alone, together, strict=True):
        assert output.outputs[0].token_ids == expected.token_ids
        for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
            assert np.array_equal(getattr(output.outputs[0], name), getattr(expected, name))


def sharpen_every_other_token(logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
    return logits * torch.tensor([[1 + len(output) % 2] for output in batch.output_token_ids])


@pytest.mark.parametrize("budget", [3, 64])
def test_tokens_that_are_forced_have_the_arrays_that_they_had_when_they_were_drawn(budget: int, tmp_path: Path) -> None:
    # cases SP-03, SP-04
    folder = make_tiny_llama(tmp_path, tokenizer=True, near_uniform=True)
    llm = LLM(folder, kv_cache_memory="8MiB", max_num_batched_tokens=budget, block_size=4)
    adjusted = SamplingParams(
        seed=6,
        max_tokens=24,
        ignore_eos=True,
        min_tokens=3,
        stop_token_ids=[20],
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        logit_bias={7: 1.0, 31: 2.0},
        allowed_token_ids=range(3, 120),
        bad_words=["a", "he", "e e"],
        thinking_token_budget=4,
        logits_processors=[sharpen_every_other_token],
    )
    prompt = [*llm.get_tokenizer().encode("<think>"), 7, 9, 7]
    drawn = llm.generate(prompt, adjusted)[0].outputs[0]
    for count in (1, 9, len(drawn.token_ids)):
        forced = replace(adjusted, forced_token_ids=drawn.token_ids[:count])
        completion = llm.generate(prompt, forced)[0].outputs[0]
        assert completion.token_ids == drawn.token_ids
        for name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
            assert np.array_equal(getattr(completion, name), getattr(drawn, name)), name
