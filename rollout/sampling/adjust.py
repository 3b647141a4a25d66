"""From draws to what changes their rows of logits and what must not be drawn, for the draws that have such parameters.

logits ─► penalties ─► logit_bias ─► logits_processors ─► (kernel: temperature ─► masks ─► filters ─► draw)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rollout.core.schedule import Draw
from rollout.sampling.bad_words import BadWords, Tail
from rollout.sampling.masks import allows, mask_of
from rollout.sampling.penalties import TokenCounts, penalty_arrays
from rollout.sampling.processors import process
from rollout.sampling.rows import copy_rows
from rollout.sampling.thinking import ReasoningMarks, ThinkingBudget, find_marks
from rollout.sampling.vocabulary import Vocabulary
from rollout.sampling_params import SamplingParams
from rollout.worker.inputs import StepInputs

_MOST_CACHED = 256  # requests whose tables their samples to come will find, and lists of bad words


@dataclass(slots=True)
class Adjustment:
    """What the sampling kernel gets besides the logits. An index of -1: the draw has nothing of the kind."""

    rows: torch.Tensor | None = None  # float32 [A, V], logits after penalties, biases and processors
    row_index: np.ndarray | None = None  # int64 [D], which of them a draw is from
    masks: np.ndarray | None = None  # int32 [M, ceil(V / 32)], tokens that may be drawn
    mask_index: np.ndarray | None = None  # int64 [D]
    failures: dict[int, str] = field(default_factory=dict)  # index of the draw -> why it has no token


@dataclass(frozen=True, slots=True)
class Tables:
    """What a request's parameters say, made once for all its draws."""

    params: SamplingParams  # held, so that no other object gets its address
    has_penalty: bool
    changes_row: bool
    has_mask: bool
    bias: tuple[np.ndarray, np.ndarray] | None  # token ids int64, values float32
    allowed: np.ndarray | None  # mask
    bad_words: BadWords | None


