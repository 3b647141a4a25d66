"""A recipe of several turns: products of two numbers, with a calculator to be called.

rollout train recipes/tool_use.py steps=20
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

from rollout_trainers.environments import Action, Observation, StepResult, ToolCall, ToolEnvironment
from rollout_trainers.recipe import config_from_values
from rollout_trainers.rewards import final_number_reward
from rollout_trainers.run import run
from rollout_trainers.types import Example

VALUES: dict[str, Any] = {
    "name": "tool_use",
    "model": "smollm2-135m-instruct",
    "output_dir": "runs/tool_use",
    "steps": 60,
    "task": {
        "name": "reasoning_gym",
        "parameters": {"dataset": "products", "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
        "system_prompt": (
            "You have a calculator. To use it, answer with an expression between <calc> and </calc>. You are then told "
            "its value. Answer with this value."
        ),
        "train_size": 200,
        "eval_size": 100,
    },
    "environment": {"max_turns": 3},
    "sampling": {"max_tokens": 32},
    "optimizer": {"learning_rate": 3e-5, "warmup_steps": 3},
    "engine": {"max_model_len": 512, "kv_cache_memory": "256 MiB"},
}

REMINDER = "Use the calculator first: write only the expression, between <calc> and </calc>."
WORKED_EXAMPLE = [
    {
        "role": "user",
        "content": "Solve the following multiplication: 12 * 34. Give only the result as your final answer.",
    },
    {"role": "assistant", "content": "<calc>12 * 34</calc>"},
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "408"},
]
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """
    Computes an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    if len(expression) > 100:
        raise ValueError("the expression is too long")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError("only numbers, + - * / and parentheses can be computed")


def parse(text: str) -> list[ToolCall]:
    """The calls of the calculator in a text."""
    return [ToolCall("calculate", {"expression": expression}) for expression in _CALL.findall(text)]


class Calculator(ToolEnvironment):
    """Shows how it is done, and reminds of the calculator, once, a policy that answers without it. A first call that
    has a value earns a little, so that there is something to learn before the first right answer."""

    def __init__(self) -> None:
        super().__init__([calculate], parse=parse, instructions="")
        self.was_reminded = False

    async def reset(self, example: Example) -> Observation:
        system, question = self.messages_of(example)
        return [system, *WORKED_EXAMPLE, question]

    async def step(self, action: Action) -> StepResult:
        calls_before = self.metrics["tools/calls"]
        if calls_before == 0 and not self.was_reminded and not parse(action.text):
            self.was_reminded = True
            return StepResult(REMINDER)
        result = await super().step(action)
        is_first_value = calls_before == 0 < self.metrics["tools/calls"] > self.metrics["tools/failures"]
        return result._replace(reward=result.reward + 0.2 * is_first_value)


if __name__ == "__main__":
    run(config_from_values(VALUES, sys.argv[1:]), reward_functions=[final_number_reward], environment=Calculator)
