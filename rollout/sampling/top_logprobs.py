"""The most likely tokens beside the drawn ones, and beside a prompt's tokens: for those who ask, in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

import rollout_kernels
from rollout.config import LogprobsMode
from rollout.core.schedule import Draw, TopLogprobs
from rollout.sampling.adjust import Adjustment
from rollout.sampling_checks import resolve_count
from rollout.worker.inputs import StepInputs, fetch

_MOST_NUMBERS = 1 << 22  # numbers a draw times draws that are computed at once: 16 MiB of float32


def top_logprobs_of_draws(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
    sampled: rollout_kernels.SampleResult,
    token_ids: np.ndarray,
    adjustment: Adjustment | None,
    mode: LogprobsMode,
    inputs: StepInputs,
) -> dict[int, TopLogprobs]:
    """By the draw's index, of the draws that ask and whose token `token_ids[i]` is one (-1 is none).

    Draw i is `sampled[i]`, from row `rows[i]` of `logits` (float32 [R, vocab]) as it was adjusted. A beam's are raw
    whatever the mode.
    """
    found: dict[int, TopLogprobs] = {}
    for num_top, is_raw, part in _alike(draws, token_ids, logits.shape[1], mode):
        chosen = np.array([draws[index].params.logprob_token_ids or () for index in part], np.int32)  # [P, m]
        row_index = np.fromiter((rows[index] for index in part), np.int64, len(part))
        if is_raw:
            positions = _raw(logits, num_top, token_ids[part], row_index, chosen, inputs)
        else:
            x = masked_rows(logits, [draws[index] for index in part], part, row_index, adjustment, inputs)
            positions = _processed(x, num_top, [draws[index] for index in part], part, sampled, chosen, inputs)
        found.update((index, positions[place : place + 1]) for place, index in enumerate(part))
    return found


def top_logprobs_of_targets(
    logits: torch.Tensor, target_ids: torch.Tensor, num_top: int
) -> tuple[TopLogprobs, np.ndarray]:
    """Of each row of `logits` (float32 [R, vocab]) with the token that follows it (int64 [R]); and that token's own
    raw logprob, float32 [R]. `num_top` of -1 is the whole vocabulary."""
    top = rollout_kernels.top_logprobs(logits, resolve_count(num_top, logits.shape[1]), target_ids)
    ids, top_logprobs, ranks, logprobs = fetch([top.top_ids, top.top_logprobs, top.ranks, top.logprobs])
    return TopLogprobs.of(ids, top_logprobs, ranks, np.empty((len(ranks), 0), np.float32)), logprobs


def _alike(
    draws: Sequence[Draw], token_ids: np.ndarray, vocab_size: int, mode: LogprobsMode
) -> Iterator[tuple[int, bool, list[int]]]:
    """The draws that ask, as indices, in parts that ask for the same numbers of most likely and of named tokens, of the
    raw distribution or not."""
    by_kind: dict[tuple[int, int, bool], list[int]] = {}
    for index, draw in enumerate(draws):
        params = draw.params
        if params.logprobs is None and params.logprob_token_ids is None:
            continue
        if token_ids[index] >= 0:
            is_raw = mode == "raw_logprobs" or draw.is_beam
            kind = resolve_count(params.logprobs, vocab_size), len(params.logprob_token_ids or ()), is_raw
            by_kind.setdefault(kind, []).append(index)
    for (num_top, num_chosen, is_raw), indices in by_kind.items():
        numbers = num_top + num_chosen + 1 if is_raw else vocab_size
        count = max(1, _MOST_NUMBERS // numbers)
        for start in range(0, len(indices), count):
            yield num_top, is_raw, indices[start : start + count]


def _raw(
    logits: torch.Tensor,
    num_top: int,
    token_ids: np.ndarray,
    row_index: np.ndarray,
    chosen: np.ndarray,
    inputs: StepInputs,
) -> TopLogprobs:
    starts = np.arange(len(chosen) + 1, dtype=np.int32) * chosen.shape[1]
    drawn, sources, start, ids = inputs.send([token_ids, row_index, starts, chosen.reshape(-1)])
    top = rollout_kernels.top_logprobs(logits, num_top, drawn, sources, (start, ids))
    top_ids, logprobs, ranks, of_chosen = fetch([top.top_ids, top.top_logprobs, top.ranks, top.chosen_logprobs])
    return TopLogprobs.of(top_ids, logprobs, ranks, of_chosen.reshape(chosen.shape))


def masked_rows(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    places: Sequence[int],
    row_index: np.ndarray,
    adjustment: Adjustment | None,
    inputs: StepInputs,
) -> torch.Tensor:
    """What the filters of draws get: float32 [P, vocab], adjusted, -inf where a token may not come.

    `places[i]` is the index of `draws[i]` among those of the adjustment.
    """
    vocab_size = logits.shape[1]
    banned = [place * vocab_size + token_id for place, draw in enumerate(draws) for token_id in draw.banned_token_ids]
    changed = Adjustment() if adjustment is None else adjustment
    adjusted = np.full(len(draws), -1) if changed.row_index is None else changed.row_index[places]
    own = np.nonzero(adjusted >= 0)[0]
    masks = np.full(len(draws), -1) if changed.mask_index is None else changed.mask_index[places]
    masked = np.nonzero(masks >= 0)[0]
    allowed = np.zeros((0, vocab_size), bool)
    if changed.masks is not None and len(masked):
        bits = np.unpackbits(changed.masks[masks[masked]].view(np.uint8), axis=1, bitorder="little")
        allowed = bits[:, :vocab_size].astype(bool)
    sources, own_places, own_rows, masked_places, may, never = inputs.send(
        [row_index, own, adjusted[own], masked, allowed, np.array(banned, np.int64)]
    )
    x = logits.index_select(0, sources)
    if changed.rows is not None and len(own):
        x[own_places] = changed.rows[own_rows]
    if len(masked):
        x[masked_places] = x[masked_places].masked_fill(~may, -torch.inf)
    x.view(-1)[never] = -torch.inf
    return x


def _processed(
    x: torch.Tensor,
    num_top: int,
    draws: Sequence[Draw],
    places: Sequence[int],
    sampled: rollout_kernels.SampleResult,
    chosen: np.ndarray,
    inputs: StepInputs,
) -> TopLogprobs:
    """Of the distribution that each draw was made from: of rows `x`, float32 [P, vocab], as `masked_rows` has them.

    Two tokens that the filters have kept differ in their logprobs by the difference of their logits, divided by the
    temperature; the most likely one, which is always kept, tells the constant.
    """
    temperatures = np.array([draw.params.temperature or 1.0 for draw in draws], np.float32)
    greedy = np.array([draw.params.is_greedy for draw in draws])
    part, temperature, is_greedy, named = inputs.send(
        [np.array(places, np.int64), temperatures, greedy, chosen.astype(np.int64)]
    )
    drawn = sampled.token_ids[part]
    top = rollout_kernels.top_logprobs(x, max(num_top, 1), drawn)
    best = top.top_ids[:, :1].long()
    num_kept = sampled.num_kept[part]
    of_drawn, of_best = x.gather(1, drawn[:, None]), x.gather(1, best)
    known = sampled.sampled_logprobs[part][:, None]
    constant = known + (of_best - of_drawn) / temperature[:, None]
    left_out = torch.isinf(known[:, 0]) & ~is_greedy  # forced tokens that the filters have not kept
    for place in left_out.nonzero()[:, 0].tolist():
        constant[place] = _of_best(x[place].cpu().numpy(), float(temperatures[place]), int(num_kept[place]))
    constant = torch.where(is_greedy[:, None], 0.0, constant)

    def logprobs(token_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        values = constant + (x.gather(1, token_ids) - of_best) / temperature[:, None]
        values = torch.where(token_ids == drawn[:, None], known, values)
        return torch.where(kept, values, -torch.inf)

    order = torch.arange(num_top, device=x.device)
    of_top = logprobs(top.top_ids[:, :num_top].long(), order < num_kept[:, None])
    kept = [_places(x, named[:, column]) < num_kept for column in range(named.shape[1])]
    of_named = logprobs(named, torch.stack(kept, 1)) if kept else known[:, :0]
    ids, values, ranks, of_chosen = fetch([top.top_ids[:, :num_top].contiguous(), of_top, top.ranks, of_named])
    return TopLogprobs.of(ids, values, ranks, of_chosen)


def _of_best(row: np.ndarray, temperature: float, num_kept: int) -> float:
    """The logprob of the most likely one of the tokens that filters have kept of a row, float32 [vocab]."""
    best_first = np.sort(row.astype(np.float64))[::-1][:num_kept]
    return -float(np.log(np.exp((best_first - best_first[0]) / temperature).sum()))


def _places(x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """How many tokens stand before these (int64 [P]) in the order (logit descending, id ascending), int64 [P]."""
    logit = x.gather(1, token_ids[:, None])
    ids = torch.arange(x.shape[1], device=x.device)
    before = (x > logit) | ((x == logit) & (ids < token_ids[:, None]))
    return before.sum(1)
