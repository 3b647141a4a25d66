"""What transformers and torch alone make of sampled tokens: plain loops over whole logits, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rollout_trainers.types import Sample


def plain_logprobs(
    model: nn.Module, samples: Sequence[Sample], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies [C] of the samples' own tokens, differentiable, without padding and without a cache."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = sample.prompt_token_ids + sample.completion_token_ids
        rows = torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].float() / temperature, dim=-1)
        for place in range(len(sample.prompt_token_ids), len(ids)):
            if sample.loss_mask is None or sample.loss_mask[place - len(sample.prompt_token_ids)]:
                row = rows[place - 1]
                logprobs.append(row[ids[place]])
                entropies.append(torch.distributions.Categorical(logits=row).entropy())
    return torch.stack(logprobs), torch.stack(entropies)
