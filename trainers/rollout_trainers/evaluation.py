"""Held-out evaluation: the share of right answers, how sure it is, and whether a change of it can be chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_trainers.checks import fail

EVALUATION_PREFIX = "eval/"
_METRICS = ("accuracy", "accuracy_low", "accuracy_high", "reward", "mean_length")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results on `num` held-out prompts. `successes` holds one flag a prompt, in the prompts' order."""

    accuracy: float
    low: float  # Wilson score interval, 95 %
    high: float
    mean_reward: float
    mean_length: float
    num: int
    successes: tuple[bool, ...]

    def metrics(self, of: str = "") -> dict[str, float]:
        """By name: `eval/accuracy`, and so on; of a further held-out set `of`, `eval/<of>/accuracy`."""
        values = (self.accuracy, self.low, self.high, self.mean_reward, self.mean_length)
        prefix = f"{EVALUATION_PREFIX}{of}/" if of else EVALUATION_PREFIX
        return {f"{prefix}{name}": value for name, value in zip(_METRICS, values, strict=True)}

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} (95 % CI {self.low:.1%} to {self.high:.1%}, n = {self.num})"


def check_evaluation_metric(section: str, field: str, name: object) -> None:
    """Raises `ValueError` where no evaluation has a metric of this name."""
    parts = name.split("/") if isinstance(name, str) else []
    if len(parts) not in (2, 3) or f"{parts[0]}/" != EVALUATION_PREFIX or parts[-1] not in _METRICS:
        known = ", ".join(f"{EVALUATION_PREFIX}{each}" for each in _METRICS)
        fail(section, field, name, f"an evaluation's metric: {known}, or of a further held-out set eval/<its name>/…")


def evaluated_set(metric: str) -> str:
    """The held-out set that an evaluation's metric is of: "" or its name."""
    return metric.removeprefix(EVALUATION_PREFIX).rpartition("/")[0]


def wilson_interval(successes: int, num: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a share: within [0, 1] and sensible at 0 and 1, unlike the normal approximation. It
    holds the share itself, also where rounding would have it outside."""
    if num < 1 or not 0 <= successes <= num:
        raise ValueError(f"{successes} successes of {num} are not valid: at least one trial, from 0 to all successes")
    share = successes / num
    scale = 1.0 + z * z / num
    centre = (share + z * z / (2 * num)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def evaluate_rewards(rewards: Sequence[float], lengths: Sequence[int], threshold: float) -> Evaluation:
    """Summarises one reward and completion length a prompt; a reward of at least `threshold` is a success."""
    successes = tuple(reward >= threshold for reward in rewards)
    low, high = wilson_interval(sum(successes), len(successes))
    return Evaluation(
        accuracy=sum(successes) / len(successes),
        low=low,
        high=high,
        mean_reward=math.fsum(rewards) / len(rewards),
        mean_length=sum(lengths) / len(lengths),
        num=len(successes),
        successes=successes,
    )


def mcnemar_p_value(before: Sequence[bool], after: Sequence[bool]) -> float:
    """Exact two-sided p-value that both runs over the same prompts are equally good: only changed prompts count."""
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    changed = gained + lost
    if changed == 0:
        return 1.0
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    return min(1.0, 2.0 * tail)
