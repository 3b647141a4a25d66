"""Grammars while samples grow: which tokens may come next, as bitmasks, and when there is nothing more to come.

A sample's place in its grammar is a function of its output tokens, and catches up with them before a draw, so that
preemption needs nothing and a fork begins anew. Masks are computed beside the forward pass, in a thread of their own;
llguidance needs no interpreter lock for it.

What ends a sample (EOS ids and `stop_token_ids`) is no matter of the grammar: it may come only where the grammar may
end, and everywhere else it has probability zero, whatever the grammar says of it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollout.core.schedule import Draw, StepResult
from rollout.core.stop import NOT_A_TOKEN
from rollout.sampling.state import SampleState
from rollout.sampling.structured import fail, grammar_text, kind_of
from rollout.sampling_options import StructuredOutputsParams
from rollout.sampling_params import SamplingParams

_NUM_KEPT = 256  # compiled grammars
_MOST_BYTES_AHEAD = 128  # of a text that has to come next
_END_OF_GRAMMAR = "<|end of grammar|>"
_LIMITS = LLParserLimits(verbose_errors=False)  # llguidance's own, with reasons of a line in place of its whole state


@dataclass(slots=True, eq=False)
class GrammarPosition:
    """Where one sample stands in its grammar; `SampleState.grammar`."""

    matcher: LLMatcher
    num_consumed: int = 0  # output tokens
    guesses: list[int] = field(default_factory=list)  # consumed behind them

    def move_to(self, state: SampleState, position: int, draft_token_ids: Sequence[int] = ()) -> str | None:
        """Takes the output tokens before `position` and the guesses that follow them, and no others: what it has
        guessed before, and has come so, stays taken. Returns why the grammar refuses one, if it does."""
        num_output = position - state.num_prompt_tokens
        if num_output < self.num_consumed:
            self._go_back(len(self.guesses) + self.num_consumed - num_output)
            self.num_consumed = num_output
        start = state.num_prompt_tokens + self.num_consumed
        tokens = [*state.token_ids[start:position], *draft_token_ids]
        num_right = _num_equal(self.guesses, tokens)
        self._go_back(len(self.guesses) - num_right)
        num_taken = num_right + self.matcher.try_consume_tokens(tokens[num_right:])
        num_known = min(num_taken, position - start)
        self.num_consumed += num_known
        self.guesses = tokens[num_known:num_taken]
        return None if num_taken == len(tokens) else f"the grammar does not allow token {tokens[num_taken]}"

    def _go_back(self, num_tokens: int) -> None:
        if num_tokens:
            self.matcher.rollback(num_tokens)
            del self.guesses[max(len(self.guesses) - num_tokens, 0) :]


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """What draws may draw, by their index in the plan: int32 [ceil(V / 32)], bit `id % 32` of word `id // 32`.

    `failures` says why some have nothing to draw from.
    """

    rows: dict[int, np.ndarray]
    failures: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class PendingMasks:
    """The masks of a step while they are computed, of `draws` (by their index in the plan)."""

    grammars: Grammars
    draws: dict[int, Draw]
    future: Future[GrammarMasks]

    def rows_of(self, draws: Sequence[Draw]) -> dict[int, np.ndarray]:
        """The masks of some of the plan's draws, by their index among these. Waits for them."""
        row_of = {id(self.draws[index]): row for index, row in self.future.result().rows.items()}
        return {place: row_of[id(draw)] for place, draw in enumerate(draws) if id(draw) in row_of}

    def finish(self, result: StepResult) -> None:
        """Says in the plan's result which samples are complete, and why draws had no token."""
        result.completed = self.grammars.completions(self.draws, result.token_ids)
        failures = self.future.result().failures
        result.failures.update((index, why) for index, why in failures.items() if result.token_ids[index] < 0)

    def wait(self) -> None:
        """Until nothing is computed any more, also where that has failed."""
        wait([self.future])


