"""Environments whose answers are the results of tools: plain functions that the policy calls by name."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.utils.chat_template_utils import get_json_schema

from rollout_trainers.environments.environment import Action, Environment, Observation, StepResult
from rollout_trainers.event_loop import guarded, run_in_thread
from rollout_trainers.types import Example

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)

INSTRUCTIONS = (
    "You can call tools. To call one, write its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "the name", "arguments": {}}\n</tool_call>\n'
    "The results come with the next message. The tools are:\n"
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and arguments; `error` says why what the policy wrote is no call."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a text, each JSON between `<tool_call>` and `</tool_call>`, as Hermes and Qwen models write them."""
    return [_parse_call(part) for part in _CALL.findall(text)]


def _parse_call(text: str) -> ToolCall:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return ToolCall("", error=f"the call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='a call must be {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error="arguments must be a JSON object")
    return ToolCall(value["name"], arguments)


class ToolEnvironment(Environment):
    """Answers tool calls with their results, until a turn calls no tool: that is the policy's answer.

    A tool is a function, or a coroutine function, with type hints and a docstring with an `Args:` section, from which
    its schema is made (`transformers.utils.get_json_schema`). Blocking functions run in threads of their own. Each
    result, made text (JSON, where it is none), comes as a message of the role "tool"; the calls of one turn run at
    once.

    What a tool raises, one that takes more than `tool_timeout` seconds, and a call that is none are told to the policy
    as "error: ..."; with `on_error="end"` they end the episode. The rewards are up to the task's reward functions, or
    to a subclass with a `reward` of its own. `metrics`: "tools/calls" and "tools/failures".
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        *,
        tool_timeout: float | None = 10.0,
        on_error: Literal["tell", "end"] = "tell",
        tools_in_template: bool = False,
        parse: Callable[[str], list[ToolCall]] = parse_tool_calls,
        instructions: str = INSTRUCTIONS,
    ) -> None:
        """With `tools_in_template` the chat template is given the tools' schemas, for models that were trained so;
        else `instructions` and the schemas stand in the system message. `instructions=""` tells nothing of them.

        Raises `ValueError` for tools without hints and docstring, or two of one name.
        """
        super().__init__()
        if on_error not in ("tell", "end"):
            raise ValueError(f"on_error={on_error!r} is not valid: it must be 'tell' or 'end'")
        self.metrics = {"tools/calls": 0.0, "tools/failures": 0.0}
        self._functions = {function.__name__: function for function in tools}
        if len(self._functions) != len(tools):
            raise ValueError(f"two tools have one name: {[function.__name__ for function in tools]}")
        self._tool_timeout = tool_timeout
        self._on_error = on_error
        self._parse = parse
        self._instructions = instructions
        self._schemas = [_schema(function) for function in tools] if tools_in_template or instructions else []
        self.tools = self._schemas if tools_in_template else None

    async def reset(self, example: Example) -> Observation:
        return self.messages_of(example)

    def messages_of(self, example: Example) -> list[dict[str, Any]]:
        """The example's prompt, which must be messages, with the tools in its system message."""
        self.example = example
        prompt = example.prompt
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], dict):
            raise ValueError(f"the prompt {prompt!r} is not valid with tools: it must be messages")
        messages: list[dict[str, Any]] = [dict(message) for message in prompt if isinstance(message, dict)]
        if self.tools is not None or not self._instructions:
            return messages
        text = self._instructions + "\n".join(json.dumps(schema["function"]) for schema in self._schemas)
        if messages[0]["role"] == "system":
            messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
        else:
            messages.insert(0, {"role": "system", "content": text})
        return messages

    async def step(self, action: Action) -> StepResult:
        calls = self._parse(action.text)
        if not calls:
            return StepResult("", self.reward(action), done=True)
        results = await asyncio.gather(*map(self._call, calls))
        return StepResult([{"role": "tool", "content": result} for result in results])

    def reward(self, action: Action) -> float:
        """What the answer `action` is worth, beside the task's reward functions; the example is `self.example`."""
        return 0.0

    async def _call(self, call: ToolCall) -> str:
        self.metrics["tools/calls"] += 1
        error = call.error
        if error is None and call.name not in self._functions:
            error = f"there is no tool {call.name!r}, only {', '.join(map(repr, self._functions))}"
        if error is None:
            try:
                return _as_text(await asyncio.wait_for(guarded(self._result(call)), self._tool_timeout))
            except TimeoutError:
                error = f"{call.name} took more than {self._tool_timeout} s"
            except Exception as raised:  # noqa: BLE001 - whatever a tool raises is its answer
                error = f"{type(raised).__name__}: {raised}"
        self.metrics["tools/failures"] += 1
        if self._on_error == "end":
            raise RuntimeError(error)
        return f"error: {error}"

    async def _result(self, call: ToolCall) -> Any:
        function = self._functions[call.name]
        if inspect.iscoroutinefunction(function):
            return await function(**call.arguments)
        return await run_in_thread(function, **call.arguments)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ValueError(f"tool {function.__name__!r} cannot be described: {error}") from error


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
