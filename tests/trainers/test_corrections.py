"""Importance weights and masks against their definitions, and that they remove the bias that they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_trainers.corrections import Importance, correction_metrics, importance_weights
from rollout_trainers.loss_config import LossSection

TRAINER = np.array([-1.0, -2.0, -0.5, -3.0], np.float32)
SAMPLER = np.array([-2.0, -1.9, -0.5, -1.0], np.float32)  # log ratios: 1, -0.1, 0, -2
RATIOS = np.exp([1.0, -0.1, 0.0, -2.0])


def weigh(trainer: np.ndarray = TRAINER, sampler: np.ndarray = SAMPLER, **choices: Any) -> Importance:
    return importance_weights(trainer, sampler, LossSection(**choices))


def test_token_weights_are_truncated_above():
    np.testing.assert_allclose(weigh(correction="tis").weights, np.minimum(RATIOS, 2.0), rtol=1e-6)
    np.testing.assert_allclose(weigh(correction="tis", importance_cap=None).weights, RATIOS, rtol=1e-6)


def test_sequence_weights_are_the_product_over_the_sequence():
    np.testing.assert_allclose(weigh(correction="sequence_tis").weights, np.full(4, np.exp(-1.1)), rtol=1e-5)
    np.testing.assert_allclose(weigh(SAMPLER, TRAINER, correction="sequence_tis").weights, np.full(4, 2.0), rtol=1e-6)


def test_icepop_leaves_tokens_out_on_both_sides():
    result = weigh(correction="icepop")
    assert result.kept.tolist() == [True, True, True, False]
    np.testing.assert_allclose(result.weights, RATIOS * [1, 1, 1, 0], rtol=1e-6)
    assert weigh(correction="icepop", mask_high=2.0).kept.tolist() == [False, True, True, False]


def test_masked_sequences_are_left_out_whole():
    assert weigh(correction="mis").kept.all()  # exp(-1.1)
    result = weigh(SAMPLER, TRAINER, correction="mis")  # exp(1.1) = 3.004
    assert not result.kept.any()
    assert (result.weights == 0).all()
    wide = weigh(SAMPLER, TRAINER, correction="mis", mask_high=3.1)
    np.testing.assert_allclose(wide.weights, np.full(4, np.exp(1.1)), rtol=1e-5)  # masked or whole, never truncated


def test_the_geometric_mask_looks_at_the_mean_over_the_sequence():
    assert not weigh(correction="geometric_mask").kept.any()  # exp(-1.1 / 4) = 0.76
    result = weigh(correction="geometric_mask", mask_low=0.75)
    assert result.kept.all()
    np.testing.assert_allclose(result.weights, np.minimum(RATIOS, 2.0), rtol=1e-6)


@pytest.mark.parametrize("correction", ["none", "tis", "sequence_tis", "mis", "icepop", "geometric_mask"])
def test_a_sampler_that_is_the_trainer_has_weights_of_exactly_one_and_an_empty_sequence_none(correction: Any):
    result = weigh(TRAINER, TRAINER, correction=correction)
    assert (result.weights == 1.0).all()
    assert result.kept.all()
    assert weigh(TRAINER[:0], TRAINER[:0], correction=correction).weights.shape == (0,)


def test_uncapped_weights_of_sequences_remove_the_samplers_bias_exactly():
    """By enumeration: sequences of two tokens over three, sampler and trainer as they please."""
    generator = np.random.default_rng(6)

    def table() -> tuple[np.ndarray, np.ndarray]:
        logits = generator.normal(size=(4, 3))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return logprobs[0], logprobs[1:]  # of the first token, and of the second given the first

    trainer, sampler, values = table(), table(), generator.normal(size=(3, 3))
    section = LossSection(importance_level="sequence", importance_cap=None)
    expected = corrected = biased = 0.0
    for first in range(3):
        for second in range(3):
            ours = np.array([trainer[0][first], trainer[1][first, second]])
            theirs = np.array([sampler[0][first], sampler[1][first, second]])
            weight = importance_weights(ours, theirs, section).weights[0]
            expected += np.exp(ours.sum()) * values[first, second]
            corrected += np.exp(theirs.sum()) * weight * values[first, second]
            biased += np.exp(theirs.sum()) * values[first, second]
    assert corrected == pytest.approx(expected, rel=1e-5)
    assert abs(biased - expected) > 0.05


def test_metrics_are_those_of_their_definitions():
    pairs = [(TRAINER, SAMPLER), (SAMPLER[:2], TRAINER[:2])]
    section = LossSection(correction="icepop", importance_cap=2.0)
    metrics = correction_metrics([(a, b, importance_weights(a, b, section)) for a, b in pairs], 2.0)
    ratios = np.concatenate([RATIOS, np.exp([-1.0, 0.1])])
    weights = np.array([2.0, np.exp(-0.1), 1.0, 0.0, 0.0, np.exp(0.1)])  # exp(-2) and exp(-1) are below 0.5
    sequence_ratios = np.exp([-1.1, -0.9])
    gaps = np.array([1.1 / 4, 0.9 / 2])  # log perplexities of trainer less sampler
    expected = {
        "sampling/importance_sampling_ratio/min": 0.0,
        "sampling/importance_sampling_ratio/max": 2.0,
        "rollout_corr/k3_kl": (ratios - 1 - np.log(ratios)).mean(),
        "rollout_corr/training_ppl": np.exp([6.5 / 4, 3.9 / 2]).mean(),
        "rollout_corr/rollout_ppl": np.exp([5.4 / 4, 3.0 / 2]).mean(),
        "rollout_corr/log_ppl_diff": gaps.mean(),
        "rollout_corr/log_ppl_diff_max": gaps.max(),
        "rollout_corr/ppl_ratio": np.exp(gaps).mean(),
        "rollout_corr/chi2_token": (ratios**2).mean() - 1,
        "rollout_corr/chi2_seq": (sequence_ratios**2).mean() - 1,
        "rollout_corr/rollout_is_mean": weights.mean(),
        "rollout_corr/rollout_is_std": weights.std(),
        "rollout_corr/rollout_is_eff_sample_size": weights.sum() ** 2 / (weights**2).sum() / 6,
        "rollout_corr/rollout_is_ratio_fraction_high": 1 / 6,
        "rollout_corr/rollout_is_ratio_fraction_low": 2 / 6,
        "rollout_corr/rollout_rs_masked_fraction": 2 / 6,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    assert correction_metrics([], 2.0) == {}
