"""Drawing tokens, one row at a time, in numpy float64 with a plain sort."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


def _masked(row: np.ndarray, arguments: SampleArguments, draw: int) -> np.ndarray:
    """The row [V] with -inf for what is banned or not allowed; the row itself where nothing is masked."""
    masked = row
    if arguments.allowed is not None and (index := int(arguments.allowed[1][draw])) >= 0:
        words = np.ascontiguousarray(arguments.allowed[0][index].cpu().numpy())
        may = np.unpackbits(words.view(np.uint8), count=len(row), bitorder="little").astype(bool)
        masked = np.where(may, row, row.dtype.type(-np.inf))
    if arguments.banned is not None:
        start, ids = arguments.banned
        first, end = int(start[draw]), int(start[draw + 1])
        if end > first:
            masked = masked.copy()
            masked[ids[first:end].cpu().numpy()] = -np.inf
    return masked


@dataclass(slots=True)
class _Drawn:
    """The numbers of one draw, in the order of `SampleResult`."""

    token_id: int = -1
    raw_logprob: float = np.nan
    sampled_logprob: float = np.nan
    kept_mass: float = np.nan
    entropy: float = np.nan
    status: int = STATUS_OK
    num_kept: int = 0


def _draw(logits: np.ndarray, row: np.ndarray, arguments: SampleArguments, draw: int) -> _Drawn:
    """One draw from `row` [V], which the model gave as `logits` [V]."""
    for values in (logits, row):
        if not row_is_valid(values):
            nothing_left = bool((values == -np.inf).all())
            return _Drawn(status=STATUS_NOTHING_LEFT if nothing_left else STATUS_NOT_NUMBERS)
    allowed = _masked(row, arguments, draw)
    if allowed.max() == -np.inf:
        return _Drawn(status=STATUS_NOTHING_LEFT)
    raw = log_softmax_row(logits, 1.0)
    forced = -1 if arguments.forced is None else int(arguments.forced[draw])
    temperature = float(arguments.temperature[draw])
    if temperature == 0.0:
        best = int(allowed.argmax())
        token = best if forced < 0 else forced
        own = log_softmax_row(row, 1.0)
        sampled = 0.0 if token == best else -np.inf
        return _Drawn(token, raw[token], sampled, float(np.exp(own[best])), entropy_row(own), STATUS_OK, 1)
    tempered = log_softmax_row(row, temperature)
    logprobs = log_softmax_row(allowed, temperature)
    probabilities = np.exp(logprobs)
    filters = int(arguments.top_k[draw]), float(arguments.top_p[draw]), float(arguments.min_p[draw])
    ids = np.flatnonzero(allowed > -np.inf)
    whole = allowed is row
    if (0 < filters[0] < len(row)) or filters[1] < 1.0 or filters[2] > 0.0:
        kept = kept_ids(allowed, probabilities, *filters)
        whole, ids = whole and len(kept) == len(row), kept
    if forced < 0:
        key = (int(arguments.seed[draw]), int(arguments.sample_index[draw]), int(arguments.position[draw]))
        u = (noise_array(*key, ids) + 0.5) * 2.0**-32
        token = int(ids[np.argmax(probabilities[ids] / -np.log1p(-u))])
    else:
        token = forced
    best = int(allowed.argmax())
    total = 1.0 if whole else float(probabilities[ids].sum())
    mass = 1.0 if whole else min(1.0, total * float(np.exp(tempered[best] - logprobs[best])))
    sampled = logprobs[token] - np.log(total) if token in ids else -np.inf
    return _Drawn(token, raw[token], sampled, mass, entropy_row(tempered), STATUS_OK, len(ids))


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
        arguments.adjusted is None or -1 <= int(arguments.adjusted[1][draw]) < arguments.adjusted[0].shape[0],
        arguments.allowed is None or -1 <= int(arguments.allowed[1][draw]) < arguments.allowed[0].shape[0],
        arguments.forced is None or -1 <= int(arguments.forced[draw]) < vocab_size,
    )
    if not all(in_range):
        raise draw_error(arguments, draw, in_range.index(False) + 1)


def sample(logits: torch.Tensor, arguments: SampleArguments) -> SampleResult:
    rows, device = logits.detach().cpu().numpy(), logits.device
    draws = arguments.temperature.shape[0]
    for draw in range(draws):
        _check_draw(arguments, draw, *logits.shape)
    indices = range(draws) if arguments.row_index is None else arguments.row_index.tolist()
    adjusted = None if arguments.adjusted is None else arguments.adjusted[0].detach().cpu().numpy()
    adjusted_indices = [-1] * draws if arguments.adjusted is None else arguments.adjusted[1].tolist()
    drawn = [
        _draw(rows[row], rows[row] if adjusted is None or own < 0 else adjusted[own], arguments, draw)
        for draw, (row, own) in enumerate(zip(indices, adjusted_indices, strict=True))
    ]

    def column(values: Iterable[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    return SampleResult(
        token_ids=column((one.token_id for one in drawn), torch.int64),
        raw_logprobs=column((one.raw_logprob for one in drawn), torch.float32),
        sampled_logprobs=column((one.sampled_logprob for one in drawn), torch.float32),
        kept_mass=column((one.kept_mass for one in drawn), torch.float32),
        entropy=column((one.entropy for one in drawn), torch.float32),
        status=column((one.status for one in drawn), torch.uint8),
        num_kept=column((one.num_kept for one in drawn), torch.int32),
    )
