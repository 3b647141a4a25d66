"""What asynchronous sampling does to a step's samples: how stale they are, how long they waited, and which lengths come
first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rollout_trainers.staleness import Group
from rollout_trainers.types import Sample


def token_staleness(sample: Sample, version: int) -> np.ndarray:
    """int64 [c]: by how many versions the policy that sampled each token is behind `version`."""
    if not sample.versions:
        return np.full(sample.num_tokens, version - sample.policy_version)
    return np.concatenate([np.full(span.end - span.start, version - span.version) for span in sample.versions])


def staleness_metrics(samples: Sequence[Sample], groups: Sequence[Group], step: int) -> dict[str, float]:
    """Of the samples that `step` learns from, which makes policy `step` out of the one before.

    `staleness/mean` and `max` are over tokens, in policy versions; `versions_per_sample` is how many policies have
    sampled one, and `partial_ratio` the share of samples with several. `async/steps_waited/*`: for how many steps a
    group was left out of batches since the one that it was begun for.
    """
    behind = [part for sample in samples if (part := token_staleness(sample, step - 1)).size]
    by_token = np.concatenate(behind) if behind else np.zeros(1, np.int64)
    num_versions = np.array([max(1, len({span.version for span in sample.versions})) for sample in samples])
    waited = [step - group.begun_for for group in groups]
    return {
        "staleness/mean": float(by_token.mean()),
        "staleness/max": float(by_token.max()),
        "staleness/versions_per_sample": float(num_versions.mean()),
        "staleness/partial_ratio": float((num_versions > 1).mean()),
        "async/steps_waited/mean": float(np.mean(waited)),
        "async/steps_waited/max": float(max(waited)),
    }


@dataclass(slots=True)
class RunLengths:
    """Lengths of the samples that a run has learned from so far. Short samples end first, so that at any moment those
    on their way are longer; over a run the two means meet, unless long ones are lost."""

    num_samples: int = 0
    num_tokens: int = 0
    num_counted: int = 0  # tokens, as of the last `count_new`

    def learn(self, samples: Sequence[Sample]) -> None:
        self.num_samples += len(samples)
        self.num_tokens += sum(sample.num_tokens for sample in samples)

    def metrics(self, lengths: Sequence[int]) -> dict[str, float]:
        """`over_sampling/trained_mean_length` over all steps so far, `waiting_mean_length` of what was begun and not
        yet learned from, which has these `lengths` by now, `begun_mean_length` of both together, and `length_bias`:
        trained - begun."""
        num_samples = self.num_samples + len(lengths)
        if self.num_samples == 0:
            return {}
        trained = self.num_tokens / self.num_samples
        begun = (self.num_tokens + sum(lengths)) / num_samples
        result = {
            "over_sampling/trained_mean_length": trained,
            "over_sampling/begun_mean_length": begun,
            "over_sampling/length_bias": trained - begun,
        }
        if lengths:
            result["over_sampling/waiting_mean_length"] = sum(lengths) / len(lengths)
        return result

    def count_new(self, lengths: Sequence[int]) -> int:
        """Tokens that were sampled since the last call; `lengths` of what is not yet learned from."""
        before = self.num_counted
        self.num_counted = self.num_tokens + sum(lengths)
        return self.num_counted - before

    def forget_lost(self, lengths: Sequence[int]) -> None:
        """What is sampled anew counts anew; `lengths` of what was kept and not yet learned from."""
        self.num_counted = min(self.num_counted, self.num_tokens + sum(lengths))

    def add(self, other: RunLengths) -> None:
        """Counts those of another rank as well."""
        self.num_samples += other.num_samples
        self.num_tokens += other.num_tokens

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_samples, self.num_tokens = state["num_samples"], state["num_tokens"]
        self.num_counted = state["num_counted"]


@dataclass(slots=True)
class StreamReport:
    """What a rank's stream has to say after a step."""

    taken: list[Group]  # by the step
    num_waiting: int  # groups
    num_unfinished: int
    waiting_lengths: list[int]
    num_sampled: int  # tokens, since the last report
    lengths: RunLengths

    @classmethod
    def of_all(cls, reports: Sequence[StreamReport]) -> StreamReport:
        """Those of all ranks in one."""
        lengths = RunLengths()
        for report in reports:
            lengths.add(report.lengths)
        return cls(
            taken=[group for report in reports for group in report.taken],
            num_waiting=sum(report.num_waiting for report in reports),
            num_unfinished=sum(report.num_unfinished for report in reports),
            waiting_lengths=[length for report in reports for length in report.waiting_lengths],
            num_sampled=sum(report.num_sampled for report in reports),
            lengths=lengths,
        )
