"""Contract 2: the trainer's logprobs, with gradients, equal the sampler's bit for bit, on every architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout_kernels
from rollout import LLM, CompletionOutput, RequestOutput, SamplingParams
from rollout.layers.attention import Attention
from rollout.models.causal_lm import CausalLM
from rollout.models.llama import LlamaAttention, LlamaConfig, LlamaForCausalLM
from rollout.models.registry import ModelRegistry
from rollout.worker.batch import ForwardBatch
from tests.support.tiny import make_tiny_llama, make_tiny_model

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "untied, odd head_dim": {"tie": False, "head_dim": 20, "dtype": torch.bfloat16},
    "biases": {"bias": True, "tie": False},
}


class Recomputed:
    """Hidden states of sampled sequences, packed, by the trainer's forward pass on the engine's own module."""

    def __init__(self, model: CausalLM, outputs: list[RequestOutput]) -> None:
        samples: list[tuple[list[int], CompletionOutput]] = [
            (output.prompt_token_ids, completion) for output in outputs for completion in output.outputs
        ]
        sequences = [prompt + completion.token_ids for prompt, completion in samples]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        input_ids = torch.tensor([token_id for sequence in sequences for token_id in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        self.rows = torch.cat(
            [
                torch.arange(int(start) + len(prompt) - 1, int(start) + len(prompt) + len(completion.token_ids) - 1)
                for start, (prompt, completion) in zip(query_start, samples, strict=False)
            ]
        )
        self.targets = torch.tensor([token_id for _, completion in samples for token_id in completion.token_ids])
        self.sampled = np.concatenate([completion.sampled_logprobs for _, completion in samples])
        self.model = model.requires_grad_(True)
        self.hidden = model(input_ids, positions, ForwardBatch.packed(query_start))

    def logprobs(self, temperature: float, shift: int = 0) -> torch.Tensor:
        rows = self.hidden[self.rows - shift]
        weight = self.model.output_weight
        return rollout_kernels.linear_token_logprobs(rows, weight, self.targets, temperature)[0]


def check(model: CausalLM, outputs: list[RequestOutput], temperature: float) -> None:
    """Bit for bit; a test that cannot fail would not notice an index that is off by one, or another temperature."""
    again = Recomputed(model, outputs)
    logprobs = again.logprobs(temperature)
    assert logprobs.requires_grad
    assert np.array_equal(logprobs.detach().numpy(), again.sampled)
    assert np.abs(again.logprobs(temperature, shift=1).detach().numpy() - again.sampled).max() > 0.1
    assert np.abs(again.logprobs(temperature * 1.1).detach().numpy() - again.sampled).max() > 1e-3
    logprobs.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_packed_forward_equals_what_was_sampled(case: str, temperature: float, tmp_path: Path) -> None:
    # case TR-06
    llm = LLM(make_tiny_llama(tmp_path, **CASES[case]), kv_cache_memory="16MiB", max_num_batched_tokens=24)
    prompts = [[5 + i] * (3 + 9 * i) for i in range(5)]
    outputs = llm.generate(prompts, SamplingParams(n=4, max_tokens=40, seed=3, temperature=temperature))
    check(llm.shared_model(), outputs, temperature)


class CappedForCausalLM(LlamaForCausalLM):
    """What Gemma 2 does to attention: capped scores of another scale, a window in every other layer."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        for index, layer in enumerate(self.model.layers):
            attention = layer.get_submodule("self_attn")
            assert isinstance(attention, LlamaAttention)
            attention.attention = Attention(index, config.head_dim, 0.4, 11 if index % 2 else None, 3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_capped_scores_and_windows_that_alternate_reproduce_what_they_sampled(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    ModelRegistry.register_model("CappedForCausalLM", CappedForCausalLM)
    folder = make_tiny_llama(tmp_path, dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["CappedForCausalLM"]}))
    llm = LLM(folder, kv_cache_memory="16MiB", max_num_batched_tokens=24)
    outputs = llm.generate([[5 + i] * (3 + 9 * i) for i in range(3)], SamplingParams(n=2, max_tokens=20, seed=3))
    check(llm.shared_model(), outputs, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ModelRegistry.get_supported_archs())
def test_every_architecture_reproduces_what_it_sampled(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With prompts cut into chunks, tokens that came from the prefix cache, and a temperature.

    A new entry of the registry is tested by being there: `make_tiny_model` makes its checkpoint.
    """
    llm = LLM(make_tiny_model(tmp_path, architecture, dtype), kv_cache_memory="16MiB", max_num_batched_tokens=24)
    prefix = [3 + 7 * i % 101 for i in range(53)]
    params = SamplingParams(n=3, max_tokens=24, seed=11, temperature=0.8)
    outputs = llm.generate([[*prefix, 20], [9] * 31], params)
    outputs += llm.generate([prefix + [30 + i] * (1 + 5 * i) for i in range(3)], params)
    assert [output.num_cached_tokens for output in outputs[2:]] == [48] * 3  # three whole blocks of 16
    check(llm.shared_model(), outputs, 0.8)
