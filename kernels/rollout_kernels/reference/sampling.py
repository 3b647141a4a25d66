"""Drawing tokens, one row at a time, in numpy float64 with a plain sort."""

from __future__ import annotations

import numpy as np
import torch

from rollout_kernels.errors import draw_error
from rollout_kernels.reference.logprobs import entropy_row, log_softmax_row, row_is_valid
from rollout_kernels.reference.noise import noise_array
from rollout_kernels.results import (
    STATUS_NOT_NUMBERS,
    STATUS_NOTHING_LEFT,
    STATUS_OK,
    SampleArguments,
    SampleResult,
)


def kept_ids(logits: np.ndarray, probabilities: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids that the filters keep, ascending. `probabilities` belong to the tempered logits and add up to 1."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")  # logit descending, id ascending
    order = order[logits[order] > -np.inf]
    if 0 < top_k < len(order):
        order = order[logits[order] >= logits[order[top_k - 1]]]
    if top_p < 1.0:
        mass = probabilities[order] / probabilities[order].sum()
        before = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
        order = order[before < top_p]
    if min_p > 0.0:
        order = order[probabilities[order] >= min_p * probabilities[order[0]]]
    return np.sort(order)


def _draw(row: np.ndarray, arguments: SampleArguments, draw: int) -> tuple[int, float, float, float, float, int]:
    """Token id, raw logprob, sampled logprob, kept mass, entropy and status of one draw from a row [V]."""
    nothing = (-1, np.nan, np.nan, np.nan, np.nan)
    if not row_is_valid(row):
        return *nothing, STATUS_NOTHING_LEFT if (row == -np.inf).all() else STATUS_NOT_NUMBERS
    allowed = row
    if arguments.banned is not None:
        start, ids = arguments.banned
        allowed = row.copy()
        allowed[ids[int(start[draw]) : int(start[draw + 1])].cpu().numpy()] = -np.inf
    if allowed.max() == -np.inf:
        return *nothing, STATUS_NOTHING_LEFT
    raw = log_softmax_row(row, 1.0)
    temperature = float(arguments.temperature[draw])
    if temperature == 0.0:
        token = int(allowed.argmax())
        return token, raw[token], 0.0, float(np.exp(raw[token])), entropy_row(raw), STATUS_OK
    tempered = log_softmax_row(row, temperature)
    logprobs = log_softmax_row(allowed, temperature)
    probabilities = np.exp(logprobs)
    filters = int(arguments.top_k[draw]), float(arguments.top_p[draw]), float(arguments.min_p[draw])
    ids = np.arange(len(row))
    if (0 < filters[0] < len(row)) or filters[1] < 1.0 or filters[2] > 0.0:
        ids = kept_ids(allowed, probabilities, *filters)
    key = (int(arguments.seed[draw]), int(arguments.sample_index[draw]), int(arguments.position[draw]))
    u = (noise_array(*key, ids) + 0.5) * 2.0**-32
    token = int(ids[np.argmax(probabilities[ids] / -np.log1p(-u))])
    if len(ids) == len(row) and allowed is row:
        return token, raw[token], tempered[token], 1.0, entropy_row(tempered), STATUS_OK
    kept = probabilities[ids].sum()
    mass = min(1.0, float(kept * np.exp(tempered[token] - logprobs[token])))
    return token, raw[token], logprobs[token] - np.log(kept), mass, entropy_row(tempered), STATUS_OK


def _check_draw(arguments: SampleArguments, draw: int, num_rows: int, vocab_size: int) -> None:
    banned_ok = True
    if arguments.banned is not None:
        start, end = (int(offset) for offset in arguments.banned[0][draw : draw + 2])
        ids = arguments.banned[1][max(start, 0) : end]
        banned_ok = 0 <= start <= end and bool(((ids >= 0) & (ids < vocab_size)).all())
    row = draw if arguments.row_index is None else int(arguments.row_index[draw])
    in_range = (
        0.0 <= float(arguments.temperature[draw]) < np.inf,
        int(arguments.top_k[draw]) >= -1,
        0.0 < float(arguments.top_p[draw]) <= 1.0,
        0.0 <= float(arguments.min_p[draw]) <= 1.0,
        0 <= row < num_rows,
        banned_ok,
    )
    if not all(in_range):
        raise draw_error(arguments, draw, in_range.index(False) + 1)


def sample(logits: torch.Tensor, arguments: SampleArguments) -> SampleResult:
    rows, device = logits.detach().cpu().numpy(), logits.device
    draws = arguments.temperature.shape[0]
    for draw in range(draws):
        _check_draw(arguments, draw, *logits.shape)
    indices = range(draws) if arguments.row_index is None else arguments.row_index.tolist()
    columns = list(zip(*(_draw(rows[row], arguments, draw) for draw, row in enumerate(indices)), strict=True))
    columns = columns or [[] for _ in range(6)]
    dtypes = (torch.int64, torch.float32, torch.float32, torch.float32, torch.float32, torch.uint8)
    token_ids, raw, sampled, mass, entropy, status = (
        torch.tensor(column, dtype=dtype, device=device) for column, dtype in zip(columns, dtypes, strict=True)
    )
    return SampleResult(token_ids, raw, sampled, mass, entropy, status)
