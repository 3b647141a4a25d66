"""The KL's coefficient: fixed without a target, and a controller that finds the target where the policy answers it."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_trainers.kl_control import KLControl, sequence_kl
from rollout_trainers.loss_config import LossSection
from tests.support.samples import make_sample


def test_without_a_target_the_coefficient_stays():
    control = KLControl.of(LossSection("ppo", kl_coefficient=0.1))
    control.observe(100.0)
    assert control.coefficient == 0.1


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)])
def test_a_step_of_the_controller_is_that_of_the_paper(kl: float, error: float):
    """Ziegler et al. 2019: beta (1 + K e), with e the relative error held within 0.2, and K of 0.1."""
    control = KLControl.of(LossSection("ppo", kl_coefficient=0.5, kl_target=6.0))
    control.observe(kl)
    assert control.coefficient == pytest.approx(0.5 * (1 + 0.1 * error))


def test_the_gain_is_a_choice():
    control = KLControl.of(LossSection(kl_coefficient=0.5, kl_target=6.0, kl_gain=1.0))
    control.observe(60.0)
    assert control.coefficient == pytest.approx(0.6)


def test_a_policy_whose_kl_falls_with_the_coefficient_is_held_at_the_target():
    control = KLControl(1.0, target=4.0, gain=0.1)
    for _ in range(500):
        control.observe(1.0 / control.coefficient)
    assert control.coefficient == pytest.approx(0.25, rel=1e-3)


def test_the_kl_of_a_sequence_is_the_sum_over_its_tokens_under_the_policy_that_the_step_began_with():
    samples = [make_sample([1], [3] * count) for count in (2, 4, 3)]
    for sample in samples[:2]:
        sample.reference_logprobs = sample.sampled_logprobs - np.float32(0.5)
    assert sequence_kl(samples) == pytest.approx((1.0 + 2.0) / 2)  # the last was not compared
    samples[0].old_logprobs = samples[0].sampled_logprobs + np.float32(1.0)
    assert sequence_kl(samples) == pytest.approx((3.0 + 2.0) / 2)
    assert sequence_kl(samples[2:]) is None
