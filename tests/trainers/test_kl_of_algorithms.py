"""What holding the policy near its reference does in every algorithm: the exact expectation of its gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout_trainers.credit import assign_advantages
from rollout_trainers.loss_config import PRESETS, LossSection
from rollout_trainers.losses import Denominators
from rollout_trainers.objective import micro_batch_loss
from rollout_trainers.packing import pack
from rollout_trainers.types import Sample
from tests.support.samples import make_sample

VOCABULARY, LENGTH, GROUP_SIZE, COEFFICIENT = 3, 2, 2, 0.5
LOGITS = torch.tensor([[0.4, -0.3, 0.1], [-0.6, 0.5, 0.2]], dtype=torch.float64)  # of the first and the second token
REFERENCE = torch.tensor([[-0.2, 0.3, 0.9], [0.1, -0.8, 0.4]], dtype=torch.float64).log_softmax(1)
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))


def kl_gradients() -> dict[str, torch.Tensor]:
    """[LENGTH, VOCABULARY], of the sum over both tokens of KL(policy, reference), and of KL(reference, policy)."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(1)
    (forward,) = torch.autograd.grad((policy.exp() * (policy - REFERENCE)).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((REFERENCE.exp() * (REFERENCE - policy)).sum(), logits)
    return {"k2": forward, "k3": reverse, "ratio_k3": forward, "k1": forward}


def sampled(tokens: Sequence[int]) -> Sample:
    """One that the policy has sampled, without a reward. Between its two tokens stands one that it has not."""
    sample = make_sample([1], [tokens[0], 9, tokens[1]])
    sample.loss_mask = np.array([True, False, True])
    places = (torch.arange(LENGTH), torch.tensor(tokens))
    sample.sampled_logprobs = LOGITS.log_softmax(1)[places].numpy().astype(np.float32)
    sample.reference_logprobs = REFERENCE[places].numpy().astype(np.float32)
    sample.values = np.zeros(LENGTH, np.float32)
    return sample


def expected_gradient(section: LossSection) -> torch.Tensor:
    """[LENGTH, VOCABULARY] in float64: of the loss, over all pairs of samples that can be drawn, by probability."""
    logits = LOGITS.clone().requires_grad_()
    mean = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(SEQUENCES, repeat=GROUP_SIZE):
        samples = [sampled(tokens) for tokens in group]
        assign_advantages(samples, GROUP_SIZE, section)
        batch = pack(samples, range(GROUP_SIZE))
        policy = logits.log_softmax(1)
        logprobs = torch.cat([policy[torch.arange(LENGTH), torch.tensor(tokens)] for tokens in group])
        denominators = Denominators(GROUP_SIZE * LENGTH, GROUP_SIZE, LENGTH)
        loss = micro_batch_loss(logprobs, torch.zeros_like(logprobs), batch, denominators, section).loss
        mean = mean + logprobs.detach().sum().exp() * loss
    return torch.autograd.grad(mean, logits)[0]


IN_LOSS = [name for name in PRESETS if LossSection(name).kl_placement == "loss"]
# Times the gradient of the mean KL of a token. A sequence is one action in "rloo", so that its KL counts as a whole.
# In "reinforce" a sample's own reward is in its baseline, which takes 1 / n of the gradient.
IN_REWARD = {"rloo": LENGTH, "reinforce_pp": 1, "reinforce": 1 - 1 / GROUP_SIZE, "ppo": 1}


def test_every_algorithm_is_here():
    assert {*IN_LOSS, *IN_REWARD} == {*PRESETS}


# case TR-04
@pytest.mark.parametrize("estimator", ["k2", "k3", "ratio_k3"])
@pytest.mark.parametrize("algorithm", IN_LOSS)
def test_a_kl_in_the_loss_has_the_gradient_of_its_estimator(algorithm: str, estimator: str):
    section = LossSection(algorithm, kl_coefficient=COEFFICIENT, kl_estimator=estimator)  # type: ignore[arg-type]
    expected = COEFFICIENT * kl_gradients()[estimator] / LENGTH  # all aggregations are a mean over tokens here
    torch.testing.assert_close(expected_gradient(section), expected, rtol=1e-4, atol=1e-7)


# case TR-04
@pytest.mark.parametrize("algorithm", IN_REWARD)
def test_a_kl_in_the_reward_has_the_gradient_of_the_kl(algorithm: str):
    unscaled = {"whiten": False} if LossSection(algorithm).whiten else {}  # type: ignore[arg-type]
    everything = {"gae_lambda": 1.0} if LossSection(algorithm).uses_critic else {}  # type: ignore[arg-type]
    section = LossSection(algorithm, kl_coefficient=COEFFICIENT, **unscaled, **everything)  # type: ignore[arg-type]
    assert section.kl_estimator == "k1"
    expected = COEFFICIENT * IN_REWARD[algorithm] * kl_gradients()["k1"] / LENGTH
    torch.testing.assert_close(expected_gradient(section), expected, rtol=1e-4, atol=1e-7)


# case TR-04
@pytest.mark.parametrize("extreme", [-1e30, -math.inf])
@pytest.mark.parametrize("algorithm", PRESETS)
def test_a_token_that_is_not_the_policys_adds_nothing_however_unlikely_it_is(algorithm: str, extreme: float):
    """A policy and a reference whose logprobs of the given token are absurd: it is read, and has none in the batch."""
    section = LossSection(algorithm, kl_coefficient=COEFFICIENT)  # type: ignore[arg-type]
    samples = [sampled(tokens) for tokens in SEQUENCES[: 2 * GROUP_SIZE]]
    assign_advantages(samples, GROUP_SIZE, section)
    batch = pack(samples, range(len(samples)))
    by_row = torch.full((len(batch.input_ids),), extreme, dtype=torch.float64)
    by_row[batch.rows.unique()] = -1.0  # the rows before what the policy has sampled
    by_row.requires_grad_()
    logprobs = by_row[batch.rows]
    denominators = Denominators(len(logprobs), len(samples), LENGTH)
    loss = micro_batch_loss(logprobs, torch.zeros_like(logprobs), batch, denominators, section).loss
    loss.backward()
    assert by_row.grad is not None and loss.isfinite()
    assert set(by_row.grad.nonzero()[:, 0].tolist()) <= set(batch.rows.tolist())
    assert by_row.grad.isfinite().all() and by_row.grad.any()
