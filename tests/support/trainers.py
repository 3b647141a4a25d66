"""Trainers as functions, right and wrong ones, and faults to inject into engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout import LLM, RequestOutput
from rollout.worker.worker import Worker
from tests.support.oracle import reference_logprobs

LogprobFunction = Callable[[list[list[int]]], list[np.ndarray]]


def logprobs_of(model: PreTrainedModel) -> LogprobFunction:
    """One sequence after the other, float64."""

    def score(sequences: list[list[int]]) -> list[np.ndarray]:
        return [_gathered(reference_logprobs(model, sequence)[:-1], sequence[1:]) for sequence in sequences]

    return score


def left_padded(model: PreTrainedModel) -> LogprobFunction:
    """A well-known fault: padded on the left, and no attention mask."""

    @torch.no_grad()
    def score(sequences: list[list[int]]) -> list[np.ndarray]:
        width = max(map(len, sequences))
        ids = torch.tensor([[0] * (width - len(sequence)) + sequence for sequence in sequences])
        rows = torch.log_softmax(model(ids, use_cache=False).logits.double(), dim=-1)
        pairs = zip(rows, sequences, strict=True)
        return [_gathered(row[width - len(sequence) : -1], sequence[1:]) for row, sequence in pairs]

    return score


def _gathered(rows: torch.Tensor, token_ids: Sequence[int]) -> np.ndarray:
    return rows[torch.arange(len(token_ids)), torch.tensor(token_ids)].numpy()


def compared_without_temperature(model: PreTrainedModel, outputs: Sequence[RequestOutput]) -> list[np.ndarray]:
    """The logprobs at temperature 1 of every completion."""
    score = logprobs_of(model)
    return [
        score([output.prompt_token_ids + completion.token_ids])[0][len(output.prompt_token_ids) - 1 :]
        for output in outputs
        for completion in output.outputs
    ]


def overwrite_kv_cache(llm: LLM, seed: int = 0) -> None:
    """Puts other keys and values into every block, cached ones included, behind the engine's back."""
    llm.collective_rpc(_overwrite, args=(seed,))


def _overwrite(worker: Worker, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for cache in worker.runner.kv_caches:
        for tensor in (cache.keys, cache.values):
            tensor.copy_(tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
