"""Contract 2: the trainer's logprobs, with gradients, equal the sampler's bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import rollout_kernels
from rollout import LLM, SamplingParams
from rollout.worker.batch import ForwardBatch
from tests.support.tiny import make_tiny_llama

CASES = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "untied, odd head_dim": {"tie": False, "head_dim": 20, "dtype": torch.bfloat16},
    "biases": {"bias": True, "tie": False},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_packed_forward_equals_what_was_sampled(case: str, temperature: float, tmp_path: Path) -> None:
    # case TR-06
    llm = LLM(make_tiny_llama(tmp_path, **CASES[case]), kv_cache_memory="16MiB", max_num_batched_tokens=24)
    prompts = [[5 + i] * (3 + 9 * i) for i in range(5)]
    params = SamplingParams(n=4, max_tokens=40, seed=3, temperature=temperature)
    samples = [
        (output.prompt_token_ids, completion)
        for output in llm.generate(prompts, params)
        for completion in output.outputs
    ]
    model = llm.shared_model()
    for parameter in model.parameters():
        parameter.requires_grad_(True)

    sequences = [prompt + completion.token_ids for prompt, completion in samples]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    input_ids = torch.tensor([token_id for sequence in sequences for token_id in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    rows = torch.cat(
        [
            torch.arange(int(start) + len(prompt) - 1, int(start) + len(prompt) + len(completion.token_ids) - 1)
            for start, (prompt, completion) in zip(query_start, samples, strict=False)
        ]
    )
    targets = torch.tensor([token_id for _, completion in samples for token_id in completion.token_ids])

    hidden = model(input_ids, positions, ForwardBatch.packed(query_start))
    logprobs, _ = rollout_kernels.linear_token_logprobs(hidden[rows], model.output_weight, targets, temperature)
    sampled = np.concatenate([completion.sampled_logprobs for _, completion in samples])
    assert logprobs.requires_grad
    assert np.array_equal(logprobs.detach().numpy(), sampled)

    shifted, _ = rollout_kernels.linear_token_logprobs(hidden[rows - 1], model.output_weight, targets, temperature)
    assert np.abs(shifted.detach().numpy() - sampled).max() > 0.1  # off by one is noticed
    wrong, _ = rollout_kernels.linear_token_logprobs(hidden[rows], model.output_weight, targets, temperature * 1.1)
    assert np.abs(wrong.detach().numpy() - sampled).max() > 1e-3  # so is a wrong temperature

    logprobs.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
