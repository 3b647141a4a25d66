"""Every algorithm's loss and gradient against the formulas of its paper, written as loops (`paper_losses`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout_trainers.credit import assign_advantages
from rollout_trainers.loss_config import PRESETS, LossSection
from rollout_trainers.losses import Denominators
from rollout_trainers.objective import micro_batch_loss
from rollout_trainers.packing import completion_mask, pack_micro_batches
from rollout_trainers.types import Sample
from tests.support.paper_losses import (
    COMPLETIONS,
    FORMULAS,
    GROUP_SIZE,
    KL,
    MAX_TOKENS,
    PAD,
    REWARDS,
    WIDTH,
    Formula,
    gspo_token,
    samples,
    total,
)


def new_logprobs(of: Sequence[Sample], drift: float) -> torch.Tensor:
    """Padded float64 [N, WIDTH]: the sampler's logprobs, moved by up to `drift`; what is padding is absurd."""
    generator = np.random.default_rng(7)
    padded = torch.full((len(of), WIDTH), 1e30, dtype=torch.float64)
    for row, sample in zip(padded, of, strict=True):
        moved = sample.sampled_logprobs + drift * generator.uniform(-1, 1, sample.num_tokens)
        row[: sample.num_tokens] = torch.from_numpy(moved)
    return padded.requires_grad_()


def our_loss(
    of: Sequence[Sample], theta: torch.Tensor, section: LossSection, budget: int = 1000, ranks: int = 1
) -> list[torch.Tensor]:
    """The loss of each micro-batch of each rank, which has every `ranks`-th sample."""
    denominators = Denominators(sum(sample.num_tokens for sample in of), len(of), MAX_TOKENS)
    losses = []
    for rank in range(ranks):
        mine = list(range(rank, len(of), ranks))
        for batch in pack_micro_batches([of[index] for index in mine], budget):
            rows = [theta[mine[index], : of[mine[index]].num_tokens] for index in batch.sample_indices]
            logprobs = torch.cat(rows)
            losses.append(micro_batch_loss(logprobs, torch.zeros_like(logprobs), batch, denominators, section).loss)
    return losses


EVERY = sorted(FORMULAS)


def section_of(algorithm: str) -> LossSection:
    return LossSection(algorithm, **FORMULAS[algorithm][1])  # type: ignore[arg-type]


def check(formula: Formula, section: LossSection, drift: float) -> None:
    of = samples()
    assign_advantages(of, GROUP_SIZE, section)
    theta = new_logprobs(of, drift)
    loss = total(our_loss(of, theta, section))
    (gradient,) = torch.autograd.grad(loss, theta)
    rows = [theta[index, : sample.num_tokens] for index, sample in enumerate(of)]
    old = [torch.from_numpy(sample.sampled_logprobs.astype(np.float64)) for sample in of]
    expected = formula(rows, old, np.array(REWARDS))
    (expected_gradient,) = torch.autograd.grad(expected, theta)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 1e-3


def test_every_preset_has_a_formula():
    assert sorted(PRESETS) == EVERY


@pytest.mark.parametrize("drift", [0.0, 0.1, 0.6])  # at the sampler's policy, near it, and far beyond the clip
@pytest.mark.parametrize("algorithm", EVERY)
def test_loss_and_gradient_are_those_of_the_paper(algorithm: str, drift: float):
    if algorithm == "gspo" and drift > 0:  # its clip is narrow: a drift that leaves some sequences inside
        drift *= 1e-2
    check(FORMULAS[algorithm][0], section_of(algorithm), drift)


@pytest.mark.parametrize("drift", [0.0, 1e-3])
def test_gspo_token_is_that_of_the_paper(drift: float):
    check(gspo_token, LossSection("gspo", ratio="gspo_token"), drift)


# case TR-03
@pytest.mark.parametrize("algorithm", EVERY)
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_ranks(algorithm: str):
    of, section = samples(), section_of(algorithm)
    assign_advantages(of, GROUP_SIZE, section)
    drift = 1e-3 if algorithm == "gspo" else 0.5
    values, gradients = [], []
    for budget, ranks in ((1000, 1), (1, 1), (1000, 2), (1, 2)):
        theta = new_logprobs(of, drift)
        losses = our_loss(of, theta, section, budget, ranks)
        assert len(losses) == {(1000, 1): 1, (1, 1): 5, (1000, 2): 2, (1, 2): 5}[budget, ranks]
        values.append(total(losses).item())
        gradients.append(torch.autograd.grad(total(losses), theta)[0])
    assert values == pytest.approx(values[:1] * 4, abs=1e-7)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


