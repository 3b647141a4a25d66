"""The slow obvious thing: a transformers model over the whole sequence, no cache, in float32 or float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR_TIE = 1e-4  # a first difference between greedy outputs counts only if the two best logits differ by more


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, vocab] in the model's dtype; row i is over the token after token_ids[i]."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def reference_logprobs(model: PreTrainedModel, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """float64 [T, vocab]."""
    return torch.log_softmax(reference_logits(model, token_ids).double() / temperature, dim=-1)


def sampled_reference(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """float64 [len(output)]: log-probability of each output token, given the prompt and the output before it."""
    rows = reference_logprobs(model, [*prompt, *output], temperature)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(output)), torch.tensor(list(output), dtype=torch.int64)].numpy()


def assert_greedy_matches(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token is the reference's argmax for its prefix; only a near tie may differ."""
    rows = reference_logits(model, [*prompt, *output])[len(prompt) - 1 : -1]
    for position, (row, token_id) in enumerate(zip(rows, output, strict=True)):
        best = row.max()
        assert best - row[token_id] < NEAR_TIE, (
            f"token {position} is {token_id}, the reference has {int(row.argmax())} ({best - row[token_id]:.2e} above)"
        )
