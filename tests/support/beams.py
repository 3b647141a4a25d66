"""Beam search the slow way: every sequence is written out, and every token of the vocabulary is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

LogProbs = Callable[[tuple[int, ...]], Sequence[float]]  # of every token of the vocabulary, after these tokens


@dataclass(frozen=True)
class Found:
    """A finished sequence, without the prompt and with its end token."""

    token_ids: tuple[int, ...]
    cum_logprob: float
    score: float


def slow_beam_search(
    logprobs: LogProbs,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    ends: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> list[Found]:
    """What transformers' `generate(num_beams=width)` does, one list at a time."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Found] = []
    for length in range(1, max_tokens + 1):
        grown = [
            ((*output, token_id), total + logprob)
            for output, total in beams
            for token_id, logprob in sorted(enumerate(logprobs((*prompt, *output))), key=lambda item: -item[1])
        ]
        grown.sort(key=lambda item: -item[1])
        for output, total in grown[:width]:
            if output[-1] in ends or length == max_tokens:
                finished.append(Found(output, total, total / length**length_penalty))
        finished = sorted(finished, key=lambda found: -found.score)[:width]
        beams = [item for item in grown if item[0][-1] not in ends][:width]
        if not beams or length == max_tokens:
            break
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        is_hopeless = len(finished) == width and beams[0][1] / reach**length_penalty <= finished[-1].score
        if is_hopeless or (early_stopping is True and len(finished) == width):
            break
    return finished


def brute_force(
    logprobs: LogProbs, prompt: Sequence[int], vocab: int, max_tokens: int, ends: Collection[int], length_penalty: float
) -> list[Found]:
    """All sequences that end by an end token, or have `max_tokens`; best first."""
    found: list[Found] = []
    others = [token_id for token_id in range(vocab) if token_id not in ends]
    for length in range(1, max_tokens + 1):
        last = range(vocab) if length == max_tokens else sorted(ends)
        for output in itertools.product(*[others] * (length - 1), last):
            parts = [logprobs((*prompt, *output[:i]))[output[i]] for i in range(length)]
            total = sum(parts)
            found.append(Found(tuple(output), total, total / length**length_penalty))
    return sorted(found, key=lambda item: -item.score)
