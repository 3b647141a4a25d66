"""The losses of the papers, written as loops over rows of float64 logprobs, and samples to try them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rollout_trainers.advantages import EPSILON
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
    """Two groups, whose logprobs, reference and critic's values are random; a file's constants say the rest."""
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
