"""Loss values and gradients, against numbers worked out by hand and against exact expectations."""

from __future__ import annotations

import pytest
import torch

from rollout_trainers import kl_estimate
from rollout_trainers.loss_config import LossSection, RatioLevel
from rollout_trainers.losses import Denominators, clipped_loss, log_ratios, policy_loss, token_weights

ROW_LOSSES = (torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([3.0]))
MODES = {"token_mean": 1.4, "sequence_mean": 2.0, "constant": 0.875}


def aggregate(rows: list[torch.Tensor], denominators: Denominators, mode: str) -> torch.Tensor:
    weights = token_weights(torch.tensor([row.numel() for row in rows]), denominators, mode)  # type: ignore[arg-type]
    return (torch.cat(rows) * weights).sum()


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


# case TR-03
@pytest.mark.parametrize(("mode", "expected"), MODES.items())
def test_aggregation_has_the_same_value_and_gradient_for_any_split_into_micro_batches(mode: str, expected: float):
    denominators = Denominators(num_tokens=5, num_sequences=2, normalizer=4)
    whole = [row.clone().requires_grad_() for row in ROW_LOSSES]
    loss = aggregate(whole, denominators, mode)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-7)

    split = [row.clone().requires_grad_() for row in ROW_LOSSES]
    total = 0.0
    for row in split:  # two micro-batches of one row, or two ranks whose losses are summed
        part = aggregate([row], denominators, mode)
        part.backward()
        total += part.item()
    assert total == pytest.approx(expected, abs=1e-7)
    for one, other in zip(whole, split, strict=True):
        assert torch.equal(gradient_of(one), gradient_of(other))


# case TR-03
def test_averaging_token_means_of_micro_batches_would_give_another_value():
    naive = sum(aggregate([row], Denominators(row.numel(), 1, 4), "token_mean").item() for row in ROW_LOSSES) / len(
        ROW_LOSSES
    )
    assert naive == 2.0 != MODES["token_mean"]


def test_a_sequence_without_tokens_counts_as_zero_in_the_sequence_mean():
    denominators = Denominators(num_tokens=4, num_sequences=2, normalizer=4)
    rows = [ROW_LOSSES[0], torch.zeros(0)]
    assert aggregate(rows, denominators, "sequence_mean").item() == 0.5
    assert aggregate(rows, denominators, "token_mean").item() == 1.0


def test_denominators_must_count_something():
    with pytest.raises(ValueError, match="at least one sequence"):
        Denominators(num_tokens=0, num_sequences=0, normalizer=1)


def test_clipped_loss_at_ratio_one_is_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss, counts = clipped_loss((logprobs - logprobs.detach()).exp(), advantages, 0.2, 0.2)
    assert torch.equal(loss, -advantages)
    loss.sum().backward()
    assert torch.equal(gradient_of(logprobs), -advantages)
    assert (counts.low, counts.high) == (0, 0)


def test_clipping_stops_the_gradient_only_where_leaving_the_range_is_rewarded():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    logprobs = ratios.log().requires_grad_()
    loss, counts = clipped_loss(logprobs.exp(), advantages, 0.2, 0.28)
    loss.sum().backward()
    expected = torch.tensor([-1.28, 1.5, -0.5, 0.8])
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(gradient_of(logprobs), torch.tensor([0.0, 1.5, -0.5, 0.0]))
    assert (counts.low, counts.high) == (1, 1)


def test_the_dual_clip_bounds_what_a_negative_advantage_costs_and_cuts_its_gradient_there():
    ratios = torch.tensor([5.0, 2.5, 5.0, 0.1])
    advantages = torch.tensor([-1.0, -1.0, 1.0, -2.0])
    logprobs = ratios.log().requires_grad_()
    loss, counts = clipped_loss(logprobs.exp(), advantages, 0.2, 0.2, dual_clip=3.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([3.0, 2.5, -1.2, 1.6]))
    torch.testing.assert_close(gradient_of(logprobs), torch.tensor([0.0, 2.5, 0.0, 0.0]))
    assert (counts.low, counts.high, counts.dual) == (1, 1, 1)


LENGTHS = torch.tensor([2, 3, 0, 1])
SHIFTS = torch.tensor([0.1, -0.3, 0.2, 0.4, -0.1, 0.5], dtype=torch.float64)
RATIOS = {
    "token": ([0.1, -0.3, 0.2, 0.4, -0.1, 0.5], [[0], [1], [2], [3], [4], [5]]),
    "sequence": ([-0.2, -0.2, 0.5, 0.5, 0.5, 0.5], [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4], [5]]),
    "geometric_mean": ([-0.1, -0.1, *[0.5 / 3] * 3, 0.5], [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4], [5]]),
    "gspo_token": ([-0.1, -0.1, *[0.5 / 3] * 3, 0.5], [[0], [1], [2], [3], [4], [5]]),
}