class Grammars:
    """Compiles grammars for one tokenizer, and computes the masks of steps, on `num_threads` threads.

    `vocab_size` is the model's: ids that the tokenizer does not have are never allowed. Raises `ValueError` for a
    tokenizer whose tokens llguidance cannot read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, num_threads: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer, self._end_id = _read_tokenizer(tokenizer, vocab_size)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._executor = LLExecutor(num_threads)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def check(self, params: SamplingParams, eos_token_ids: Set[int], output: Sequence[int] = ()) -> None:
        """Compiles the grammar. Raises `ValueError` where it cannot be used, or does not allow forced tokens, or an
        output that begins with the tokens `output` and goes on."""
        structured = params.structured_outputs
        assert structured is not None
        ends = eos_token_ids | set(params.stop_token_ids or ())
        prototype, kind = self._prototype(structured), f"structured_outputs.{kind_of(structured)}"
        refused = _first_refused(prototype, output, ends)
        if refused is not None:
            raise ValueError(f"output token {refused} is {output[refused]}, which {kind} does not allow there")
        forced = params.forced_token_ids or ()
        refused = _first_refused(prototype, forced, ends, may_end=True)
        if refused is not None:
            raise ValueError(
                f"forced_token_ids[{refused}]={forced[refused]} is not valid: {kind} does not allow it there"
            )

    def begin(self, draws: Sequence[Draw]) -> PendingMasks | None:
        """Starts to compute the masks of the draws that have a grammar; None where no draw has one."""
        structured = {
            index: draw
            for index, draw in enumerate(draws)
            if draw.state is not None and draw.params.structured_outputs is not None
        }
        return PendingMasks(self, structured, self._thread.submit(self.masks, structured)) if structured else None

    def masks(self, draws: Mapping[int, Draw]) -> GrammarMasks:
        """The masks of `draws`, which are by any index. Of one sample's draws the first comes first."""
        masks = GrammarMasks({}, {})
        todo = list(draws.items())
        while todo:
            now: list[tuple[int, Draw]] = []
            later: list[tuple[int, Draw]] = []
            seen: set[int] = set()
            for index, draw in todo:
                (later if id(draw.state) in seen else now).append((index, draw))
                seen.add(id(draw.state))
            self._fill(now, masks)
            todo = later
        return masks

    def completions(self, draws: Mapping[int, Draw], token_ids: np.ndarray) -> dict[int, int | None]:
        """The draws whose sample ends with the token just drawn because of its grammar, with their stop reasons.

        That is where an id that ends was drawn (also one before `min_tokens`, which comes where nothing else can), and
        where the grammar can go no further and the sample has no EOS id that would have to come. `draws` are by their
        index in the plan, as `token_ids` are; those behind a wrong guess complete nothing.
        """
        completed: dict[int, int | None] = {}
        for index, draw in draws.items():
            token_id, state = int(token_ids[index]), _state(draw)
            guesses = list(draw.draft_token_ids)
            if guesses and guesses != token_ids[index - len(guesses) : index].tolist():
                continue
            if token_id in state.eos_token_ids:
                completed[index] = None
            elif token_id in state.stop_token_ids:
                completed[index] = token_id
            elif token_id != NOT_A_TOKEN and not state.eos_token_ids and self._is_complete_after(draw, token_id):
                completed[index] = None
        return completed

    def _prototype(self, structured: StructuredOutputsParams) -> LLMatcher:
        """The compiled grammar, at its beginning. Samples get copies, so that none sees what another has computed."""
        text = grammar_text(structured)
        found = self._compiled.get(text)
        if found is not None:
            self._compiled.move_to_end(text)
            return found
        made = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if made.is_error():
            fail(structured, made.get_error())
        self._compiled[text] = made
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return made

    def next_tokens(self, state: SampleState, params: SamplingParams) -> list[int]:
        """What writes the text that has to come next, as far as there is only one: in the tokens that the tokenizer
        makes of its beginning, whatever follows. Others may spell it too."""
        place = self._position(state, params)
        if place.move_to(state, len(state.token_ids)) is not None:
            return []
        text = place.matcher.compute_ff_bytes()[:_MOST_BYTES_AHEAD]
        return _before_end(self._tokenizer.tokenize_partial(text)[0], state) if text else []

    def num_allowed(self, state: SampleState, params: SamplingParams, draft_token_ids: Sequence[int]) -> int:
        """How many of the first guesses of what follows the sample's tokens go on with its grammar. One that ends the
        sample does not."""
        place = self._position(state, params)
        if place.move_to(state, len(state.token_ids)) is not None:
            return 0
        return place.matcher.validate_tokens(_before_end(draft_token_ids, state))

    def _position(self, state: SampleState, params: SamplingParams) -> GrammarPosition:
        if state.grammar is None:
            assert params.structured_outputs is not None
            state.grammar = GrammarPosition(self._prototype(params.structured_outputs).deep_copy())
        return state.grammar

    def _fill(self, draws: Sequence[tuple[int, Draw]], masks: GrammarMasks) -> None:
        """The masks of draws of different samples."""
        num_words = -(-max(self._vocab_size, self._end_id + 1) // 32)
        words = np.zeros((len(draws), num_words), np.int32)
        able: list[tuple[LLMatcher, int]] = []
        for row, (index, draw) in enumerate(draws):
            place = self._position(_state(draw), draw.params)
            refusal = place.move_to(_state(draw), draw.num_known_tokens, draw.draft_token_ids)
            if refusal is None:
                able.append((place.matcher, row))
            else:
                masks.failures[index] = _reason(draw, refusal)
        if able:
            fill_next_token_bitmask_par(self._executor, able, words)
        rows = self._within_vocabulary(words)
        for (index, draw), row in zip(draws, rows, strict=True):
            masks.rows[index] = row
            if index not in masks.failures:
                self._place_ends(row.view(np.uint32), draw)
                if not row.any():
                    masks.failures[index] = _reason(draw, _why_nothing_comes(_state(draw).grammar.matcher))

    def _within_vocabulary(self, words: np.ndarray) -> np.ndarray:
        """The first words, with no bit set from the model's vocabulary size on, or at the tokenizer's own end."""
        words[:, self._end_id // 32] &= ~np.uint32(1 << self._end_id % 32).view(np.int32)
        num_words, rest = -(-self._vocab_size // 32), self._vocab_size % 32
        words = np.ascontiguousarray(words[:, :num_words])
        if rest:
            words[:, -1] &= np.int32((1 << rest) - 1)
        return words

    def _place_ends(self, row: np.ndarray, draw: Draw) -> None:
        """Allows the ids that end the sample where, and only where, the grammar may end. `row` is uint32 [words]."""
        state = _state(draw)
        ends = state.eos_token_ids | state.stop_token_ids
        for token_id in ends:
            row[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        is_early = draw.position - state.num_prompt_tokens < draw.params.min_tokens
        if state.grammar.matcher.is_accepting() and not (is_early and row.any()):
            for token_id in ends:
                row[token_id // 32] |= np.uint32(1 << token_id % 32)

    def _is_complete_after(self, draw: Draw, token_id: int) -> bool:
        """Whether with this token the grammar ends and can go no further. The sample's place stays where it is."""
        place = self._position(_state(draw), draw.params)
        refusal = place.move_to(_state(draw), draw.num_known_tokens, draw.draft_token_ids)
        if refusal is not None or not place.matcher.try_consume_tokens([token_id]):
            return False
        complete = place.matcher.is_stopped()
        if not complete and place.matcher.is_accepting():
            words = np.frombuffer(place.matcher.compute_bitmask(), np.int32).reshape(1, -1).copy()
            complete = not self._within_vocabulary(words).any()
        place.matcher.rollback(1)
        return complete


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))


def _first_refused(prototype: LLMatcher, token_ids: Sequence[int], ends: Set[int], may_end: bool = False) -> int | None:
    """The first of an output's tokens that a grammar does not allow, by its index. `may_end`: the last one may be an id
    that ends, where the grammar may end."""
    matcher = prototype.deep_copy()
    for index, token_id in enumerate(token_ids):
        if token_id in ends:
            is_allowed = may_end and index == len(token_ids) - 1 and matcher.is_accepting()
        else:
            is_allowed = matcher.consume_token(token_id)
        if not is_allowed:
            return index
    return None


def _state(draw: Draw) -> SampleState:
    assert draw.state is not None, "a sample with a grammar looks at its tokens"
    return draw.state


def _before_end(token_ids: Sequence[int], state: SampleState) -> list[int]:
    """Those before the first id that ends the sample."""
    ends = state.eos_token_ids | state.stop_token_ids
    return list(itertools.takewhile(lambda token_id: token_id not in ends, token_ids))


def _reason(draw: Draw, problem: str) -> str:
    assert draw.params.structured_outputs is not None
    return f"structured_outputs.{kind_of(draw.params.structured_outputs)}: {problem}"


def _why_nothing_comes(matcher: LLMatcher) -> str:
    error = matcher.get_error().partition("\n")[0]
    if not error or error.startswith("NoExtension"):
        return "the vocabulary has no token that could come next"
    return error


def _read_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[LLTokenizer, int]:
    """The tokenizer as llguidance has it, with one more token, which stands for the end of a grammar, and its id.

    llguidance wants an id for that, and the model's EOS ids differ from request to request.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"structured_outputs needs a tokenizer of the library tokenizers, not {type(tokenizer)}")
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    own.add_special_tokens([AddedToken(_END_OF_GRAMMAR, special=True, normalized=False)])
    end_id = own.token_to_id(_END_OF_GRAMMAR)
    assert end_id is not None
    try:
        read = LLTokenizer(own.to_str(), n_vocab=max(end_id + 1, vocab_size), eos_token=end_id)
    except ValueError as error:
        raise ValueError(f"structured_outputs cannot be used with this tokenizer: {error}") from error
    return read, end_id
