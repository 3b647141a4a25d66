"""Groups whose rewards are all equal teach nothing: they are replaced by groups of further prompts, up to a limit.

The dynamic sampling of DAPO (Yu et al. 2025, arXiv 2503.14476), in rounds: each asks for as many groups as are missing,
so that no group that teaches something is thrown away. Groups are judged by their rewards as the task gives them,
without a penalty for length. Where the last round leaves some missing, the step learns from fewer groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout_trainers.ranks import Ranks
from rollout_trainers.types import Sample


@dataclass(slots=True)
class SampledGroups:
    """What a step has sampled: all `samples`, round after round, and those that are learned from, group after group."""

    samples: list[Sample] = field(default_factory=list)
    kept: list[Sample] = field(default_factory=list)
    num_rounds: int = 0
    num_dropped: int = 0  # groups

    def metrics(self, group_size: int) -> dict[str, float]:
        """How many rounds and groups it took."""
        num_groups = len(self.samples) // group_size
        return {
            "dynamic_sampling/rounds": self.num_rounds,
            "dynamic_sampling/groups_sampled": num_groups,
            "dynamic_sampling/groups_dropped": self.num_dropped,
            "dynamic_filtering_pass_rate": 1.0 - self.num_dropped / num_groups,
        }


def sample_until_informative(
    sample_round: Callable[[int, int], list[Sample]],
    num_groups: int,
    group_size: int,
    max_rounds: int,
    ranks: Ranks | None = None,
) -> SampledGroups:
    """Samples until `num_groups` groups have unequal rewards, or for `max_rounds` rounds.

    `sample_round(place, count)` gives the scored samples of `count` more groups, `group_size` each, the first of which
    is the step's `place`-th (from 0). With several `ranks` it gives this one's share of them, and so does the result;
    groups are counted over all ranks.
    """
    ranks = ranks or Ranks()
    result = SampledGroups()
    place, missing = 0, num_groups
    while missing and result.num_rounds < max_rounds:
        fresh = sample_round(place, missing)
        result.samples += fresh
        result.num_rounds += 1
        groups = [fresh[start : start + group_size] for start in range(0, len(fresh), group_size)]
        informative = [group for group in groups if is_informative(group)]
        result.kept += [sample for group in informative for sample in group]
        num_informative, num_dropped = ranks.sum(len(informative), len(groups) - len(informative))
        place += num_informative + num_dropped
        missing -= num_informative
        result.num_dropped += num_dropped
    return result


def is_informative(group: Sequence[Sample]) -> bool:
    """Whether the rewards of a group's samples differ."""
    return len({sample.reward for sample in group}) > 1
