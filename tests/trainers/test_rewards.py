"""Answer rewards, and what is asked of reward functions."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_trainers.rewards import completion_text, exact_answer_reward, final_number_reward, reward_names, score
from rollout_trainers.rewards.answers import final_number
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "reward 'bad' returned 1 values for 2 completions"),
        ([1.0, float("nan")], "reward 'bad' returned nan for completion 1: 'two'"),
    ],
)
def test_a_reward_that_returns_something_else_is_named(values: list[float], message: str):
    def bad(prompts, completions, **columns):
        return values

    with pytest.raises(ValueError, match="reward 'bad'") as raised:
        score([make_sample([1], [2], text="one"), make_sample([1], [2], text="two")], [bad])
    assert message in str(raised.value)
