"""A sampler that sorts a list, to check what `sample` keeps and reports; shared by the CPU's and the GPU's tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import rollout_kernels as rk

FILTERS = [
    {},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 40, "top_p": 0.97, "min_p": 0.005},
]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def simple_kept(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Which ids the filters keep, bool [V]: one loop over a sorted list of pairs. Never those of -inf."""
    probabilities = np.exp(log_softmax(logits.astype(np.float64) / temperature))
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < top_k < len(ranked):
        ranked = [i for i in ranked if logits[i] >= logits[ranked[top_k - 1]]]
    total, before, kept = probabilities[ranked].sum(), 0.0, np.zeros(len(logits), dtype=bool)
    for i in ranked:
        kept[i] = (
            logits[i] > -np.inf
            and (top_p == 1.0 or before < np.float32(top_p) * total)
            and (probabilities[i] >= np.float32(min_p) * probabilities.max())
        )
        before += probabilities[i]
    return kept


def check_against_simple(logits: torch.Tensor, result: rk.SampleResult, temperature: float, filters: dict) -> None:
    """All draws are from row 0 of `logits`."""
    row = logits[0].numpy()
    kept = simple_kept(row, temperature, **filters)
    raw, tempered = log_softmax(row.astype(np.float64)), log_softmax(row.astype(np.float64) / temperature)
    mass = np.exp(tempered[kept]).sum()
    tokens = result.token_ids.numpy()
    assert (result.status == rk.STATUS_OK).all()
    assert kept[tokens].all()
    np.testing.assert_allclose(result.kept_mass.numpy(), mass, rtol=3e-6)
    np.testing.assert_allclose(result.raw_logprobs.numpy(), raw[tokens], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(result.sampled_logprobs.numpy(), tempered[tokens] - np.log(mass), rtol=2e-6, atol=4e-6)
    entropy = -(np.exp(tempered) * tempered).sum()
    np.testing.assert_allclose(result.entropy.numpy(), entropy, rtol=5e-6, atol=1e-6)


def banned_ids(*ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *(len(part) for part in ids)]).cumsum(0).int()
    return offsets, torch.tensor([i for part in ids for i in part], dtype=torch.int32)


def masks(*allowed: list[int], vocab_size: int, beyond: bool = False) -> torch.Tensor:
    """Rows of `allowed` masks for lists of ids; `beyond` sets the bits past the vocabulary, which mean nothing."""
    rows = np.zeros((len(allowed), -(-vocab_size // 32) * 32), dtype=np.uint8)
    rows[:, vocab_size:] = beyond
    for row, ids in zip(rows, allowed, strict=True):
        row[ids] = 1
    return torch.from_numpy(np.packbits(rows, axis=1, bitorder="little").view(np.int32))


@dataclass(frozen=True)
class Source:
    """What one draw is made from, for the simple sampler."""

    logits: np.ndarray  # [V]
    row: np.ndarray  # [V], adjusted, or the logits
    may: np.ndarray  # bool [V]
    temperature: float
    filters: dict
    forced: int = -1


def check_draw(source: Source, result: rk.SampleResult, draw: int) -> None:
    """One draw's token and all its numbers."""
    row = source.row.astype(np.float64)
    heat = source.temperature or 1.0
    masked = np.where(source.may, source.row, np.float32(-np.inf))
    kept = simple_kept(masked, heat, **source.filters)
    if source.temperature == 0.0:
        kept = np.arange(len(row)) == masked.argmax()
    raw, tempered = log_softmax(source.logits.astype(np.float64)), log_softmax(row / heat)
    token, mass = int(result.token_ids[draw]), np.exp(tempered[kept]).sum()
    assert result.status[draw] == rk.STATUS_OK
    assert result.num_kept[draw] == kept.sum()
    assert token == source.forced if source.forced >= 0 else kept[token]
    with np.errstate(invalid="ignore"):
        sampled = tempered[token] - np.log(mass) if kept[token] else -np.inf
        plogp = np.where(np.isfinite(tempered), np.exp(tempered) * tempered, 0.0)
    np.testing.assert_allclose(float(result.raw_logprobs[draw]), raw[token], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(
        float(result.sampled_logprobs[draw]), 0.0 if source.temperature == 0.0 and kept[token] else sampled,
        rtol=2e-6, atol=4e-6,
    )  # fmt: skip
    np.testing.assert_allclose(float(result.kept_mass[draw]), mass, rtol=3e-6)
    np.testing.assert_allclose(float(result.entropy[draw]), -plogp.sum(), rtol=5e-6, atol=2e-6)
