"""The largest log-probabilities of rows of logits, ranks and log-probabilities of given tokens: numpy, a plain sort."""

from __future__ import annotations

import numpy as np
import torch

from rollout_kernels import checks
from rollout_kernels.reference.logprobs import log_softmax_row, row_is_valid
from rollout_kernels.results import TopLogprobsResult


def top_logprobs(
    logits: torch.Tensor,
    num_top: int,
    token_ids: torch.Tensor,
    row_index: torch.Tensor | None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None,
) -> TopLogprobsResult:
    checks.top_logprob_values(logits, token_ids, row_index, chosen)
    rows, draws = logits.detach().cpu().numpy(), token_ids.shape[0]
    top_ids = np.tile(np.arange(num_top, dtype=np.int32), (draws, 1))
    top = np.full((draws, num_top), np.nan)
    logprobs, ranks = np.full(draws, np.nan), np.zeros(draws, dtype=np.int32)
    starts, ids = (np.zeros(draws + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)) if chosen is None else (
        part.cpu().numpy() for part in chosen
    )  # fmt: skip
    chosen_logprobs = np.full(len(ids), np.nan)
    indices = range(draws) if row_index is None else row_index.tolist()
    for draw, (index, token) in enumerate(zip(indices, token_ids.tolist(), strict=True)):
        row = rows[index]
        if not row_is_valid(row):
            continue
        own = log_softmax_row(row, 1.0)
        top_ids[draw] = np.argsort(-row.astype(np.float64), kind="stable")[:num_top]  # logit descending, id ascending
        top[draw] = own[top_ids[draw]]
        if token >= 0:
            logprobs[draw], ranks[draw] = own[token], 1 + int((row > row[token]).sum())
        part = slice(int(starts[draw]), int(starts[draw + 1]))
        chosen_logprobs[part] = own[ids[part]]

    def on_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device, dtype)

    return TopLogprobsResult(
        top_ids=on_device(top_ids, torch.int32),
        top_logprobs=on_device(top, torch.float32),
        logprobs=on_device(logprobs, torch.float32),
        ranks=on_device(ranks, torch.int32),
        chosen_logprobs=on_device(chosen_logprobs, torch.float32),
    )
