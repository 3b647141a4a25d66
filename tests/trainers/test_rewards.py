"""Answer rewards, and what is asked of reward functions."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import torch

from rollout_trainers.loss_config import LossSection
from rollout_trainers.metrics import sample_metrics
from rollout_trainers.rewards import (
    TrainerState,
    check_columns,
    completion_text,
    exact_answer_reward,
    final_number_reward,
    math_verify_reward,
    reward_names,
    score,
)
from rollout_trainers.rewards.answers import final_number
from rollout_trainers.types import EpisodeNotes
from tests.support.samples import make_sample


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 7.", "7"),
        ("4 + 5 = 9", "9"),
        ("6 - 10 = -4.", "-4"),
        ("it is 1,009", "1009"),
        ("it is −3", "-3"),
        ("3.50 exactly", "3.50"),
        ("no number", None),
        ("", None),
        ("7 or 8", "8"),
    ],
)
def test_the_final_number_of_a_text(text: str, expected: str | None):
    assert final_number(text) == expected


def test_answer_rewards_read_text_and_chat_completions():
    completions: list[Any] = ["so it is 5", [{"role": "assistant", "content": "5."}], "5 then 6"]
    assert final_number_reward([""] * 3, completions, answer=["5"] * 3) == [1.0, 1.0, 0.0]
    assert exact_answer_reward([""] * 3, completions, answer=["5"] * 3) == [0.0, 1.0, 0.0]


def test_a_reward_gets_prompts_completions_and_columns_for_every_sample():
    seen: dict[str, Any] = {}

    def reward(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [len(completion_text(completion)) for completion in completions]

    def half(prompts, completions, **columns):
        return [0.5] * len(prompts)

    chat = [{"role": "user", "content": "hi"}]
    samples = [
        make_sample([1], [2, 3], text="abc", prompt=chat, columns={"answer": "x", "only_here": 1}),
        make_sample([1], [4], text="de", columns={"answer": "y"}, finish_reason="length"),
    ]
    score(samples, [reward, half])
    assert seen["prompts"] == [chat, "question"]
    assert seen["completions"] == [[{"role": "assistant", "content": "abc"}], "de"]
    assert seen["answer"] == ["x", "y"]
    assert "only_here" not in seen
    assert seen["completion_ids"] == [[2, 3], [4]]
    assert seen["finish_reasons"] == ["stop", "length"]
    assert [sample.reward for sample in samples] == [3.5, 2.5]
    assert samples[0].rewards == {"reward": 3.0, "half": 0.5}


def test_a_reward_that_applies_to_no_sample_is_named():
    def absent(prompts, completions, **columns):
        return [None] * len(completions)

    def there(prompts, completions, **columns):
        return [1.0] * len(completions)

    samples = [make_sample([1], [2], text=text) for text in ("a", "b")]
    with pytest.warns(UserWarning, match="reward 'absent' gave None for all 2 samples"):
        score(samples, [absent, there])
    assert [sample.reward for sample in samples] == [1.0, 1.0]


def test_a_reward_may_not_apply_to_a_sample_and_then_has_no_part_in_it():
    def halves(prompts, completions, **columns):
        return [0.5, None, None]

    def lengths(prompts, completions, **columns):
        return [1.0, 2.0, None]

    samples = [make_sample([1], [2], text=text) for text in ("a", "b", "c")]
    with pytest.warns(UserWarning, match="no reward applies to 1 of 3 samples"):
        score(samples, [halves, lengths])
    assert [sample.rewards for sample in samples] == [{"halves": 0.5, "lengths": 1.0}, {"lengths": 2.0}, {}]
    assert [sample.reward for sample in samples] == [1.5, 2.0, 0.0]
    metrics = sample_metrics(samples, 3, LossSection())
    assert metrics["rewards/halves/mean"] == 0.5 and metrics["rewards/lengths/mean"] == 1.5


def test_async_rewards_run_at_once_also_where_a_loop_runs_already():
    waiting: list[str] = []
    both = asyncio.Event()

    def waits(name: str) -> Any:
        async def reward(prompts, completions, **columns):
            waiting.append(name)
            if len(waiting) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 10)
            return [float(len(text)) for text in completions]

        return reward

    class Judge:
        async def __call__(self, prompts, completions, **columns):
            return [0.25 for _ in prompts]

    def plain(prompts, completions, **columns):
        return [1.0 for _ in prompts]

    async def in_a_loop() -> None:
        score([sample], [waits("first"), plain, waits("second"), Judge()])

    sample = make_sample([1], [2], text="abc")
    asyncio.run(in_a_loop())
    assert sample.rewards == {"reward": 3.0, "plain": 1.0, "reward_2": 3.0, "Judge": 0.25}


def test_rewards_get_what_trl_gives_and_may_log():
    seen: dict[str, Any] = {}

    def reward(completions, trainer_state, log_extra, log_metric, **rest):  # as TRL: by name, in any order
        seen.update(rest)
        log_extra("length", [len(text) for text in completions])
        log_metric("accuracy", 0.25)
        log_metric("accuracy", 0.75)
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    samples = [make_sample([1], [2, 3], text="abc"), make_sample([1], [4], text="de")]
    assert score(samples, [reward], TrainerState(3, 4, 0.5)) == {"accuracy": [0.25, 0.75]}
    assert [sample.reward for sample in samples] == [0.75, 0.75]
    assert [sample.logged for sample in samples] == [{"length": 3}, {"length": 2}]
    assert seen == {"prompts": ["question"] * 2, "completion_ids": [[2, 3], [4]], "finish_reasons": ["stop"] * 2}

    def wrong(completions, log_extra, **rest):
        log_extra("length", [1])
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"log_extra\('length'\) got 1 values for 2 completions"):
        score(samples, [wrong])


def test_an_episode_is_rewarded_by_its_environment_and_by_functions_of_all_its_messages():
    messages = [
        {"role": "assistant", "content": "a call"},
        {"role": "tool", "content": "its result"},
        {"role": "assistant", "content": "the answer is 5"},
    ]
    sample = make_sample([1], [2], text="...", prompt=[{"role": "user", "content": "?"}], columns={"answer": "5"})
    world = object()
    sample.episode = EpisodeNotes(messages, [0.25, 0.5], [1, 1], world)
    seen: list[Any] = []

    def watching(prompts, completions, environments, **columns):
        seen.extend((completions, environments))
        return [None]

    score([sample], [final_number_reward, watching])
    assert sample.rewards == {"environment": 0.75, "final_number_reward": 1.0} and sample.reward == 1.75
    assert seen == [[messages], [world]]


@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward"])
def test_rewards_of_trl_run_unchanged(name: str):
    rewards = pytest.importorskip("trl.rewards")
    if name == "accuracy_reward":
        pytest.importorskip("math_verify")
    good = "<think>half</think>It is \\boxed{\\frac{1}{2}}"
    samples = [
        make_sample([1], [2], text=text, prompt=[{"role": "user", "content": "?"}], columns={"solution": "$0.5$"})
        for text in (good, "so <think> 2")
    ]
    score(samples, [getattr(rewards, name)])
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    if name == "accuracy_reward":
        assert samples[0].logged["solution"] == "$0.5$"


def test_mathematical_answers_are_compared_as_what_they_mean():
    pytest.importorskip("math_verify")
    pairs = [
        ("1/2", "so it is $0.5$", 1.0),
        ("$\\frac{1}{2}$", "\\boxed{\\frac{2}{4}}", 1.0),
        ("7", "the answer is 7.", 1.0),
        ("7", "the answer is 8.", 0.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        ("7", "", 0.0),
        ("$$", "7", None),
    ]
    answers, completions, expected = (list(part) for part in zip(*pairs, strict=True))
    assert math_verify_reward([""] * len(pairs), completions, answer=answers) == expected
    chats = [[{"role": "assistant", "content": text}] for text in completions]
    assert math_verify_reward([""] * len(pairs), chats, answer=answers) == expected


class LengthReward:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [self.scale * len(text) for text in completions]

    def method(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [0.25] * len(prompts)


def test_rewards_are_named_after_functions_and_classes_and_no_two_alike():
    one, ten = LengthReward(1.0), LengthReward(10.0)
    assert reward_names([one, final_number_reward, ten.method, ten]) == [
        "LengthReward",
        "final_number_reward",
        "method",
        "LengthReward_2",
    ]
    sample = make_sample([1], [2], text="ab")
    score([sample], [one, ten, ten.method])
    assert sample.rewards == {"LengthReward": 2.0, "LengthReward_2": 20.0, "method": 0.25}
    assert sample.reward == 22.25


FOR_TWO = "it must return a list of 2 values, one for each completion: a finite number, or None"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, f"reward 'bad' returned 0.5 for 2 completions: {FOR_TWO}"),
        (np.float64(0.5), f"reward 'bad' returned np.float64(0.5) for 2 completions: {FOR_TWO}"),
        (None, f"reward 'bad' returned None for 2 completions: {FOR_TWO}"),
        ("10", f"reward 'bad' returned '10' for 2 completions: {FOR_TWO}"),  # two characters
        ({0: 1.0, 1: 0.0}, f"reward 'bad' returned {{0: 1.0, 1: 0.0}} for 2 completions: {FOR_TWO}"),
        (torch.tensor(0.5), f"reward 'bad' returned an array of the shape (): {FOR_TWO}"),
        (np.ones((2, 1)), f"reward 'bad' returned an array of the shape (2, 1): {FOR_TWO}"),
        ([], f"reward 'bad' returned 0 values for 2 completions: {FOR_TWO}"),
        ([1.0], f"reward 'bad' returned 1 values for 2 completions: {FOR_TWO}"),
        ([1.0, "a"], "reward 'bad' returned 'a' for completion 1: 'two': it must be a finite number, or None where"),
        ([1.0, "1.0"], "reward 'bad' returned '1.0' for completion 1: 'two': it must be a finite number, or None"),
        ([[1.0], 1.0], "reward 'bad' returned [1.0] for completion 0: 'one': it must be a finite number, or None"),
        ([1.0, float("nan")], "reward 'bad' returned nan for completion 1: 'two': it must be a finite number"),
        ([float("-inf"), 1.0], "reward 'bad' returned -inf for completion 0: 'one': it must be a finite number"),
        (np.array([1j, 1j]), "reward 'bad' returned np.complex128(1j) for completion 0: 'one': it must be a finite"),
        ([torch.ones(2), 1.0], "reward 'bad' returned tensor([1., 1.]) for completion 0: 'one': it must be"),
    ],
)
def test_a_reward_that_returns_something_else_is_named(returned: Any, message: str):
    def bad(prompts, completions, **columns):
        return returned

    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        score([make_sample([1], [2], text="one"), make_sample([1], [2], text="two")], [bad])


@pytest.mark.parametrize(
    "returned", [np.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), (0.5, True), iter([np.float32(0.5), 1])]
)
def test_a_reward_may_return_any_row_of_numbers(returned: Any):
    def good(prompts, completions, **columns):
        return returned

    samples = [make_sample([1], [2]), make_sample([1], [2])]
    score(samples, [good])
    assert [sample.reward for sample in samples] == [0.5, 1.0]


def test_what_a_reward_raises_names_it_and_keeps_the_cause():
    def divides(prompts, completions, **columns):
        return [1 / len(text) for text in completions]

    async def asks(prompts, completions, **columns):
        raise ConnectionError("the judge has left")

    def selects(completions):
        return [1.0 for _ in completions]

    sample = make_sample([1], [2], text="")
    with pytest.raises(ValueError, match=r"^reward 'divides' raised ZeroDivisionError: division by zero$") as raised:
        score([sample], [divides])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(ValueError, match=r"^reward 'asks' raised ConnectionError: the judge has left$") as raised:
        score([sample], [asks])
    assert isinstance(raised.value.__cause__, ConnectionError)
    with pytest.raises(ValueError, match=r"reward 'selects' raised TypeError.*are called by name"):
        score([sample], [selects])
    with pytest.raises(ValueError, match=r"^reward 'selects' has no \*\*columns: it is called by name"):
        check_columns([selects], [sample.example], "training")


def test_an_async_reward_that_would_end_the_process_is_named_and_holds_nobody_up():
    async def leaves(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise SystemExit(3)

    with pytest.raises(ValueError, match="reward 'leaves' raised SystemExit: 3"):
        score([make_sample([1], [2])], [leaves])


def test_an_async_reward_that_is_cancelled_is_named():
    async def gives_up(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise asyncio.CancelledError

    with pytest.raises(ValueError, match="reward 'gives_up' raised CancelledError"):
        score([make_sample([1], [2])], [gives_up])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("judge/agreement", float("nan"), "metric 'judge/agreement' has the value nan: it must be a finite number"),
        ("loss", 1.0, "metric 'loss' is not valid: the trainer logs a metric of this name, choose another one"),
        (3, 1.0, "metric 3 is not valid: a metric's name must be text"),
    ],
)
def test_what_a_reward_cannot_log_is_named(name: Any, value: float, message: str):
    def logs(prompts: Any, completions: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric(name, value)
        return [1.0]

    with pytest.raises(ValueError, match=f"^reward 'logs' raised ValueError: {re.escape(message)}"):
        score([make_sample([1], [2])], [logs])


def test_a_generator_that_raises_is_named():
    def broken(prompts: Any, completions: Any, **columns: Any) -> Any:
        yield 1.0
        raise RuntimeError("no more")

    with pytest.raises(ValueError, match="reward 'broken' raised RuntimeError: no more"):
        score([make_sample([1], [2]), make_sample([1], [3])], [broken])


def test_what_a_reward_does_to_its_arguments_is_not_trained_on():
    sample = make_sample([5], [3, 1, 2], prompt=[{"role": "user", "content": "what"}])

    def careless(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        prompts[0].append({"role": "user", "content": "more"})
        completion_ids[0].sort()
        return [1.0]

    score([sample], [careless])
    assert list(sample.completion_token_ids) == [3, 1, 2]
    assert sample.example.prompt == [{"role": "user", "content": "what"}]
