"""Loss values and gradients, against numbers worked out by hand and against exact expectations."""

from __future__ import annotations

import pytest
import torch

from rollout_trainers import kl_estimate
from rollout_trainers.losses import Denominators, clipped_policy_loss, token_weights

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
    loss, counts = clipped_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2)
    assert torch.equal(loss, -advantages)
    loss.sum().backward()
    assert torch.equal(gradient_of(logprobs), -advantages)
    assert (counts.low, counts.high) == (0, 0)


def test_clipping_stops_the_gradient_only_where_leaving_the_range_is_rewarded():
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    logprobs = ratios.log().requires_grad_()
    loss, counts = clipped_policy_loss(logprobs, torch.zeros(4), advantages, 0.2, 0.28)
    loss.sum().backward()
    expected = torch.tensor([-1.28, 1.5, -0.5, 0.8])
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(gradient_of(logprobs), torch.tensor([0.0, 1.5, -0.5, 0.0]))
    assert (counts.low, counts.high) == (1, 1)


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
