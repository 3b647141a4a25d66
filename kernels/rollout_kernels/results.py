"""What `sample` takes and returns beside plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STATUS_OK = 0
STATUS_NOT_NUMBERS = 1  # NaN or +inf among the logits
STATUS_NOTHING_LEFT = 2  # every logit is -inf, or banned


@dataclass(frozen=True, slots=True)
class SampleArguments:
    """One value for each draw r, on the logits' device, contiguous.

    >>> SampleArguments(temperature=torch.tensor([0.0, 0.7]), top_k=torch.tensor([0, 50], dtype=torch.int32), ...)
    """

    temperature: torch.Tensor  # float32 [R], 0 = greedy
    top_k: torch.Tensor  # int32 [R], 0 or -1 = off
    top_p: torch.Tensor  # float32 [R], above 0, 1 = off
    min_p: torch.Tensor  # float32 [R], 0 = off
    seed: torch.Tensor  # int64 [R], all 64 bits count
    sample_index: torch.Tensor  # int64 [R]
    position: torch.Tensor  # int64 [R], absolute position of the token to be drawn
    row_index: torch.Tensor | None = None  # int64 [R]: draw r uses this row of the logits (None: row r)
    banned: tuple[torch.Tensor, torch.Tensor] | None = None  # int32 [R + 1] offsets into int32 token ids


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One value for each draw. A draw whose status is not 0 has token id -1 and NaN in the float arrays.

    `raw_logprobs` is of the model's own distribution (temperature 1). `sampled_logprobs` is of the distribution that
    the token was drawn from. `kept_mass` is the mass of the tempered distribution that filters and bans left, so that
    the tempered logprob is `sampled_logprobs + log(kept_mass)`; exactly 1 where nothing was cut off. `entropy`, in
    nats, is of the tempered distribution before filters and bans. A greedy draw (temperature 0) has sampled logprob 0,
    the raw probability of the token as kept mass, and the entropy of temperature 1.
    """

    token_ids: torch.Tensor  # int64 [R]
    raw_logprobs: torch.Tensor  # float32 [R]
    sampled_logprobs: torch.Tensor  # float32 [R]
    kept_mass: torch.Tensor  # float32 [R]
    entropy: torch.Tensor  # float32 [R]
    status: torch.Tensor  # uint8 [R]
