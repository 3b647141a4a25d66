"""Which groups begin and which are learned from: nothing gets too old, nothing is lost, nobody waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rollout_trainers.staleness import Group, GroupBook


def test_a_step_ahead_nothing_begins_before_the_batch_before_is_taken():
    book = GroupBook(groups_per_step=2, max_staleness=1, num_spare=0, last_step=9)
    assert [book.begin(), book.begin()] == [0, 1]
    assert not book.may_begin()
    assert book.choose(1, 2) is None
    book.end(1)
    assert book.choose(1, 2) is None
    book.end(0)
    assert book.choose(1, 2) == [0, 1]  # in the order of the data, not in that of their ends
    assert book.take(1, [0, 1]) == [Group(0, 0, 1, place=1), Group(1, 0, 1, place=0)]
    assert book.may_begin()


def test_books_of_several_processes_divide_the_data_of_every_step():
    """Five groups a step: the one begins two of them, the other three."""
    first, second = GroupBook(2, 1, None, 4, 0, 5), GroupBook(3, 1, None, 4, 2, 5)
    begun = []
    for book in (first, second):
        while book.may_begin():
            begun.append(book.begin())
    assert begun == [0, 1, 5, 6, 2, 3, 4, 7, 8, 9]  # two steps' groups
    first.end(5)
    first.end(1)
    first.end(0)
    assert first.choose(1, 2) == [1, 5]
    other = GroupBook(2, 1, None, 4, 0, 5)
    other.restore(1, first.num_begun, [group for group in first.groups.values() if group.number not in (1, 5)])
    assert other.may_begin() is False  # policy 0 still
    other.version = 1
    assert other.begin() == 10


def test_a_group_is_as_old_as_its_first_token():
    book = GroupBook(2, 1, None, 9)
    for _ in range(4):
        book.begin()
    for number in (0, 1):
        book.end(number)
    book.take(1, [0, 1])
    book.version = 1
    book.note_first_token(3)
    assert [book.deadline(book.groups[number]) for number in (2, 3)] == [2, 3]
    book.check_integrity()
    assert book.num_unfinished == 2


def test_what_was_restored_comes_before_what_ends_later():
    book = GroupBook(1, 3, None, 9)
    for _ in range(3):
        book.begin()
    groups = [Group(0, 0, 1), Group(1, 0, 1, place=7), Group(2, 0, 1, place=4)]
    book.restore(0, 3, groups)
    book.end(0)
    assert [book.groups[number].place for number in (2, 1, 0)] == [4, 7, 8]
    assert book.choose(1, 1) == [2]


def test_of_a_bound_of_two_versions_three_batches_may_be_on_their_way_before_the_first_step():
    book = GroupBook(groups_per_step=2, max_staleness=2, num_spare=None, last_step=9)
    while book.may_begin():
        book.begin()
    assert len(book.groups) == 6  # of policy 0: for steps 1, 2 and 3, of which the last makes policy 3 out of policy 2
    for number in range(6):
        book.end(number)
    book.take(1, [0, 1])
    assert not book.may_begin()  # still policy 0
    book.version = 1
    assert book.may_begin()
    assert [book.begin(), book.begin()] == [6, 7]
    assert not book.may_begin()


def test_the_first_that_end_are_taken_unless_others_would_get_too_old():
    book = GroupBook(groups_per_step=2, max_staleness=1, num_spare=2, last_step=9)
    for _ in range(4):
        book.begin()
    book.end(3)
    book.end(2)
    assert book.choose(1, 2) == [2, 3]  # the slow ones can still wait for step 2
    book.take(1, [2, 3])
    book.version = 1
    assert [book.begin(), book.begin(), book.may_begin()] == [4, 5, False]
    book.end(4)
    book.end(5)
    assert book.choose(2, 2) is None  # 0 and 1 are of policy 0: this is the last step for them
    book.end(0)
    book.end(1)
    assert book.choose(2, 2) == [0, 1]


def test_a_step_whose_budget_is_spent_takes_what_has_ended_and_waits_for_the_first():
    book = GroupBook(groups_per_step=3, max_staleness=1, num_spare=0, last_step=9)
    for _ in range(3):
        book.begin()
    assert book.choose(1, 3, may_be_fewer=True) is None
    book.end(1)
    assert book.choose(1, 3) is None
    assert book.choose(1, 3, may_be_fewer=True) == [1]


def test_nothing_begins_that_no_step_would_take():
    book = GroupBook(groups_per_step=2, max_staleness=5, num_spare=None, last_step=2)
    while book.may_begin():
        book.begin()
    assert len(book.groups) == 4
    for number in range(4):
        book.end(number)
    book.take(1, [0, 1])
    book.take(2, [2, 3])
    assert not book.may_begin()
    assert [book.may_begin(num_wanted=1), book.begin(), book.may_begin(num_wanted=1)] == [True, 4, False]
    book.end(4)
    assert book.choose(2, 1) == [4]  # of a further round of the last step


@dataclass
class Trainer:
    """Trains with a book whose groups end as `draw` says. The policy comes late now and then, as in flight."""

    book: GroupBook
    draw: st.DataObject
    taken: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def sample(self) -> None:
        """One event of the engine: a group ends, or as many begin as may."""
        while self.book.may_begin():
            self.book.begin()
            self.book.check_integrity()
        running = [number for number, group in self.book.groups.items() if group.place is None]
        assert running, "a step waits, and nothing is on its way"
        self.book.end(self.draw.draw(st.sampled_from(running)))

    def step(self, step: int, has_budget: bool) -> None:
        numbers = None
        while numbers is None:
            is_spent = has_budget and self.draw.draw(st.booleans())
            numbers = self.book.choose(step, self.book.groups_per_step, may_be_fewer=is_spent)
            if numbers is None:
                self.sample()
        assert len(numbers) <= self.book.groups_per_step
        assert has_budget or len(numbers) == self.book.groups_per_step
        self.staleness += [step - 1 - group.version for group in self.book.take(step, numbers)]
        self.book.check_integrity()
        self.taken += numbers


@given(st.data())
def test_no_group_gets_too_old_and_none_is_lost_or_taken_twice(data: st.DataObject):
    bound = data.draw(st.integers(0, 3))
    spare = data.draw(st.one_of(st.none(), st.integers(0, 5)))
    last_step, per_step = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    has_budget, samples_meanwhile = data.draw(st.booleans()), data.draw(st.booleans())
    book = GroupBook(per_step, bound, spare, last_step)
    trainer = Trainer(book, data)
    for step in range(1, last_step + 1):
        trainer.step(step, has_budget)
        for _ in range(data.draw(st.integers(0, 4)) if samples_meanwhile else 0):  # while the trainer learns
            if book.may_begin() or any(group.place is None for group in book.groups.values()):
                trainer.sample()
        book.version = step
        book.check_integrity()
    assert max(trainer.staleness) <= bound
    assert sorted(trainer.taken) == list(range(book.num_begun))
    assert not book.groups
    assert has_budget or len(trainer.taken) == per_step * last_step


@given(st.data())
def test_further_rounds_of_a_step_leave_the_bound_as_it_is(data: st.DataObject):
    bound, per_step = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    book = GroupBook(per_step, bound, None, 6)
    trainer = Trainer(book, data)
    for step in range(1, 7):
        trainer.step(step, has_budget=False)
        wanted = data.draw(st.integers(0, 3))
        numbers = book.choose(step, wanted) if wanted else []
        while numbers is None:
            while book.may_begin(wanted):
                book.begin()
            running = [number for number, group in book.groups.items() if group.place is None]
            assert running
            book.end(data.draw(st.sampled_from(running)))
            numbers = book.choose(step, wanted)
        assert len(numbers) == wanted
        trainer.staleness += [step - 1 - group.version for group in book.take(step, numbers)]
        trainer.taken += numbers
        book.version = step
        book.check_integrity()
    assert max(trainer.staleness) <= bound
    assert sorted(trainer.taken) == list(range(book.num_begun))
