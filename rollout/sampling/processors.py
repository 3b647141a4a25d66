"""Custom logits processors: the user's own functions of rows of logits, called once a step for many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.core.schedule import Draw
from rollout.sampling.rows import copy_rows, put_rows

Processor = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class LogitsBatch:
    """What stands before the tokens to be drawn, one entry a row of the logits.

    `prompt_token_ids` and `output_token_ids`: the tokens so far. `sample_indices` and `seeds` say which sample it is.
    With speculation a sample may have several rows, whose outputs go on with guesses.
    """

    prompt_token_ids: list[list[int]]
    output_token_ids: list[list[int]]
    sample_indices: list[int]
    seeds: list[int]


def process(logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> dict[int, str]:
    """Puts the rows of draws through the processors of their requests, each request's in its order.

    `logits` float32 [A, V], changed in place; `draws[i]` has row `rows[i]` to itself. A step has as many rounds as the
    longest list of processors: in each, a processor is called once for all rows that named this same object at this
    place. Where that fails, and some of the rows are behind guesses, which may never come to be, it is called again
    without these. Returns, by index of the draw, why processors failed; those rows then hold NaN.
    """
    failures: dict[int, str] = {}
    for place in range(max(len(draw.params.logits_processors or ()) for draw in draws)):
        for processor, members in _calls(draws, place, failures):
            problem = _call(processor, logits, [draws[index] for index in members], [rows[index] for index in members])
            guessed = [index for index in members if draws[index].draft_token_ids]
            if problem is not None and guessed:
                failures |= dict.fromkeys(guessed, problem)
                members = [index for index in members if index not in failures]
                of_members = [draws[index] for index in members], [rows[index] for index in members]
                problem = _call(processor, logits, *of_members) if members else None
            if problem is not None:
                failures |= dict.fromkeys(members, problem)
    if failures:
        logits[[rows[index] for index in failures]] = torch.nan
    return failures


def _calls(draws: Sequence[Draw], place: int, failures: dict[int, str]) -> Iterator[tuple[Processor, list[int]]]:
    """The processors at one place of the lists, each with the indices of the draws that it is for."""
    calls: dict[int, tuple[Processor, list[int]]] = {}
    for index, draw in enumerate(draws):
        processors = draw.params.logits_processors or ()
        if place < len(processors) and index not in failures:
            processor = processors[place]
            calls.setdefault(id(processor), (processor, []))[1].append(index)
    yield from calls.values()


def _call(processor: Processor, logits: torch.Tensor, draws: Sequence[Draw], rows: list[int]) -> str | None:
    """Puts rows through one processor. Returns what went wrong; the rows are then as they were."""
    places = torch.tensor(rows, device=logits.device)
    given = copy_rows(logits, places)
    wanted = _kind(given)  # before the processor can change it
    try:
        result = _of_transformers(processor, given, draws) if _is_of_transformers(processor) else None
        if result is None:
            result = processor(given, _batch(draws))
    except Exception as error:  # noqa: BLE001 - the user's code: whatever it raises ends the requests that named it
        return f"logits processor {_name(processor)} raised {type(error).__name__}: {error}"
    if not isinstance(result, torch.Tensor):
        return f"logits processor {_name(processor)} returned {type(result).__name__} instead of a tensor"
    if _kind(result) != wanted:
        return f"logits processor {_name(processor)} returned {_kind(result)} instead of {wanted}"
    put_rows(logits, places, result.detach())
    return None


def _batch(draws: Sequence[Draw]) -> LogitsBatch:
    prompts, outputs = [], []
    for draw in draws:
        state = draw.state
        assert state is not None
        prompts.append(state.token_ids[: state.num_prompt_tokens])
        outputs.append([*state.token_ids[state.num_prompt_tokens : draw.num_known_tokens], *draw.draft_token_ids])
    return LogitsBatch(prompts, outputs, [draw.sample_index for draw in draws], [draw.seed for draw in draws])


def _is_of_transformers(processor: Processor) -> bool:
    from transformers import LogitsProcessor  # a second of imports, for requests with processors only

    return isinstance(processor, LogitsProcessor)


def _of_transformers(processor: Processor, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Calls one of transformers' processors row by row: its `input_ids` are a rectangle, samples have any length."""
    scores = []
    for row, draw in zip(logits, draws, strict=True):
        assert draw.state is not None
        known = draw.state.token_ids[: draw.num_known_tokens]
        input_ids = torch.tensor([[*known, *draw.draft_token_ids]], device=logits.device)
        scores.append(processor(input_ids, row[None]))
    return torch.cat(scores)


def _name(processor: Processor) -> str:
    kind = type(processor)
    return processor.__qualname__ if kind.__name__ in ("function", "method", "type") else kind.__qualname__


def _kind(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{layout}"