@pytest.mark.parametrize("level", RATIOS)
def test_ratio_levels_have_the_values_and_gradients_of_their_definitions(level: RatioLevel):
    logprobs = SHIFTS.clone().requires_grad_()
    values, sources = RATIOS[level]
    result = log_ratios(logprobs, torch.zeros(6, dtype=torch.float64), LENGTHS, level)
    torch.testing.assert_close(result.detach(), torch.tensor(values, dtype=torch.float64))
    for place, tokens in enumerate(sources):  # which tokens' logprobs move the ratio at this place, and how much
        (gradient,) = torch.autograd.grad(result[place], logprobs, retain_graph=True)
        expected = torch.zeros(6, dtype=torch.float64)
        expected[tokens] = 1.0 / (len(tokens) if level == "geometric_mean" else 1)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    "choices", [{}, {"surrogate": "cispo"}, {"surrogate": "log_probability"}, {"ratio": "sequence"}]
)
def test_every_surrogate_begins_with_the_policy_gradient(choices: dict[str, str]):
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    lengths = torch.ones(3, dtype=torch.int64)
    section = LossSection(**choices)  # type: ignore[arg-type]
    loss, counts = policy_loss(logprobs, logprobs.detach(), advantages, lengths, section)
    loss.sum().backward()
    torch.testing.assert_close(gradient_of(logprobs), -advantages)
    assert (counts.low, counts.high, counts.dual) == (0, 0, 0)


def exact_kl_and_gradients() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)

    def slope(function) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(function(logits.log_softmax(0)), logits)
        return gradient

    forward = slope(lambda p: (p.exp() * (p - reference)).sum())
    reverse = slope(lambda p: (reference.exp() * (reference - p)).sum())
    value = (logits.log_softmax(0).exp() * (logits.log_softmax(0) - reference)).sum().detach()
    return logits, reference, value, forward, reverse


# case TR-04
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "ratio_k3"])
def test_kl_estimators_by_enumeration(estimator: str):
    logits, reference, value, forward, reverse = exact_kl_and_gradients()
    policy = logits.log_softmax(0)
    estimates = kl_estimate(policy, reference, estimator)  # type: ignore[arg-type]
    probabilities = policy.exp().detach()  # on-policy: the tokens are drawn, not differentiated
    (gradient,) = torch.autograd.grad((probabilities * estimates).sum(), logits)
    if estimator != "k2":
        torch.testing.assert_close((probabilities * estimates.detach()).sum(), value)
    if estimator in ("k3", "ratio_k3"):
        assert (estimates >= 0).all()
    expected = {"k1": torch.zeros(5, dtype=torch.float64), "k2": forward, "k3": reverse, "ratio_k3": forward}
    torch.testing.assert_close(gradient, expected[estimator], atol=1e-12, rtol=1e-9)


# case TR-04
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "ratio_k3"])
@pytest.mark.parametrize("extreme", [-1e30, 1e30, float("-inf"), float("nan")])
def test_masked_tokens_add_nothing_to_the_kl_whatever_their_logprobs(estimator: str, extreme: float):
    logprobs = torch.tensor([-1.0, 0.0], requires_grad=True)
    reference = torch.tensor([-1.5, extreme])
    mask = torch.tensor([True, False])
    estimates = kl_estimate(logprobs, reference, estimator, mask)  # type: ignore[arg-type]
    estimates.sum().backward()
    assert estimates[1].item() == 0.0
    assert gradient_of(logprobs)[1].item() == 0.0
    alone = torch.tensor([-1.0], requires_grad=True)
    kl_estimate(alone, reference[:1], estimator).sum().backward()  # type: ignore[arg-type]
    assert torch.equal(gradient_of(logprobs)[:1], gradient_of(alone))


# case TR-04
def test_ratio_k3_keeps_its_gradient_when_another_policy_drew_the_tokens():
    logits, reference, value, forward, _ = exact_kl_and_gradients()
    generator = torch.Generator().manual_seed(9)
    old = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    estimates = kl_estimate(logits.log_softmax(0), reference, "ratio_k3", old_logprobs=old)
    (gradient,) = torch.autograd.grad((old.exp() * estimates).sum(), logits)
    torch.testing.assert_close((old.exp() * estimates.detach()).sum(), value)
    torch.testing.assert_close(gradient, forward, atol=1e-12, rtol=1e-9)


# case TR-04
def test_k1_in_the_reward_has_the_gradient_of_the_kl_and_other_estimators_there_have_not():
    logits, reference, _, forward, _ = exact_kl_and_gradients()
    policy = logits.log_softmax(0)
    probabilities = policy.exp().detach()
    for estimator, is_right in (("k1", True), ("k2", False), ("k3", False)):
        cost = kl_estimate(policy.detach(), reference, estimator)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad((probabilities * cost * policy).sum(), logits, retain_graph=True)
        assert torch.allclose(gradient, forward, atol=1e-12) == is_right
        if not is_right:
            with pytest.raises(ValueError, match="'k1' where kl_placement is 'reward'"):
                LossSection(kl_coefficient=0.1, kl_placement="reward", kl_estimator=estimator)  # type: ignore[arg-type]
