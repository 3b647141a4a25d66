"""Groups whose rewards are all equal are replaced, up to a limit, and the counts say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollout_trainers.dynamic_sampling import SampledGroups, is_informative, sample_until_informative
from rollout_trainers.producer import select_examples, select_further_examples
from rollout_trainers.types import Example, Sample
from tests.support.samples import make_sample


def groups_of_two(teaches: Callable[[int], bool], asked: list[tuple[int, int]]) -> Callable[[int, int], list[Sample]]:
    """A round of groups; the one at a place has unequal rewards where `teaches(place)`."""

    def sample_round(place: int, count: int) -> list[Sample]:
        asked.append((place, count))
        return [
            make_sample([1], [2], reward=float(index) if teaches(group) else 1.0, group=group)
            for group in range(place, place + count)
            for index in range(2)
        ]

    return sample_round


def kept_groups(result: SampledGroups) -> list[int]:
    assert all(one.group == other.group for one, other in zip(result.kept[::2], result.kept[1::2], strict=True))
    return [sample.group for sample in result.kept[::2]]


def test_only_what_is_missing_is_sampled_again():
    asked: list[tuple[int, int]] = []
    result = sample_until_informative(groups_of_two(lambda place: place not in (1, 2, 4), asked), 4, 2, 5)
    assert asked == [(0, 4), (4, 2), (6, 1)]
    assert kept_groups(result) == [0, 3, 5, 6]
    assert len(result.samples) == 7 * 2
    assert result.metrics(2) == {
        "dynamic_sampling/rounds": 3,
        "dynamic_sampling/groups_sampled": 7,
        "dynamic_sampling/groups_dropped": 3,
        "dynamic_filtering_pass_rate": pytest.approx(4 / 7),
    }


def test_the_limit_of_rounds_leaves_fewer_groups_or_none():
    asked: list[tuple[int, int]] = []
    result = sample_until_informative(groups_of_two(lambda place: place == 5, asked), 3, 2, 2)
    assert asked == [(0, 3), (3, 3)]
    assert kept_groups(result) == [5]
    nothing = sample_until_informative(groups_of_two(lambda place: False, []), 3, 2, 2)
    assert nothing.kept == []
    assert nothing.metrics(2)["dynamic_filtering_pass_rate"] == 0.0


def test_groups_are_judged_by_the_tasks_reward_and_not_by_penalties():
    group = [make_sample([1], [2], reward=1.0), make_sample([1], [2], reward=1.0)]
    group[0].penalty = -0.5
    assert not is_informative(group)


def test_further_prompts_are_others_than_the_steps_own_as_long_as_there_are_others():
    examples = [Example(str(index)) for index in range(7)]
    for step in (1, 2, 5):
        own = {str(example.prompt) for example in select_examples(examples, step, 3, seed=4)}
        further = [str(example.prompt) for example in select_further_examples(examples, step, 3, 0, 8, seed=4)]
        others = {str(example.prompt) for example in examples} - own
        assert set(further[: len(others)]) == set(further[len(others) : 2 * len(others)]) == others
        parts = [select_further_examples(examples, step, 3, first, 2, seed=4) for first in (0, 2, 4, 6)]
        assert [str(example.prompt) for part in parts for example in part] == further  # whatever the rounds' sizes
    assert len(select_further_examples(examples, 1, 7, 0, 4, seed=4)) == 4  # all are the step's own
