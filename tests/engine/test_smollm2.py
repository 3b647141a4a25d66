"""SmolLM2-135M-Instruct, the real model, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import LLM, SamplingParams
from tests.support.oracle import assert_greedy_matches, load_reference, sampled_reference

QUESTIONS = [
    "What is the capital of France?",
    "Add 17 and 25.",
    "Write a haiku about rain.",
    "Translate 'good morning' into Spanish.",
    "List three prime numbers.",
    "Who wrote Hamlet?",
    "Explain photosynthesis in one sentence.",
    "What comes after Tuesday?",
    "Reverse the word 'stone'.",
    "Is the sun a star?",
]
TEXTS = [
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The quick brown fox",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,\n\n",
    "SELECT name FROM users WHERE",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "E = mc",
    "Q: How many legs has a spider?\nA:",
    "  \n\n# Title\n",
]


@pytest.mark.slow
def test_greedy_tokens_in_float32_equal_transformers(smollm2_path: Path) -> None:
    reference = load_reference(smollm2_path)
    llm = LLM(smollm2_path, dtype="float32", kv_cache_memory="512MiB", max_num_batched_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=32)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    outputs += llm.generate(TEXTS, params)
    assert len(outputs) == 20
    for output in outputs:
        completion = output.outputs[0]
        assert completion.token_ids
        assert_greedy_matches(reference, output.prompt_token_ids, completion.token_ids)
        expected = sampled_reference(reference, output.prompt_token_ids, completion.token_ids)
        np.testing.assert_allclose(completion.raw_logprobs, expected, atol=1e-3)
    assert "Paris" in outputs[0].outputs[0].text


@pytest.mark.slow
def test_bfloat16_logprobs_are_closer_to_float64_than_transformers_own(smollm2_path: Path) -> None:
    exact = load_reference(smollm2_path, torch.float64)
    rounded = load_reference(smollm2_path, torch.bfloat16)
    llm = LLM(smollm2_path, kv_cache_memory="256MiB")
    params = SamplingParams(max_tokens=48, seed=5, ignore_eos=True)
    ours, theirs = [], []
    for output in llm.generate(TEXTS[:6], params):
        completion = output.outputs[0]
        expected = sampled_reference(exact, output.prompt_token_ids, completion.token_ids)
        other = sampled_reference(rounded, output.prompt_token_ids, completion.token_ids)
        ours.append(np.abs(completion.raw_logprobs - expected))
        theirs.append(np.abs(other - expected))
    assert np.concatenate(ours).mean() < 0.03
    assert np.concatenate(ours).mean() < np.concatenate(theirs).mean()
