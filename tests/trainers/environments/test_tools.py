"""Tools: calls are parsed, run at once, answered; what they do wrong is told to the policy, or ends the episode."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollout_trainers.environments import Action, StepResult, ToolCall, ToolEnvironment, parse_tool_calls
from rollout_trainers.types import Example

QUESTION = Example([{"role": "user", "content": "2 + 3?"}], {"answer": "5"})


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow_sum(numbers: list[float]) -> dict[str, float]:
    """
    Sums numbers, slowly.

    Args:
        numbers: What to sum.
    """
    await asyncio.sleep(0.05)
    return {"sum": sum(numbers)}


def divide(a: float, b: float) -> str:
    """
    Divides.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return f"{a / b:g}"


def leave() -> str:
    """
    Ends the program.
    """
    raise SystemExit(1)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(environment: ToolEnvironment, *texts: str) -> list[StepResult]:
    """What the environment answers to turns with these texts."""

    async def run() -> list[StepResult]:
        await environment.reset(QUESTION)
        return [await environment.step(Action(text, [5], "stop")) for text in texts]

    return asyncio.run(run())


def contents(result: StepResult) -> list[str]:
    assert not isinstance(result.observation, str)
    return [message["content"] for message in result.observation]  # type: ignore[index]


def test_calls_are_found_in_a_text_and_what_is_no_call_says_why() -> None:
    text = f"Let me see. {call('add', a=1, b=2)} and {call('divide', a=1, b=2)}"
    assert parse_tool_calls(text) == [ToolCall("add", {"a": 1, "b": 2}), ToolCall("divide", {"a": 1, "b": 2})]
    assert parse_tool_calls("no call, <b>really</b>") == []
    assert parse_tool_calls('<tool_call>{"name": "leave"}') == [ToolCall("leave")]  # the end was cut off
    bad = ["{", "[1]", '{"name": 3}', '{"name": "add", "arguments": [1]}']
    assert all(parse_tool_calls(f"<tool_call>{part}</tool_call>")[0].error for part in bad)


def test_results_come_as_messages_of_the_tools_and_a_turn_without_calls_is_the_answer() -> None:
    environment = ToolEnvironment([add, slow_sum, divide])
    first, second, last = play(
        environment, call("add", a=2, b=3) + call("slow_sum", numbers=[1, 2]), call("divide", a=1, b=4), "It is 5."
    )
    assert first.observation == [{"role": "tool", "content": "5"}, {"role": "tool", "content": '{"sum": 3}'}]
    assert not first.done and contents(second) == ["0.25"]
    assert last.done and last.reward == 0.0
    assert environment.metrics == {"tools/calls": 3.0, "tools/failures": 0.0}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("divide", a=1, b=0), "error: ZeroDivisionError"),
        (call("add", a=1), "error: TypeError: add() missing 1 required positional argument: 'b'"),
        (call("multiply", a=1), "error: there is no tool 'multiply', only 'add', 'divide', 'leave'"),
        (call("leave"), "error: RuntimeError: it raised SystemExit(1)"),
        ("<tool_call>{</tool_call>", "error: the call is not valid JSON"),
    ],
)
def test_a_tool_that_fails_is_told_to_the_policy_or_ends_the_episode(text: str, error: str) -> None:
    environment = ToolEnvironment([add, divide, leave])
    (result,) = play(environment, text)
    assert contents(result)[0].startswith(error) and not result.done
    assert environment.metrics == {"tools/calls": 1.0, "tools/failures": 1.0}
    with pytest.raises(RuntimeError) as raised:
        play(ToolEnvironment([add, divide, leave], on_error="end"), text)
    assert str(raised.value).startswith(error.removeprefix("error: "))


def test_tools_run_at_once_and_one_that_hangs_holds_up_nobody() -> None:
    release = threading.Event()

    def hang() -> str:
        """
        Never returns.
        """
        release.wait(30)
        return "late"

    environment = ToolEnvironment([hang, add], tool_timeout=0.2)
    started = time.monotonic()
    try:
        (result,) = play(environment, call("hang") + call("add", a=1, b=1) + call("hang"))
        assert contents(result) == ["error: hang took more than 0.2 s", "2", "error: hang took more than 0.2 s"]
        assert time.monotonic() - started < 20  # far from the 30 s that it would have waited
    finally:
        release.set()


def test_the_tools_are_told_in_the_system_message_or_given_to_the_template() -> None:
    async def begin(environment: ToolEnvironment, example: Example) -> Any:
        return await environment.reset(example)

    told = asyncio.run(begin(ToolEnvironment([add]), QUESTION))
    assert [message["role"] for message in told] == ["system", "user"]
    assert '"name": "add"' in told[0]["content"] and "<tool_call>" in told[0]["content"]
    with_system = Example([{"role": "system", "content": "Be brief."}, *QUESTION.prompt], {})  # type: ignore[misc]
    joined = asyncio.run(begin(ToolEnvironment([add]), with_system))
    assert len(joined) == 2 and joined[0]["content"].startswith("Be brief.\n\n") and "add" in joined[0]["content"]
    assert with_system.prompt[0]["content"] == "Be brief."  # type: ignore[index] - the example stays as it is

    environment = ToolEnvironment([add], tools_in_template=True)
    assert asyncio.run(begin(environment, QUESTION)) == QUESTION.prompt
    assert environment.tools is not None and environment.tools[0]["function"]["name"] == "add"
    with pytest.raises(ValueError, match="with tools: it must be messages"):
        asyncio.run(begin(ToolEnvironment([add]), Example("text")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolEnvironment([lambda: 3]), "'<lambda>' cannot be described"),
        (lambda: ToolEnvironment([add, add]), "two tools have one name"),
        (lambda: ToolEnvironment([add], on_error="raise"), "on_error='raise' is not valid"),  # type: ignore[arg-type]
    ],
)
def test_tools_that_cannot_be_used_are_refused(make: Callable[[], ToolEnvironment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
