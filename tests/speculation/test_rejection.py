"""Verification by rejection: what comes out has the target's distribution, whatever was guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_kernels
from rollout import SamplingParams
from rollout.core.schedule import Draw, ScheduledSequence
from rollout.platform.cpu import ImmediateCopies
from rollout.sampling.adjust import Adjustment
from rollout.sampling.masks import mask_of
from rollout.sampling.sampler import sample_rows
from rollout.speculation.rejection import NoiseNumbers, RejectionSampler, distribution_of, keeps, replacements
from rollout.worker.inputs import DirectInputs, StagedInputs, StepInputs
from tests.support.chi_square import chi_square, three_of_chain
from tests.support.oracle import load_reference
from tests.support.sampling import FILTERS, log_softmax, simple_kept
from tests.support.tiny import make_tiny_llama

VOCAB = 16
TEMPERATURE, TOP_P = 0.7, 0.9
NUM_RUNS = 50_000


def draw(
    logits: torch.Tensor, numbers: NoiseNumbers, temperature: float, top_p: float, forced: torch.Tensor | None = None
):
    """The sampling kernel's draws from the rows, float32 [N, V]."""
    count = len(logits)
    return rollout_kernels.sample(
        logits,
        torch.full((count,), temperature),
        torch.zeros(count, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.zeros(count),
        numbers.seed,
        numbers.sample_index,
        numbers.position,
        forced=forced,
    )


@cache
def table(seed: int) -> torch.Tensor:
    """Logits float32 [V, V, V] of a tiny model after each pair of tokens, as transformers computes them."""
    with TemporaryDirectory() as folder:
        make_tiny_llama(Path(folder), vocab_size=VOCAB, hidden_size=32, num_heads=2, num_kv_heads=1, seed=seed)
        model = load_reference(Path(folder))
        pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
        with torch.no_grad():
            return model(pairs).logits[:, -1].float().reshape(VOCAB, VOCAB, VOCAB)


def exact(logits: np.ndarray, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> np.ndarray:
    """What a row, float32 [V], is drawn from: float64 [V]."""
    kept = simple_kept(logits, temperature, top_p=top_p)
    probabilities = np.where(kept, np.exp(log_softmax(logits.astype(np.float64) / temperature)), 0.0)
    return probabilities / probabilities.sum()


@cache
def distributions() -> np.ndarray:
    """The target's, float64 [V, V, V]."""
    rows = [exact(row) for row in table(0).reshape(-1, VOCAB).numpy()]
    return np.stack(rows).reshape(VOCAB, VOCAB, VOCAB)


@dataclass(frozen=True, slots=True)
class Guess:
    """What stands for the next token of each run, int64 [N], and what it was drawn from, float32 [N, V]; None: nothing,
    it was certain."""

    token_ids: torch.Tensor
    distribution: torch.Tensor | None = None


Propose = Callable[[torch.Tensor, torch.Tensor, NoiseNumbers], Guess]  # of the two tokens before, and the noise


def from_logits(logits: torch.Tensor) -> Propose:
    """Draws guesses from a table of another model, with the same temperature and filter, and the noise of the token
    that it guesses, as draft models do."""

    def propose(before: torch.Tensor, last: torch.Tensor, numbers: NoiseNumbers) -> Guess:
        rows = logits[before, last]
        drawn = draw(rows, numbers, TEMPERATURE, TOP_P)
        return Guess(drawn.token_ids, distribution_of(rows, torch.full((len(rows),), TEMPERATURE), drawn.num_kept))

    return propose


def copying(before: torch.Tensor, last: torch.Tensor, numbers: NoiseNumbers) -> Guess:
    """What stands two places before, as prompt lookup does where a text repeats itself."""
    return Guess(before)


def adversary(before: torch.Tensor, last: torch.Tensor, numbers: NoiseNumbers) -> Guess:
    """The most likely token that the target's filter leaves out."""
    left_out = np.where(distributions() == 0, table(0).numpy(), -np.inf)
    return Guess(torch.from_numpy(left_out.argmax(2))[before, last])


def propose_with(name: str) -> Propose:
    if name == "copying":
        return copying
    if name == "adversary":
        return adversary
    share = {"itself": 0.0, "similar": 0.4, "other": 1.0}[name]
    return from_logits((1 - share) * table(0) + share * table(1))


def run(
    propose: Propose, num_guesses: int, num_tokens: int, keep: Callable[..., torch.Tensor] = keeps
) -> tuple[np.ndarray, float]:
    """`NUM_RUNS` samples side by side, each step with guesses: tokens int64 [N, num_tokens], and the share of the
    guesses that stood where those before did. A sample begins after the tokens (0, 0)."""
    tokens = torch.zeros(NUM_RUNS, 2 + num_tokens + num_guesses + 1, dtype=torch.int64)
    lengths = torch.full((NUM_RUNS,), 2)
    num_kept = num_proposed = 0
    while len(active := (lengths < 2 + num_tokens).nonzero()[:, 0]):
        for place in range(num_guesses + 1):
            # Guesses are drawn before any is verified. Those behind a wrong one are dropped: they need not be there.
            position = lengths[active]
            before, last = tokens[active, position - 2], tokens[active, position - 1]
            numbers = NoiseNumbers(active, torch.zeros_like(active), position)
            rows, stand = table(0)[before, last], torch.ones(0, dtype=torch.bool)
            if place == num_guesses:
                token_ids = draw(rows, numbers, TEMPERATURE, TOP_P).token_ids
            else:
                token_ids, stand = verified(rows, propose(before, last, numbers), numbers, keep)
                num_kept, num_proposed = num_kept + int(stand.sum()), num_proposed + len(stand)
            tokens[active, position] = token_ids
            lengths[active] += 1
            active = active[stand] if place < num_guesses else active
    return tokens[:, 2 : 2 + num_tokens].numpy(), num_kept / num_proposed


def verified(
    rows: torch.Tensor, guess: Guess, numbers: NoiseNumbers, keep: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that come for guesses, int64 [N], and whether they are the guesses."""
    count = len(rows)
    target = draw(rows, numbers, TEMPERATURE, TOP_P, guess.token_ids)
    one_hot = torch.nn.functional.one_hot(guess.token_ids, VOCAB).float()
    drafter = one_hot if guess.distribution is None else guess.distribution
    drawn_with = drafter[torch.arange(count), guess.token_ids]
    stand = keep(target.sampled_logprobs, drawn_with, numbers)
    distribution = distribution_of(rows, torch.full((count,), TEMPERATURE), target.num_kept)
    others = replacements(distribution, drafter, guess.token_ids, numbers)
    return torch.where(stand, guess.token_ids, others), stand


@cache
def joint() -> np.ndarray:
    """Of tokens 1 to 3 behind the first, as the target alone would draw them."""
    return three_of_chain(distributions(), 1)


# case SD-01
@pytest.mark.parametrize("num_guesses", [1, 3, 5])
@pytest.mark.parametrize("name", ["itself", "similar", "other", "copying", "adversary"])
def test_three_tokens_have_the_targets_joint_distribution(name: str, num_guesses: int) -> None:
    tokens, share = run(propose_with(name), num_guesses, 4)
    assert chi_square(tokens[:, 1:], joint()) > 1e-3
    if name == "itself":
        assert share > 0.9999
    elif name == "adversary":
        assert share == 0
    else:
        assert 0.02 < share < 0.9


# case SD-01
def test_the_chi_square_notices_a_chance_that_leaves_out_what_guesses_were_drawn_with() -> None:
    def wrong(logprobs: torch.Tensor, drawn_with: torch.Tensor, numbers: NoiseNumbers) -> torch.Tensor:
        return keeps(logprobs, torch.ones_like(drawn_with), numbers)

    tokens, _ = run(propose_with("similar"), 3, 4, wrong)
    assert chi_square(tokens[:, 1:], joint()) < 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(FILTERS), st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]), st.booleans())
def test_the_distribution_is_the_one_that_the_kernel_draws_from(
    seed: int, filters: dict[str, float], temperature: float, has_ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(40, generator=generator) * 3
    row[torch.randint(40, (7,), generator=generator)] = -torch.inf
    rows = (row.round() if has_ties else row).repeat(40, 1)
    none = torch.zeros(40, dtype=torch.int64)
    sampled = rollout_kernels.sample(
        rows,
        torch.full((40,), temperature),
        torch.full((40,), int(filters.get("top_k", 0)), dtype=torch.int32),
        torch.full((40,), filters.get("top_p", 1.0)),
        torch.full((40,), filters.get("min_p", 0.0)),
        seed=none,
        sample_index=none,
        position=none,
        forced=torch.arange(40),
    )
    distribution = distribution_of(rows, torch.full((40,), temperature), sampled.num_kept)
    wanted = sampled.sampled_logprobs.exp().double()
    torch.testing.assert_close(distribution[0].double(), wanted, rtol=1e-5, atol=1e-30)
    assert torch.equal(distribution, distribution[:1].expand(40, 40))
    assert not distribution[0, sampled.sampled_logprobs == -torch.inf].any()


@dataclass(frozen=True)
class Case:
    """One call of the sampler: sequence i has `guesses[i]` behind a known token, and consecutive rows."""

    logits: torch.Tensor  # float32 [R, V]
    guesses: list[list[int]]
    params: list[SamplingParams]
    banned: tuple[int, ...] = ()

    @property
    def sequences(self) -> list[ScheduledSequence]:
        return [ScheduledSequence(str(i), 9, [0, *some], [0, 1]) for i, some in enumerate(self.guesses)]

    @property
    def draws(self) -> list[Draw]:
        return [
            Draw(str(i), i, self.params[i], i, 0, 10 + row, self.banned, row=row if some else -1)
            for i, some in enumerate(self.guesses)
            for row in range(len(some) + 1)
        ]

    def sample(
        self,
        distributions: dict[str, torch.Tensor] | None = None,
        adjustment: Adjustment | None = None,
        inputs: StepInputs | None = None,
    ) -> rollout_kernels.SampleResult:
        sampler = RejectionSampler(lambda: distributions)
        rows = range(len(self.logits))
        return sampler.sample(self.sequences, self.draws, self.logits, rows, inputs or DirectInputs(), adjustment)

    def starts(self) -> list[int]:
        """The first row of each sequence."""
        return np.cumsum([0, *(len(some) + 1 for some in self.guesses)])[:-1].tolist()

    def outputs(self, sampled: rollout_kernels.SampleResult) -> list[list[int]]:
        """What each sequence gets: its rows' tokens up to the first that is not the guess."""
        outputs: list[list[int]] = []
        for first, some in zip(self.starts(), self.guesses, strict=True):
            tokens = sampled.token_ids[first : first + len(some) + 1].tolist()
            right = [token == guess for token, guess in zip(tokens, some, strict=False)]
            outputs.append(tokens[: (right.index(False) if False in right else len(some)) + 1])
        return outputs


def random_case(params: list[SamplingParams], seed: int = 0, vocab: int = 50, **fields: Any) -> Case:
    """Sequences with 0, 1, 2, ... guesses, of which about half are the most likely token."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(i % 5 + 1 for i in range(len(params))), vocab, generator=generator)
    best, rows = logits.argmax(1).tolist(), iter(range(len(logits)))
    guesses: list[list[int]] = []
    for i in range(len(params)):
        *own, _ = [next(rows) for _ in range(i % 5 + 1)]
        guesses.append([best[row] if torch.rand((), generator=generator) < 0.8 else row % vocab for row in own])
    return Case(logits, guesses, params, **fields)


def test_greedy_tokens_are_the_most_likely_ones_whatever_was_guessed() -> None:
    case = random_case([SamplingParams(temperature=0.0)] * 80)
    certain = case.sample()
    odd = {str(i): torch.full((len(some), 50), 0.02) for i, some in enumerate(case.guesses) if some}
    best = case.logits.argmax(1).tolist()
    for sampled in (certain, case.sample(odd)):
        for first, tokens in zip(case.starts(), case.outputs(sampled), strict=True):
            assert tokens == best[first : first + len(tokens)]
    assert {len(tokens) for tokens in case.outputs(certain)} == {1, 2, 3, 4, 5}


# case SD-03
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 4, "min_p": 0.05}])
def test_all_numbers_are_those_of_a_forced_token(filters: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=temperature, **filters) for temperature in (0.0, 0.4, 1.0, 1.5)] * 10
    case = random_case(params)
    sampled = case.sample()
    forced = [
        msgspec.structs.replace(draw, forced_token_id=token_id)
        for draw, token_id in zip(case.draws, sampled.token_ids.tolist(), strict=True)
    ]
    wanted = sample_rows(case.logits, forced, range(len(case.logits)), DirectInputs())
    assert sum(len(some) for some in case.guesses) < len(case.logits)
    num_replaced = 0
    for first, some, tokens in zip(case.starts(), case.guesses, case.outputs(sampled), strict=True):
        got = slice(first, first + len(tokens))
        num_replaced += len(tokens) <= len(some)
        for name in ("token_ids", "raw_logprobs", "sampled_logprobs", "kept_mass", "entropy", "status", "num_kept"):
            assert torch.equal(getattr(sampled, name)[got], getattr(wanted, name)[got]), name
        assert sampled.sampled_logprobs[got].isfinite().all()
    assert 10 < num_replaced < 35


# case SD-02
def test_masked_banned_and_adjusted_rows_are_what_is_drawn_from() -> None:
    params = [SamplingParams(temperature=1.0)] * 300
    case = random_case(params, banned=(3, 4))
    count = len(case.logits)
    mask = mask_of([1, 3, 4, 5, 8, 9], 50)
    adjusted = torch.zeros(1, 50)
    adjusted[0, 9] = 30.0
    is_adjusted = np.arange(count) % 2
    adjustment = Adjustment(adjusted, is_adjusted - 1, mask[None], np.zeros(count, np.int64))
    outputs = case.outputs(case.sample(adjustment=adjustment))
    tokens = {token for some in outputs for token in some}
    assert tokens == {1, 5, 8, 9}
    for first, some in zip(case.starts(), outputs, strict=True):
        assert all(token == 9 for row, token in enumerate(some, first) if is_adjusted[row] == 1)


def test_a_row_without_numbers_draws_nothing_and_leaves_the_others_alone() -> None:
    case = random_case([SamplingParams(temperature=1.0)] * 20)
    wanted = case.sample()
    row = case.starts()[9] + 1  # behind the first guess of a sequence with four
    broken = Case(case.logits.clone(), case.guesses, case.params)
    broken.logits[row, 7] = torch.nan
    sampled = broken.sample()
    assert sampled.token_ids[row] == -1 and sampled.status[row] == rollout_kernels.STATUS_NOT_NUMBERS
    assert sampled.raw_logprobs[row].isnan()
    for number, (mine, other) in enumerate(zip(broken.outputs(sampled), case.outputs(wanted), strict=True)):
        assert mine == other or (number == 9 and mine == [*other[:1], -1])


@pytest.mark.parametrize("has_weights", [False, True])
def test_inputs_that_are_staged_for_a_device_give_the_same(has_weights: bool) -> None:
    # Their buffers take turns: what was sent is overwritten by the next call but one.
    params = [SamplingParams(temperature=0.5 + i % 3 / 4, top_p=0.9, seed=i) for i in range(60)]
    case = random_case(params, banned=(3,))
    spread = torch.softmax(torch.randn(5, 50, generator=torch.Generator().manual_seed(1)), 1)
    distributions = {str(i): spread for i in range(0, 60, 2)} if has_weights else None
    adjusted = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    alternating = np.arange(len(case.logits)) % 2 - 1
    adjustment = Adjustment(adjusted, alternating, mask_of(range(45), 50)[None], alternating)
    direct = case.sample(distributions, adjustment)
    staged = case.sample(distributions, adjustment, StagedInputs(ImmediateCopies()))
    assert case.outputs(staged) == case.outputs(direct)
    assert torch.equal(staged.sampled_logprobs, direct.sampled_logprobs)


# case SD-01
def test_each_guess_is_measured_by_what_it_was_drawn_from() -> None:
    # Three kinds of sequences in one call: guesses by a drafter with weights, certain ones, and none.
    count = 12_000
    rows, others = table(0)[0, :2], table(1)[0, :2]
    params = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
    numbers = NoiseNumbers(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.full((count,), 10))
    drawn = draw(others[:1].expand(count, -1), numbers, TEMPERATURE, TOP_P)
    q = distribution_of(others[:1], torch.tensor([TEMPERATURE]), drawn.num_kept[:1])
    guesses = [[[guess], [3], []][i % 3] for i, guess in enumerate(drawn.token_ids.tolist())]
    logits = torch.cat([rows[: len(some) + 1] for some in guesses])
    case = Case(logits, guesses, [params] * count)
    outputs = case.outputs(case.sample({str(i): q for i in range(0, count, 3)}))
    first, second = (exact(row) for row in rows.numpy())
    for kind in range(3):
        tokens = np.array([some[0] for some in outputs[kind::3]])
        assert chi_square(tokens[:, None], first) > 1e-3
    following = np.array([some[1] for some in outputs if len(some) == 2])
    assert len(following) > 200 and chi_square(following[:, None], second) > 1e-3
