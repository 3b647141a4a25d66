"""Built-in tasks that a recipe can name: examples made from the recipe's parameters, and the rewards that fit them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout_trainers.config import TaskSection
from rollout_trainers.data import Columns, Examples, open_rows
from rollout_trainers.producer import derive_seed
from rollout_trainers.recipe_errors import unknown_name
from rollout_trainers.rewards import completion_text, exact_answer_reward, final_number_reward, math_verify_reward
from rollout_trainers.types import Example, RewardFunction, Task

ANSWER_REWARDS: dict[str, RewardFunction] = {
    "final_number": final_number_reward,
    "exact_answer": exact_answer_reward,
    "math_verify": math_verify_reward,
}


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


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
    """A dataset of reasoning-gym: `parameters` are `dataset`, `reward` (a key of `ANSWER_REWARDS`, or "dataset": the
    data set's own verdict, which knows all right answers), and the dataset's.

    Questions are drawn once and kept once; the first distinct ones are held out for evaluation, so no evaluation
    question is ever trained on. Raises `ValueError` if the dataset has too few distinct questions.
    """
    import reasoning_gym  # an optional part: only recipes that name it need it

    parameters = dict(section.parameters)
    dataset_name = parameters.pop("dataset", None)
    reward = parameters.pop("reward", "exact_answer")
    if reward not in (*ANSWER_REWARDS, "dataset"):
        raise ValueError(unknown_name("task.parameters.reward", reward, (*ANSWER_REWARDS, "dataset")))
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
        question, columns = entry["question"], {"answer": entry["answer"]}
        if reward == "dataset":
            columns["entry"] = entry
        examples.setdefault(question, chat_example(question, section.system_prompt, columns))
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
        rewards=(dataset_reward(drawn) if reward == "dataset" else ANSWER_REWARDS[reward],),
    )


def dataset_reward(dataset: Any) -> RewardFunction:
    """The score from 0 to 1 that a data set of reasoning-gym gives to what stands in the last `<answer>` of a
    completion, or to all of it where there is none. It reads the column `entry`."""

    def dataset_reward(
        prompts: Sequence[Any], completions: Sequence[Any], entry: Sequence[dict[str, Any]], **columns: Any
    ) -> list[float]:
        texts = map(completion_text, completions)
        return [
            float(dataset.score_answer(answer=_last_answer(text), entry=each))
            for text, each in zip(texts, entry, strict=True)
        ]

    return dataset_reward


def _last_answer(text: str) -> str:
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def dataset_task(section: TaskSection) -> Task:
    """Examples of a file or data set. `parameters`: `source` (see `data.open_rows`), `split`, `subset`, `prompt`,
    `chat`, `rename` (see `data.Columns`), `reward` (a key of `ANSWER_REWARDS`), and `evaluation_source` and
    `evaluation_split`, from where the examples for evaluation come; without them they are held out. `evaluation_sets`
    are further sets of at most `task.eval_size` examples: by the name of each its `source`, `split` and `subset`.

    Every prompt is there once, and none of those for evaluation is trained on. Which examples of how many are taken, in
    which order, is a pure function of `task.seed`. Raises `ValueError` for unknown parameters and too few examples.
    """
    parameters = {"split": "train", "subset": None, "prompt": "prompt", "chat": True, "rename": {}} | dict(
        section.parameters
    )
    held_out = ("evaluation_source", "evaluation_split", "evaluation_sets")
    known = ("source", "reward", *held_out, "split", "subset", "prompt", "chat", "rename")
    for name in parameters:
        if name not in known:
            raise ValueError(unknown_name("task.parameters", name, known))
    source, reward = parameters.get("source"), parameters.get("reward", "exact_answer")
    if not isinstance(source, str) or not source:
        raise ValueError(f"task.parameters.source={source!r} is not valid: it must be a file or the name of a data set")
    if reward not in ANSWER_REWARDS:
        raise ValueError(unknown_name("task.parameters.reward", reward, ANSWER_REWARDS))
    rename = parameters["rename"]
    if not isinstance(rename, Mapping) or not all(isinstance(name, str) for pair in rename.items() for name in pair):
        raise ValueError(
            f"task.parameters.rename={rename!r} is not valid: it must be new names by the columns' own, e.g. "
            "{solution: answer}"
        )
    columns = Columns(parameters["prompt"], parameters["chat"], section.system_prompt, rename)
    examples = Examples(open_rows(source, parameters["split"], parameters["subset"]), columns).distinct()
    evaluation, train_from = None, 0
    if "evaluation_source" in parameters or "evaluation_split" in parameters:
        other = parameters.get("evaluation_source", source), parameters.get("evaluation_split", "test")
        rows = open_rows(*other, parameters["subset"] if other[0] == source else None)
        evaluation = _shuffled(Examples(rows, columns).distinct(), section, "evaluation")[: section.eval_size]
        examples = examples.distinct(other_than=evaluation)
    further = {}
    for name, place in _evaluation_sets(parameters.get("evaluation_sets", {})).items():
        rows = open_rows(place["source"], place.get("split", "test"), place.get("subset"))
        further[name] = _shuffled(Examples(rows, columns).distinct(), section, "evaluation")[: section.eval_size]
        examples = examples.distinct(other_than=further[name])
    examples = _shuffled(examples, section, "examples")
    if evaluation is None:
        evaluation, train_from = examples[: section.eval_size], section.eval_size
    train = examples[train_from : train_from + section.train_size]
    for name, needed, found in (
        ("eval_size", section.eval_size, len(evaluation)),
        ("train_size", section.train_size, len(train)),
    ):
        if found < needed:
            raise ValueError(f"task.{name}={needed} is not valid: {source!r} has only {found} distinct prompts left")
    rewards = (ANSWER_REWARDS[reward],)
    return Task(f"dataset/{source}", train, evaluation, rewards, further_evaluations=further)


def _evaluation_sets(value: Any) -> Mapping[str, Mapping[str, Any]]:
    known = ("source", "split", "subset")
    if not isinstance(value, Mapping):
        raise ValueError(f"task.parameters.evaluation_sets={value!r} is not valid: it must be sets by name")
    for name, place in value.items():
        if not isinstance(place, Mapping) or not isinstance(place.get("source"), str):
            raise ValueError(f"task.parameters.evaluation_sets.{name}={place!r} is not valid: it must have a source")
        for key in place:
            if key not in known:
                raise ValueError(unknown_name(f"task.parameters.evaluation_sets.{name}", key, known))
    return value


def _shuffled(examples: Examples, section: TaskSection, purpose: str) -> Examples:
    order = np.random.default_rng(derive_seed(section.seed, "dataset", purpose)).permutation(len(examples))
    return examples.take(order.tolist())


TASKS: dict[str, Callable[[TaskSection], Task]] = {"dataset": dataset_task, "reasoning_gym": reasoning_gym_task}
