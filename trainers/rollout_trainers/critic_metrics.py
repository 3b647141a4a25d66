"""What a step says about its critic, under verl's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout_trainers.objective import CriticLoss
from rollout_trainers.types import Sample


@dataclass(slots=True)
class CriticStatistics:
    """Filled while a step's updates go through its samples."""

    loss: float = 0.0  # of the last optimiser step
    grad_norm: float = 0.0  # largest, before clipping
    learning_rate: float = 0.0
    num_clipped: int = 0
    num_tokens: int = 0
    value_sum: float = 0.0

    def begin_update(self) -> None:
        """An optimiser step begins."""
        self.loss = 0.0

    def add(self, values: np.ndarray, loss: CriticLoss) -> None:
        """Counts a micro-batch, for whose tokens the critic has said `values` [C]."""
        self.loss += float(loss.loss.detach())
        self.num_clipped += loss.num_clipped
        self.num_tokens += values.size
        self.value_sum += float(values.sum(dtype=np.float64))

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """With the values, returns and advantages of all the step's `samples`, as they were before its updates."""
        tokens = max(1, self.num_tokens)
        result = {
            "critic/vf_loss": self.loss,
            "critic/vf_clipfrac": self.num_clipped / tokens,
            "critic/vpred_mean": self.value_sum / tokens,
            "critic/grad_norm": self.grad_norm,
            "critic/lr": self.learning_rate,
        }
        return result | _value_metrics(samples)


def merge_critic_statistics(parts: Sequence[CriticStatistics]) -> CriticStatistics:
    """Those of one step on all ranks."""
    merged = replace(parts[0])
    for part in parts[1:]:
        merged.loss += part.loss
        merged.num_clipped += part.num_clipped
        merged.num_tokens += part.num_tokens
        merged.value_sum += part.value_sum
    return merged


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - variance(returns - values) / variance(returns): 1 for a perfect critic, 0 for one that says always the same,
    below for a worse one. None where the returns are all equal."""
    returns = returns.astype(np.float64)
    if returns.size == 0 or returns.max() == returns.min():
        return None
    return float(1.0 - (returns - values).var() / returns.var())


def _value_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    arrays = {
        "values": _joined([sample.values for sample in samples]),
        "returns": _joined([sample.returns for sample in samples]),
        "advantages": _joined([sample.token_advantages for sample in samples]),
    }
    result: dict[str, float] = {}
    for name, array in arrays.items():
        if array.size:
            result |= {f"critic/{name}/mean": float(array.mean(dtype=np.float64))}
            result |= {f"critic/{name}/max": float(array.max()), f"critic/{name}/min": float(array.min())}
    explained = explained_variance(arrays["values"], arrays["returns"])
    return result if explained is None else result | {"critic/vf_explained_var": explained}


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *(part for part in parts if part is not None)])