class Adjuster:
    """Makes the adjustments of steps. The tokenizer is asked for when the first parameter is about text."""

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        reasoning_start: str,
        reasoning_end: str,
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._reasoning = (reasoning_start, reasoning_end)
        self._tables: OrderedDict[int, Tables] = OrderedDict()  # by the address of the parameters
        self._bad_words: OrderedDict[tuple[tuple[str, ...], bool], BadWords] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the model's tokens write."""
        return Vocabulary(self._tokenizer(), self._vocab_size)

    @cached_property
    def _marks(self) -> ReasoningMarks:
        return find_marks(self.vocabulary, *self._reasoning)

    def adjust(
        self,
        logits: torch.Tensor,
        draws: Sequence[Draw],
        rows: Sequence[int],
        inputs: StepInputs,
        grammar_masks: Mapping[int, np.ndarray] | None = None,
    ) -> Adjustment | None:
        """The adjustments of draws from rows `rows[i]` of `logits`, float32 [R, V]; None where no draw has any.

        `grammar_masks` has, by index of the draw, what its grammar allows: int32 [ceil(V / 32)].
        """
        places = [place for place, draw in enumerate(draws) if draw.state is not None]
        if not places:
            return None
        adjustment = Adjustment()
        tables = {place: self._tables_of(draws[place]) for place in places}
        changing = [place for place in places if tables[place].changes_row]
        if changing:
            self._adjust_rows(adjustment, logits, draws, rows, changing, tables, inputs)
        masking = {place: table for place, table in tables.items() if table.has_mask}
        if masking:
            self._make_masks(adjustment, draws, masking, grammar_masks or {})
        return adjustment

    def _tables_of(self, draw: Draw) -> Tables:
        state, params = draw.state, draw.params
        assert state is not None
        if state.tables is None:
            if id(params) not in self._tables:  # the first sample of the request
                self._tables[id(params)] = self._make_tables(params)
                if len(self._tables) > _MOST_CACHED:
                    self._tables.popitem(last=False)
            state.tables = self._tables[id(params)]
        return state.tables

    def _make_tables(self, params: SamplingParams) -> Tables:
        bias = None
        if params.logit_bias:
            bias = (
                np.fromiter(params.logit_bias.keys(), np.int64),
                np.fromiter(params.logit_bias.values(), np.float32),
            )
        allowed = None if params.allowed_token_ids is None else mask_of(params.allowed_token_ids, self._vocab_size)
        words = self._find_bad_words(params) if params.bad_words else None
        has_penalty = params.has_penalty
        structured, budget = params.structured_outputs, params.thinking_token_budget
        return Tables(
            params=params,
            has_penalty=has_penalty,
            changes_row=has_penalty or bias is not None or params.logits_processors is not None,
            has_mask=any(part is not None for part in (allowed, words, structured, budget)),
            bias=bias,
            allowed=allowed,
            bad_words=words,
        )

    def _find_bad_words(self, params: SamplingParams) -> BadWords:
        key = (tuple(params.bad_words or ()), params.skip_special_tokens)
        words = self._bad_words.get(key)
        if words is None:
            search = self.vocabulary.search_plain if params.skip_special_tokens else self.vocabulary.search_written
            words = self._bad_words[key] = BadWords(key[0], search)
            if len(self._bad_words) > _MOST_CACHED:
                self._bad_words.popitem(last=False)
        return words

    def _adjust_rows(
        self,
        adjustment: Adjustment,
        logits: torch.Tensor,
        draws: Sequence[Draw],
        rows: Sequence[int],
        changing: Sequence[int],
        tables: Mapping[int, Tables],
        inputs: StepInputs,
    ) -> None:
        """Rows with penalties and biases, then processors.

        Samples of a prompt draw their first token from one row: they share its adjusted copy, except where processors
        may tell them apart.
        """
        index = np.full(len(draws), -1, np.int64)
        numbers: dict[tuple[int, ...], int] = {}
        distinct: list[int] = []  # a draw for each adjusted row
        for place in changing:
            draw = draws[place]
            state = draw.state
            assert state is not None
            is_first = draw.position == state.num_prompt_tokens and draw.params.logits_processors is None
            key = (rows[place], id(draw.params)) if is_first else (place,)
            if key not in numbers:
                numbers[key] = len(distinct)
                distinct.append(place)
            index[place] = numbers[key]
        adjustment.row_index = index
        adjustment.rows = self._penalised(logits, draws, rows, distinct, tables, inputs)
        processed = [place for place in changing if draws[place].params.logits_processors is not None]
        if processed:
            failures = process(
                adjustment.rows, [draws[place] for place in processed], [int(index[place]) for place in processed]
            )
            adjustment.failures = {processed[number]: reason for number, reason in failures.items()}

    def _penalised(
        self,
        logits: torch.Tensor,
        draws: Sequence[Draw],
        rows: Sequence[int],
        distinct: Sequence[int],
        tables: Mapping[int, Tables],
        inputs: StepInputs,
    ) -> torch.Tensor:
        """The rows of the draws `distinct`, float32 [A, V], after penalties and biases."""
        vocab_size = logits.shape[1]
        counted = [
            (row, *_counts(draws[place]), draws[place].params)
            for row, place in enumerate(distinct)
            if tables[place].has_penalty
        ]
        biased = [(row, bias) for row, place in enumerate(distinct) if (bias := tables[place].bias) is not None]
        arrays = [np.array([rows[place] for place in distinct], np.int64)]
        if counted:
            arrays += penalty_arrays(counted, vocab_size)
        if biased:
            arrays.append(np.concatenate([ids + row * vocab_size for row, (ids, _) in biased]))
            arrays.append(np.concatenate([values for _, (_, values) in biased]))
        sources, *sent = inputs.send(arrays)
        adjusted = copy_rows(logits, sources)
        flat = adjusted.view(-1)
        if counted:
            at, factors, less = sent[:3]
            values = flat.gather(0, at)
            flat.scatter_(0, at, torch.where(values > 0, values / factors, values * factors) - less)
        if biased:
            at, more = sent[-2:]
            flat.scatter_(0, at, flat.gather(0, at) + more)
        return adjusted

    def _make_masks(
        self,
        adjustment: Adjustment,
        draws: Sequence[Draw],
        tables: Mapping[int, Tables],
        grammar_masks: Mapping[int, np.ndarray],
    ) -> None:
        """One mask a draw, the tokens that all its contributors allow; draws with equal ones share it."""
        index = np.full(len(draws), -1, np.int64)
        numbers: dict[object, int] = {}
        masks: list[np.ndarray] = []
        for place, table in tables.items():
            draw = draws[place]
            parts: list[np.ndarray] = []
            key: list[tuple[object, ...]] = []  # what the mask is made of, told apart by kind
            if table.allowed is not None:
                parts.append(table.allowed)
                key.append(("allowed", id(table.allowed)))
            if table.bad_words is not None:
                beginnings = table.bad_words.beginnings(_tail(draw, table.bad_words))
                parts.append(table.bad_words.mask(beginnings))
                key.append(("bad words", id(table.bad_words), beginnings))
            if place in grammar_masks:
                parts.append(grammar_masks[place])
                key.append(("grammar", place))
            if draw.params.thinking_token_budget is not None:
                forced = self._token_to_force(draw, parts)
                if forced is not None:
                    parts, key = [mask_of([forced], self._vocab_size)], [("forced", forced)]
            if not parts:
                continue
            name = tuple(key)
            if name not in numbers:
                numbers[name] = len(masks)
                masks.append(parts[0] if len(parts) == 1 else np.bitwise_and.reduce(parts))
            index[place] = numbers[name]
        if masks:
            adjustment.masks, adjustment.mask_index = np.stack(masks), index

    def _token_to_force(self, draw: Draw, masks: Sequence[np.ndarray]) -> int | None:
        """The token that closes the section of reasoning, where the budget is used up and nothing else forbids it."""
        state, budget = draw.state, draw.params.thinking_token_budget
        assert state is not None and budget is not None
        if state.thinking is None:
            state.thinking = ThinkingBudget(self._marks, state.num_prompt_tokens)
        token_id = state.thinking.token_to_force(state.token_ids, draw.num_known_tokens, budget, draw.draft_token_ids)
        if token_id is None or token_id in draw.banned_token_ids:
            return None
        return token_id if all(allows(mask, token_id) for mask in masks) else None


def _counts(draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    state = draw.state
    assert state is not None
    if state.counts is None:
        state.counts = TokenCounts(state.num_prompt_tokens, with_prompt=draw.params.repetition_penalty != 1.0)
    return state.counts.before(state.token_ids, draw.num_known_tokens, draw.draft_token_ids)


def _tail(draw: Draw, words: BadWords) -> bytes:
    state = draw.state
    assert state is not None
    if state.tail is None:
        state.tail = Tail(state.num_prompt_tokens)
    return state.tail.catch_up(state.token_ids, draw.num_known_tokens, words, draw.draft_token_ids)
