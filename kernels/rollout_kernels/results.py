"""What `sample` takes and returns beside plain tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STATUS_OK = 0
STATUS_NOT_NUMBERS = 1  # NaN or +inf among the logits, or in the adjusted row
STATUS_NOTHING_LEFT = 2  # every logit is -inf, or masked


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
    # float32 [A, V] rows that draws are made from, and int64 [R]: which of them, -1 = the draw's row of the logits
    adjusted: tuple[torch.Tensor, torch.Tensor] | None = None
    # int32 [M, ceil(V / 32)], bit id % 32 of word id // 32 = may be drawn, and int64 [R]: which row, -1 = all may
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    forced: torch.Tensor | None = None  # int64 [R]: the token to report on in place of a draw, -1 = draw


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One value for each draw. A draw whose status is not 0 has token id -1, NaN in the float arrays, and kept none.

    `raw_logprobs` is of the model's own distribution (temperature 1). `sampled_logprobs` is of the distribution that
    the token was drawn from. `kept_mass` is the mass of the tempered distribution that filters and masks (`banned` and
    `allowed`) left, so that the tempered logprob is `sampled_logprobs + log(kept_mass)`; exactly 1 where nothing was
    cut off. `entropy`, in nats, is of the tempered distribution before filters and masks. Where a draw has an adjusted
    row, all but `raw_logprobs` is of that row. `num_kept` counts the tokens that filters and masks left: the first ones
    in the order (logit of the row drawn from descending, id ascending), masked ones and those of -inf left out.

    A greedy draw (temperature 0) keeps one token: its sampled logprob is 0, the kept mass its probability at
    temperature 1, and so is the entropy's temperature. A forced token has the numbers that it would have if it had been
    drawn, and a sampled logprob of -inf where filters or masks leave it out; what was kept is as in a draw.
    """

    token_ids: torch.Tensor  # int64 [R]
    raw_logprobs: torch.Tensor  # float32 [R]
    sampled_logprobs: torch.Tensor  # float32 [R]
    kept_mass: torch.Tensor  # float32 [R]
    entropy: torch.Tensor  # float32 [R]
    status: torch.Tensor  # uint8 [R]
    num_kept: torch.Tensor  # int32 [R]


@dataclass(frozen=True, slots=True)
class TopLogprobsResult:
    """Of the model's own distribution (temperature 1, nothing filtered): the bits of `SampleResult.raw_logprobs`.

    A row that has no distribution (NaN or +inf among its logits, or only -inf) gives the ids 0, 1, 2, ..., NaN for
    every logprob, and rank 0. A token id of -1 (nothing was drawn) gives the logprob NaN and rank 0.
    """

    top_ids: torch.Tensor  # int32 [D, k], in the order (logit descending, id ascending)
    top_logprobs: torch.Tensor  # float32 [D, k]
    logprobs: torch.Tensor  # float32 [D], of the given token
    ranks: torch.Tensor  # int32 [D], 1 + how many logits are larger than the given token's
    chosen_logprobs: torch.Tensor  # float32 [C], of the chosen ids, in their order
