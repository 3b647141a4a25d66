"""Checks of `top_logprobs` by a full sort, shared by the CPU's and the GPU's tests."""

from __future__ import annotations

import numpy as np
import torch

import rollout_kernels as rk


def check_against_sort(
    logits: torch.Tensor,
    result: rk.TopLogprobsResult,
    num_top: int,
    token_ids: torch.Tensor,
    row_index: torch.Tensor | None = None,
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """All rows have a distribution."""
    draws = token_ids.shape[0]
    rows = logits.double().numpy()[np.arange(draws) if row_index is None else row_index.numpy()]
    assert result.top_ids.shape == result.top_logprobs.shape == (draws, num_top)
    assert result.top_ids.dtype == result.ranks.dtype == torch.int32
    for draw, (row, token) in enumerate(zip(rows, token_ids.tolist(), strict=True)):
        logprobs = row - row.max()
        logprobs = logprobs - np.log(np.exp(logprobs).sum())
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:num_top]
        assert result.top_ids[draw].tolist() == order
        np.testing.assert_allclose(result.top_logprobs[draw].numpy(), logprobs[order], rtol=2e-6, atol=2e-6)
        if token < 0:
            assert result.logprobs[draw].isnan()
            assert result.ranks[draw] == 0
        else:
            np.testing.assert_allclose(float(result.logprobs[draw]), logprobs[token], rtol=2e-6, atol=2e-6)
            assert result.ranks[draw] == 1 + (row > row[token]).sum()
        if chosen is not None:
            part = slice(int(chosen[0][draw]), int(chosen[0][draw + 1]))
            expected = logprobs[chosen[1][part].numpy()]
            np.testing.assert_allclose(result.chosen_logprobs[part].numpy(), expected, rtol=2e-6, atol=2e-6)
