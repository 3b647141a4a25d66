"""Built-in tasks that a recipe can name: examples made from the recipe's parameters, and the rewards that fit them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rollout_trainers.config import TaskSection
from rollout_trainers.recipe_errors import unknown_name
from rollout_trainers.rewards import exact_answer_reward, final_number_reward
from rollout_trainers.types import Example, RewardFunction, Task

ANSWER_REWARDS: dict[str, RewardFunction] = {
    "final_number": final_number_reward,
    "exact_answer": exact_answer_reward,
}


def make_task(section: TaskSection) -> Task:
    """The task that a recipe names. Raises `ValueError` for an unknown name, reward or parameter."""
    if section.name not in TASKS:
        raise ValueError(unknown_name("task.name", section.name, TASKS))
    return TASKS[section.name](section)


def chat_example(question: str, system_prompt: str | None, columns: dict[str, Any]) -> Example:
    """An example whose prompt is one user message, behind a system message where there is one."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return Example([*messages, {"role": "user", "content": question}], columns)


def reasoning_gym_task(section: TaskSection) -> Task:
    """A dataset of reasoning-gym: `parameters` are `dataset`, `reward` (a key of `ANSWER_REWARDS`), and the dataset's.

    Questions are drawn once and kept once; the first distinct ones are held out for evaluation, so no evaluation
    question is ever trained on. Raises `ValueError` if the dataset has too few distinct questions.
    """
    import reasoning_gym  # an optional part: only recipes that name it need it

    parameters = dict(section.parameters)
    dataset_name = parameters.pop("dataset", None)
    reward = parameters.pop("reward", "exact_answer")
    if reward not in ANSWER_REWARDS:
        raise ValueError(unknown_name("task.parameters.reward", reward, ANSWER_REWARDS))
    known = reasoning_gym.factory.DATASETS
    if dataset_name not in known:
        raise ValueError(unknown_name("task.parameters.dataset", dataset_name, known))
    accepted = set(inspect.signature(known[dataset_name][1]).parameters)
    for name in parameters:
        if name not in accepted - {"seed", "size"}:
            raise ValueError(unknown_name("task.parameters", name, accepted - {"seed", "size"}))
    needed = section.train_size + section.eval_size
    drawn = reasoning_gym.create_dataset(dataset_name, seed=section.seed, size=8 * needed, **parameters)
    examples: dict[str, Example] = {}
    for entry in drawn:
        if len(examples) == needed:
            break
        question = entry["question"]
        examples.setdefault(question, chat_example(question, section.system_prompt, {"answer": entry["answer"]}))
    if len(examples) < needed:
        raise ValueError(
            f"task.train_size + task.eval_size = {needed} is not valid: {dataset_name!r} gave only {len(examples)} "
            "distinct questions with these parameters"
        )
    distinct = list(examples.values())
    return Task(
        name=f"reasoning_gym/{dataset_name}",
        train=distinct[section.eval_size :],
        evaluation=distinct[: section.eval_size],
        rewards=(ANSWER_REWARDS[reward],),
    )


TASKS: dict[str, Callable[[TaskSection], Task]] = {"reasoning_gym": reasoning_gym_task}