# case TR-01
@pytest.mark.parametrize("algorithm", EVERY)
def test_what_has_a_gradient_are_the_engines_tokens_whatever_their_ids(algorithm: str):
    of, section = samples(), section_of(algorithm)
    assign_advantages(of, GROUP_SIZE, section)
    theta = new_logprobs(of, 0.0)
    (gradient,) = torch.autograd.grad(total(our_loss(of, theta, section)), theta)
    mask = completion_mask(of, WIDTH)
    moves = torch.tensor([sample.has_advantage for sample in of])[:, None] & mask
    assert torch.equal(gradient != 0, moves)  # an EOS at the end and one in the middle included, and no padding
    assert mask.sum() == sum(map(len, COMPLETIONS))
    for sample in of:  # the ids themselves play no part
        sample.completion_token_ids = [PAD] * sample.num_tokens
    (again,) = torch.autograd.grad(total(our_loss(of, theta, section)), theta)
    assert torch.equal(again, gradient)


@pytest.mark.parametrize("estimator", ["k2", "k3", "ratio_k3"])
def test_a_kl_in_the_loss_adds_its_estimate_for_each_token(estimator: str):
    of = samples()
    plain, with_kl = LossSection(), LossSection(kl_coefficient=KL, kl_estimator=estimator)  # type: ignore[arg-type]
    assign_advantages(of, GROUP_SIZE, plain)
    theta = new_logprobs(of, 0.3)
    added = total(our_loss(of, theta, with_kl)) - total(our_loss(of, theta, plain))
    terms = []
    for index, sample in enumerate(of):
        for token in range(sample.num_tokens):
            assert sample.reference_logprobs is not None
            d = theta[index, token] - float(sample.reference_logprobs[token])
            ratio = (theta[index, token] - float(sample.sampled_logprobs[token])).exp()
            k3 = (-d).exp() - 1 + d
            terms.append({"k2": d * d / 2, "k3": k3, "ratio_k3": ratio * k3}[estimator])
    expected = KL * total(terms) / len(terms)
    assert added.item() == pytest.approx(expected.item(), rel=1e-4)
    ours, theirs = (torch.autograd.grad(value, theta, retain_graph=True)[0] for value in (added, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)


def test_the_entropy_bonus_is_taken_from_the_loss_with_its_gradient_and_moves_samples_without_advantage():
    of, section = samples(), LossSection("reinforce", entropy_coefficient=0.01)
    assert section.moves_without_advantage
    (batch,) = pack_micro_batches(of, 1000)  # advantages are all zero
    logprobs = batch.sampler_logprobs.double().requires_grad_()
    entropy = torch.linspace(1, 2, logprobs.numel(), dtype=torch.float64).requires_grad_()
    denominators = Denominators(batch.num_completion_tokens, len(of), MAX_TOKENS)
    loss = micro_batch_loss(logprobs, entropy, batch, denominators, section).loss
    loss.backward()
    weight = 0.01 / len(of) / MAX_TOKENS
    assert loss.item() == pytest.approx(-weight * entropy.sum().item())
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.full_like(entropy, -weight), rtol=1e-6, atol=0)


def test_importance_weights_multiply_the_policy_loss_and_not_the_kl():
    of, section = samples(), LossSection(kl_coefficient=KL, kl_estimator="k3")
    assign_advantages(of, GROUP_SIZE, section)
    theta = new_logprobs(of, 0.1)
    plain = total(our_loss(of, theta, section))
    for sample in of:
        sample.importance = np.full(sample.num_tokens, 3.0, np.float32)
    tripled = total(our_loss(of, theta, section))
    for sample in of:
        sample.importance = np.zeros(sample.num_tokens, np.float32)
    kl_alone = total(our_loss(of, theta, section))
    assert (tripled - kl_alone).item() == pytest.approx(3 * (plain - kl_alone).item(), rel=1e-5)
    assert kl_alone.item() > 0
