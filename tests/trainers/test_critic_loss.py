"""The critic's loss and its gradient, against a loop over padded rows; and what it says about itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout_trainers.critic_metrics import explained_variance
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import Denominators, value_loss
from rollout_trainers.objective import critic_loss
from rollout_trainers.packing import pack_micro_batches
from rollout_trainers.types import Sample
from tests.support.samples import make_sample

EOS = 2
COMPLETIONS = ([5, 6, 7, EOS], [9], [5, EOS, 6], [], [5, 6, 7, 8, 9])  # EOS at the end, in the middle, nowhere
GIVEN = [EOS, 4]
WIDTH, MAX_TOKENS = 7, 8


def samples(of_episodes: bool = False) -> list[Sample]:
    """With `of_episodes` an environment has said something after each sample's first token."""
    generator = np.random.default_rng(1)
    made = [make_sample([1, 3], tokens) for tokens in COMPLETIONS]
    for sample in made:
        if of_episodes and sample.num_tokens > 1:
            first, *rest = sample.completion_token_ids
            sample.completion_token_ids = [first, *GIVEN, *rest]
            sample.loss_mask = np.array([True, *[False] * len(GIVEN), *[True] * len(rest)])
        sample.values = generator.normal(size=sample.num_tokens).astype(np.float32)
        sample.returns = generator.normal(size=sample.num_tokens).astype(np.float32)
    return made


def new_values(of: list[Sample]) -> torch.Tensor:
    """Padded float64 [N, WIDTH]; what is padding is absurd."""
    generator = np.random.default_rng(2)
    padded = torch.full((len(of), WIDTH), 1e30, dtype=torch.float64)
    for row, sample in zip(padded, of, strict=True):
        assert sample.values is not None
        row[: sample.num_tokens] = torch.from_numpy(sample.values + 0.5 * generator.normal(size=sample.num_tokens))
    return padded.requires_grad_()


def ours(of: list[Sample], theta: torch.Tensor, section: LossSection, clip: float | None, budget: int, ranks: int):
    denominators = Denominators(sum(sample.num_tokens for sample in of), len(of), MAX_TOKENS)
    losses, clipped = [], 0
    for rank in range(ranks):
        mine = list(range(rank, len(of), ranks))
        for batch in pack_micro_batches([of[index] for index in mine], budget):
            values = torch.cat([theta[mine[i], : of[mine[i]].num_tokens] for i in batch.sample_indices])
            part = critic_loss(values, batch, denominators, section, clip)
            losses.append(part.loss)
            clipped += part.num_clipped
    return torch.stack(losses).sum(), clipped


def loop(of: list[Sample], theta: torch.Tensor, aggregation: str, clip: float | None) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(map(len, COMPLETIONS))
    for row, sample in zip(theta, of, strict=True):
        for place in range(sample.num_tokens):
            assert sample.values is not None and sample.returns is not None
            old, target = float(sample.values[place]), float(sample.returns[place])
            error = (row[place] - target) ** 2
            if clip is not None:
                held = torch.minimum(torch.maximum(row[place], torch.tensor(old - clip)), torch.tensor(old + clip))
                error = torch.maximum(error, (held - target) ** 2)
            divisor = {
                "token_mean": num_tokens,
                "sequence_mean": len(of) * sample.num_tokens,
                "constant": len(of) * MAX_TOKENS,
            }[aggregation]
            total = total + 0.5 * error / divisor
    return total


# cases TR-01, TR-03
@pytest.mark.parametrize("clip", [None, 0.2, 10.0])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("of_episodes", [False, True])
def test_loss_and_gradient_for_any_split_are_those_of_the_loop_and_padding_has_none(
    of_episodes: bool, aggregation: Any, clip: float | None
):
    of = samples(of_episodes)
    section = LossSection("ppo", aggregation=aggregation)
    theta = new_values(of)
    expected = loop(of, theta, aggregation, clip)
    (gradient,) = torch.autograd.grad(expected, theta)
    for budget, ranks in ((1000, 1), (1, 1), (1000, 2), (1, 2)):
        loss, _ = ours(of, theta, section, clip, budget, ranks)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        (mine,) = torch.autograd.grad(loss, theta)
        torch.testing.assert_close(mine, gradient, rtol=1e-5, atol=1e-8)
    for row, sample in zip(gradient, of, strict=True):
        assert not row[sample.num_tokens :].any()
    for sample in of:  # the ids themselves play no part
        sample.completion_token_ids = [EOS] * len(sample.completion_token_ids)
    assert ours(of, theta, section, clip, 1000, 1)[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_value_that_has_left_its_range_towards_the_return_has_no_gradient_and_is_counted():
    values = torch.tensor([0.5, 0.5, 0.1, -0.5], requires_grad=True)
    losses, clipped = value_loss(values, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 1.0]), 0.2)
    losses.sum().backward()
    torch.testing.assert_close(losses, torch.tensor([0.32, 1.125, 0.405, 1.125]))
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 1.5, -0.9, -1.5]))
    assert clipped == 1


def test_a_value_that_has_stayed_in_its_range_is_not_counted_where_rounding_moves_it():
    old, returns = torch.tensor([-0.10137045]), torch.tensor([3.0])
    values = old + torch.linspace(-0.19, 0.19, 2000)
    assert value_loss(values, old.expand(2000), returns.expand(2000), 0.2)[1] == 0


def test_samples_without_values_or_returns_are_an_error():
    (batch,) = pack_micro_batches([make_sample([1], [3])], 10)
    with pytest.raises(ValueError, match="no values and returns"):
        critic_loss(torch.zeros(1), batch, Denominators(1, 1, 1), LossSection("ppo"), 0.2)


def test_the_explained_variance_is_1_for_a_perfect_critic_0_for_a_constant_one_and_nothing_where_nothing_varies():
    returns = np.array([1.0, 2.0, 4.0], np.float32)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 9.0, np.float32), returns) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-returns, returns) == pytest.approx(1 - 4)
    assert explained_variance(returns, np.ones(3, np.float32)) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None
