"""Built-in tasks: distinct questions, held-out ones never trained on, mistakes named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_trainers.config import TaskSection
from rollout_trainers.producer import derive_seed, select_examples
from rollout_trainers.rewards import final_number_reward
from rollout_trainers.tasks import make_task
from rollout_trainers.types import Example

SUMS: dict[str, Any] = {"dataset": "chain_sum", "reward": "final_number", "min_terms": 2, "max_terms": 2}


def section(train_size: int = 40, eval_size: int = 20, **parameters: Any) -> TaskSection:
    return TaskSection("reasoning_gym", SUMS | parameters, "Be brief.", train_size, eval_size, seed=3)


def test_reasoning_gym_examples_are_distinct_and_held_out_ones_are_not_trained_on():
    task = make_task(section())
    questions = [example.prompt[-1]["content"] for example in [*task.train, *task.evaluation]]  # type: ignore[index]
    assert (len(task.train), len(task.evaluation)) == (40, 20)
    assert len(set(questions)) == 60
    assert task.train[0].prompt[0] == {"role": "system", "content": "Be brief."}
    assert task.rewards == (final_number_reward,)
    again = make_task(section())
    assert [example.columns for example in again.train] == [example.columns for example in task.train]


def test_the_answer_of_each_question_earns_the_reward():
    task = make_task(section())
    answers = [example.columns["answer"] for example in task.train]
    completions = [f"The answer is {answer}." for answer in answers]
    assert final_number_reward([""] * 40, completions, answer=answers) == [1.0] * 40


def test_a_data_set_of_reasoning_gym_judges_answers_itself_which_may_differ_from_the_one_that_it_gives():
    task = make_task(replace(section(), parameters={"dataset": "countdown", "reward": "dataset"}))
    (reward,) = task.rewards
    entries = [example.columns["entry"] for example in task.train]
    answers = [example.columns["answer"] for example in task.train]
    others = [f"it is <answer>({answer})</answer>, I think" for answer in answers]  # not the same text, and as right
    for texts in (answers, others):
        assert reward(prompts=[""] * 40, completions=texts, entry=entries) == [1.0] * 40
    assert max(reward(prompts=[""] * 40, completions=["no idea"] * 40, entry=entries)) < 1  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TaskSection("reasoning-gym"), "task.name: unknown name 'reasoning-gym'; did you mean 'reasoning_gym'?"),
        (
            section(dataset="chain_sums"),
            "task.parameters.dataset: unknown name 'chain_sums'; did you mean 'chain_sum'?",
        ),
        (section(min_term=2), "task.parameters: unknown name 'min_term'; did you mean 'min_terms'?"),
        (section(reward="final"), "task.parameters.reward: unknown name 'final'; did you mean 'final_number'?"),
        (section(size=3), "task.parameters: unknown name 'size'"),
        (section(train_size=900, min_digits=1, max_digits=1), "gave only"),
    ],
)
def test_mistakes_in_the_task_are_named(given: TaskSection, message: str):
    with pytest.raises(ValueError, match="task") as raised:
        make_task(given)
    assert message in str(raised.value)


def test_the_examples_of_a_step_are_a_function_of_seed_and_step_and_cover_all():
    examples = [Example(str(index)) for index in range(10)]
    steps = [select_examples(examples, step, 4, seed=1) for step in range(1, 6)]
    first_two_epochs = [example.prompt for step in steps for example in step]
    assert sorted(first_two_epochs[:10]) == sorted(first_two_epochs[10:]) == sorted(str(i) for i in range(10))
    assert first_two_epochs[:10] != first_two_epochs[10:]
    assert select_examples(examples, 4, 4, seed=1) == steps[3]
    assert select_examples(examples, 4, 4, seed=2) != steps[3]


def test_derived_seeds_differ_by_every_part_and_fit_the_engine():
    seeds = {derive_seed(*parts) for parts in [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, "a1")]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "rollout", 1, 0) == derive_seed(0, "rollout", 1, 0)
