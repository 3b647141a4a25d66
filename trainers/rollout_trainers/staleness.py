"""Which groups may begin, and which make a step's batch, so that no sample gets too old: integers and lists only.

A group is the samples of one prompt. Groups are begun in the order of the data, each under the policy that the engine
has then, and end in any order. Step t learns from `groups_per_step` of them and makes policy t out of policy t - 1. A
sample whose oldest token is of policy v is then t - 1 - v versions stale, so that with a bound of m versions it must be
learned from in step v + 1 + m at the latest: its deadline.

The sentence that keeps the bound without throwing anything away: *of the groups with a deadline of s or before there
are never more than the steps up to s take.* A group is begun only where that stays true, and a batch leaves none
behind for which it would not: it waits for the groups that it must take, and takes those that have ended first besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Group:
    """A group that was begun and not yet learned from. `place` is the order in which it has ended (None: not yet)."""

    number: int  # in the order of the data, over the whole run
    version: int  # of the policy that the engine had when its first token was sampled, or when it was begun
    begun_for: int  # the step whose batch was the next one then
    place: int | None = None


class GroupBook:
    """Groups on their way from the data to the trainer.

    `max_staleness` versions is the bound; at most `num_spare` groups are there beyond those that the next step takes
    (None: as many as the bound allows). Groups that no step up to `last_step` would take are not begun.

    Where several processes have a book each, they divide the data: of the `num_everyones` groups that a step's places
    have in the data, this one begins those from `first_place` on.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        num_spare: int | None,
        last_step: int,
        first_place: int = 0,
        num_everyones: int | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.first_place = first_place
        self.num_everyones = num_everyones or groups_per_step
        self.max_staleness = max_staleness
        self.num_spare = num_spare
        self.last_step = last_step
        self.step = 0  # the one that has taken a batch last
        self.version = 0  # of the engine's policy
        self.num_begun = 0
        self.groups: dict[int, Group] = {}  # by number, those that were begun and not taken
        self._num_ended = 0

    def deadline(self, group: Group) -> int:
        """The last step that may learn from it."""
        return self._deadline_of(group.version)

    def _deadline_of(self, version: int) -> int:
        return min(version + 1 + self.max_staleness, self.last_step)

    def may_begin(self, num_wanted: int = 0) -> bool:
        """Whether one more group can begin under the engine's policy. `num_wanted`: how many groups the present step
        still waits for beside its own (dynamic sampling)."""
        room = self.groups_per_step * (self._deadline_of(self.version) - self.step)
        if self.num_spare is not None:
            ahead = self.groups_per_step if self.step < self.last_step else 0
            room = min(room, ahead + self.num_spare)
        return len(self.groups) < room + num_wanted

    def begin(self) -> int:
        """Begins the next group, and returns its number in the data."""
        step, place = divmod(self.num_begun, self.groups_per_step)
        group = Group(step * self.num_everyones + self.first_place + place, self.version, self.step + 1)
        self.groups[group.number] = group
        self.num_begun += 1
        return group.number

    def note_first_token(self, number: int) -> None:
        """Not before now is anything of a group sampled that was begun earlier: it may be learned from for longer."""
        self.groups[number].version = self.version

    @property
    def num_unfinished(self) -> int:
        """Groups that were begun and have not ended."""
        return sum(group.place is None for group in self.groups.values())

    def end(self, number: int) -> None:
        """All samples of a group have ended."""
        self.groups[number].place = self._num_ended
        self._num_ended += 1

    def choose(self, step: int, count: int, may_be_fewer: bool = False) -> list[int] | None:
        """Numbers of the groups, in their order, that `step` learns from: `count`, or with `may_be_fewer` those that
        have ended, at least one. None where it has to wait."""
        ended = sorted((group for group in self.groups.values() if group.place is not None), key=_place)
        if not ended or (len(ended) < count and not may_be_fewer):
            return None
        chosen: dict[int, None] = {}  # numbers
        for deadline in sorted({self.deadline(group) for group in self.groups.values()}):
            num_due = sum(self.deadline(group) <= deadline for group in self.groups.values())
            num_later = self.groups_per_step * (deadline - step)  # what the steps after this one can take of them
            num_missing = num_due - max(0, num_later) - len(chosen)  # what was chosen so far is due as well
            for group in ended:
                if num_missing > 0 and group.number not in chosen and self.deadline(group) <= deadline:
                    chosen[group.number] = None
                    num_missing -= 1
            if num_missing > 0:
                return None
        others = [group.number for group in ended if group.number not in chosen]
        return sorted([*chosen, *others[: max(0, count - len(chosen))]])

    def take(self, step: int, numbers: list[int]) -> list[Group]:
        """`step` learns from these groups."""
        self.step = step
        return [self.groups.pop(number) for number in numbers]

    def restore(self, step: int, num_begun: int, groups: Sequence[Group]) -> None:
        """Goes on where another book was, after `step`."""
        self.step, self.num_begun = step, num_begun
        self.groups = {group.number: group for group in groups}
        self._num_ended = 1 + max((group.place for group in groups if group.place is not None), default=-1)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where some group could not be learned from before it is too old."""
        for group in self.groups.values():
            assert group.version <= self.version
            deadline = self.deadline(group)
            due = sum(self.deadline(other) <= deadline for other in self.groups.values())
            assert due <= self.groups_per_step * (deadline - self.step), (group, due, self.step)


def _place(group: Group) -> int:
    assert group.place is not None
    return group.place
