"""Every algorithm's loss and gradient against the formulas of its paper, written here as loops over padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollout_trainers.advantages import EPSILON
from rollout_trainers.credit import assign_advantages
from rollout_trainers.loss_config import PRESETS, LossSection
from rollout_trainers.losses import Denominators
from rollout_trainers.objective import micro_batch_loss
from rollout_trainers.packing import completion_mask, pack_micro_batches
from rollout_trainers.types import Sample
from tests.support.samples import make_sample

EOS = PAD = 2
GROUP_SIZE, MAX_TOKENS, WIDTH = 3, 8, 7
# Ends with EOS; one token; EOS in the middle; nothing; hits the limit; ends with EOS.
COMPLETIONS = ([5, 6, 7, EOS], [9], [5, EOS, 6], [], [5, 6, 7, 8, 9], [4, EOS])
REWARDS = (1.0, 0.0, 0.25, 0.0, 1.0, 0.5)
KL, REFERENCE_SHIFT = 0.05, 0.3

Rows = Sequence[torch.Tensor]  # one float64 tensor of logprobs a sequence, without padding


def samples() -> list[Sample]:
    generator = np.random.default_rng(4)
    made = []
    for index, (tokens, reward) in enumerate(zip(COMPLETIONS, REWARDS, strict=True)):
        sample = make_sample([1, 3 + index // GROUP_SIZE], tokens, reward=reward, group=index // GROUP_SIZE)
        sample.sampled_logprobs = generator.uniform(-3, -0.5, len(tokens)).astype(np.float32)
        sample.reference_logprobs = sample.sampled_logprobs - np.float32(REFERENCE_SHIFT) * (1 + np.arange(len(tokens)))
        sample.reference_logprobs = sample.reference_logprobs.astype(np.float32)
        sample.values = generator.uniform(-0.5, 1, len(tokens)).astype(np.float32)
        made.append(sample)
    return made


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


def group_baseline(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.reshape(-1, GROUP_SIZE).mean(1).repeat(GROUP_SIZE)


def group_normalised(rewards: np.ndarray) -> np.ndarray:
    return group_baseline(rewards) / (rewards.reshape(-1, GROUP_SIZE).std(1, ddof=1) + EPSILON).repeat(GROUP_SIZE)


def ppo_token(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def ppo_rows(new: Rows, old: Rows, advantages: np.ndarray, low: float, high: float) -> list[list[torch.Tensor]]:
    return [
        [ppo_token((p - q).exp(), float(a), low, high) for p, q in zip(ours, theirs, strict=True)]
        for ours, theirs, a in zip(new, old, advantages, strict=True)
    ]


def total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def grpo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """DeepSeekMath, equation 3, with beta = 0: the mean over samples of the mean over tokens."""
    rows = ppo_rows(new, old, group_normalised(rewards), 0.2, 0.2)
    return -total([total(row) / len(row) for row in rows if row]) / len(rows)


def grpo_token(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    rows = ppo_rows(new, old, group_normalised(rewards), 0.2, 0.2)
    return -total([total(row) for row in rows]) / sum(map(len, rows))


def dr_grpo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Understanding R1-Zero-like training: no std, no length; a constant instead."""
    rows = ppo_rows(new, old, group_baseline(rewards), 0.2, 0.2)
    return -total([total(row) / MAX_TOKENS for row in rows]) / len(rows)


def dapo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Equation 8, over all tokens of the step: clip-higher and a mean over tokens."""
    rows = ppo_rows(new, old, group_normalised(rewards), 0.2, 0.28)
    return -total([total(row) for row in rows]) / sum(map(len, rows))


def gspo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Equations 5 and 7: the ratio of sequence likelihoods to the power of 1 / length."""
    terms = []
    for ours, theirs, advantage in zip(new, old, group_normalised(rewards), strict=True):
        if len(ours):
            likelihoods = ours.exp().prod() / theirs.exp().prod()
            terms.append(ppo_token(likelihoods ** (1 / len(ours)), float(advantage), 3e-4, 4e-4))
    return -total(terms) / len(new)


