"""Log-probabilities of given tokens in numpy float64 (one thread, one row at a time), and their gradient."""

from __future__ import annotations

import numpy as np
import torch

from rollout_kernels.errors import logprob_error
from rollout_kernels.reference.reduce import accumulation_dtype


def row_is_valid(row: np.ndarray) -> bool:
    """Whether a row of logits has a distribution: no NaN, no +inf, and not only -inf."""
    return bool((row < np.inf).all() and row.max() > -np.inf)


def log_softmax_row(row: np.ndarray, temperature: float) -> np.ndarray:
    """Log-softmax of row / temperature, float64 [V]. Gaps that overflow count as infinite."""
    wide = row.astype(np.float64)
    tempered = (wide - wide.max()) / max(temperature, 1e-30)
    return tempered - np.log(np.exp(tempered).sum())


def entropy_row(logprobs: np.ndarray) -> float:
    """Entropy in nats of a row of log-probabilities."""
    probabilities = np.exp(logprobs)
    return float(-(probabilities * np.where(probabilities > 0, logprobs, 0.0)).sum())


def _row_temperature(temperature: float | torch.Tensor, row: int) -> float:
    """The temperature of a row, rounded to float32 as `sample` has it."""
    return float(temperature[row]) if isinstance(temperature, torch.Tensor) else float(np.float32(temperature))


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    values, size = logits.detach().cpu().numpy(), logits.shape[1]
    found, entropies = np.full(len(values), np.nan), np.full(len(values), np.nan)
    for row, token_id in enumerate(token_ids.tolist()):
        row_temperature = _row_temperature(temperature, row)
        if not 0.0 < row_temperature < np.inf:
            raise logprob_error(token_ids, temperature, row, 2, size)
        if not 0 <= token_id < size:
            raise logprob_error(token_ids, temperature, row, 1, size)
        if row_is_valid(values[row]):
            logprobs = log_softmax_row(values[row], row_temperature)
            found[row], entropies[row] = logprobs[token_id], entropy_row(logprobs)
    wide = accumulation_dtype(logits.dtype)
    return torch.from_numpy(found).to(logits.device, wide), torch.from_numpy(entropies).to(logits.device, wide)


def token_logprobs_backward(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    grad: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """grad[r] * d logprob[r] / d logits[r], [R, V] in `out_dtype`."""
    values = logits.detach().cpu().numpy()
    out = torch.empty(logits.shape, dtype=out_dtype, device=logits.device)
    for row, token_id in enumerate(token_ids.tolist()):
        row_temperature = _row_temperature(temperature, row)
        if row_is_valid(values[row]):
            slope = -np.exp(log_softmax_row(values[row], row_temperature))
            slope[token_id] += 1.0
            slope *= float(grad[row]) / max(row_temperature, 1e-30)
        else:
            slope = np.full(logits.shape[1], np.nan)
        out[row] = torch.from_numpy(slope).to(out_dtype)
    return out