def gspo_token(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Equations 13 and 14: the sequence's ratio, detached, times each token's probability over its own detached one."""
    terms = []
    for ours, theirs, advantage in zip(new, old, group_normalised(rewards), strict=True):
        for token in range(len(ours)):
            sequence = (ours.exp().prod() / theirs.exp().prod()) ** (1 / len(ours))
            ratio = sequence.detach() * ours[token].exp() / ours[token].exp().detach()
            terms.append(ppo_token(ratio, float(advantage), 3e-4, 4e-4) / len(ours))
    return -total(terms) / len(new)


def cispo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """MiniMax-M1, equations 4 and 5, without a lower bound."""
    terms = []
    for ours, theirs, advantage in zip(new, old, group_normalised(rewards), strict=True):
        for p, q in zip(ours, theirs, strict=True):
            weight = min(float((p - q).detach().exp()), 5.0)
            terms.append(weight * float(advantage) * p)
    return -total(terms) / len(terms)


def rloo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Back to basics, on whole sequences: k1 in the reward, the mean of the others as the baseline; PPO's clip."""
    scored = rewards - np.array([KL * REFERENCE_SHIFT * sum(range(1, len(row) + 1)) for row in new])
    terms = []
    for index, (ours, theirs) in enumerate(zip(new, old, strict=True)):
        first = index // GROUP_SIZE * GROUP_SIZE
        others = [scored[other] for other in range(first, first + GROUP_SIZE) if other != index]
        if len(ours):
            ratio = ours.exp().prod() / theirs.exp().prod()
            terms.append(ppo_token(ratio, scored[index] - sum(others) / len(others), 0.2, 0.2))
    return -total(terms) / len(new)


def reinforce_pp(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """REINFORCE++: the reward less the KL from a token on, normalised over all tokens of the batch, clipped ratios."""
    advantages = [
        [
            reward - KL * sum(REFERENCE_SHIFT * (1 + later) for later in range(token, len(row)))
            for token in range(len(row))
        ]
        for reward, row in zip(rewards, new, strict=True)
    ]
    flat = np.array([value for row in advantages for value in row])
    mean, std = flat.mean(), np.sqrt(((flat - flat.mean()) ** 2).mean())
    terms = [
        ppo_token((ours[token] - theirs[token]).exp(), (value - mean) / (std + EPSILON), 0.2, 0.2)
        for ours, theirs, row in zip(new, old, advantages, strict=True)
        for token, value in enumerate(row)
    ]
    return -total(terms) / len(terms)


def reinforce(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Williams 1992: the gradient of the log-probability of each sample, times reward less baseline."""
    terms = [(float(reward - rewards.mean())) * total(list(row)) for reward, row in zip(rewards, new, strict=True)]
    return -total(terms) / len(terms) / MAX_TOKENS


def ppo(new: Rows, old: Rows, rewards: np.ndarray) -> torch.Tensor:
    """Schulman et al. 2017, equations 7 and 11 with the latter written out as a sum; each token pays for its KL, and
    the advantages are whitened as Ouyang et al. do."""
    advantages = []
    for sample, reward in zip(samples(), rewards, strict=True):
        assert sample.values is not None
        values = [*map(float, sample.values), 0.0]
        paid = [-KL * REFERENCE_SHIFT * (1 + token) for token in range(sample.num_tokens)]
        paid[-1:] = [paid[-1] + reward] if paid else []
        deltas = [paid[token] + values[token + 1] - values[token] for token in range(len(paid))]
        advantages.append(
            [sum(0.9 ** (k - token) * deltas[k] for k in range(token, len(deltas))) for token in range(len(deltas))]
        )
    flat = np.array([value for row in advantages for value in row])
    mean, std = flat.mean(), np.sqrt(((flat - flat.mean()) ** 2).mean())
    terms = [
        ppo_token((ours[token] - theirs[token]).exp(), (value - mean) / (std + EPSILON), 0.2, 0.2)
        for ours, theirs, row in zip(new, old, advantages, strict=True)
        for token, value in enumerate(row)
    ]
    return -total(terms) / len(terms)


Formula = Callable[[Rows, Rows, np.ndarray], torch.Tensor]
FORMULAS: dict[str, tuple[Formula, dict[str, Any]]] = {
    "grpo_token": (grpo_token, {}),
    "grpo": (grpo, {}),
    "dr_grpo": (dr_grpo, {}),
    "dapo": (dapo, {}),
    "gspo": (gspo, {}),
    "cispo": (cispo, {}),
    "rloo": (rloo, {"kl_coefficient": KL}),
    "reinforce_pp": (reinforce_pp, {"kl_coefficient": KL}),
    "reinforce": (reinforce, {}),
    "ppo": (ppo, {"kl_coefficient": KL, "gae_lambda": 0.9}),
}
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
