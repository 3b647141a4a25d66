"""The parts of `SamplingParams` that have fields of their own, each checked at construction."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


class RequestOutputKind(enum.IntEnum):
    """What `LLM.stream` yields: all of a sample so far, only what is new, or nothing before its end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends a sample with finish reason "repetition" once its last tokens are one pattern, `min_count` times in a row.

    Patterns have from `min_pattern_size` (0 means 1) to `max_pattern_size` tokens; `max_pattern_size=0` is off.
    Raises `ValueError` naming the field, the value and the valid range.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"repetition_detection.{field.name}={value!r} is not valid: it must be 0 or more")
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection.min_pattern_size={self.min_pattern_size} is not valid: it must be at most "
                f"max_pattern_size ({self.max_pattern_size})"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(
                f"repetition_detection.min_count={self.min_count} is not valid: it must be at least 2 where "
                "max_pattern_size is above 0"
            )


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A form that the output must have; exactly one of the first five fields is set.

    `json`: a JSON schema, as text or as a dict. `regex`: the whole output matches. `choice`: it is one of these texts.
    `grammar`: a context-free grammar, in Lark's notation or GBNF (`root ::= …`). `json_object=True`: any JSON object.
    `disable_any_whitespace` and `whitespace_pattern` (a regular expression) say what may stand between the parts of
    JSON; by default a space, or a new line with its indentation. `disable_additional_properties` closes the objects of
    a schema that name properties and do not say whether there may be others. Raises `ValueError` naming the field.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, Sequence) and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))
        kinds = {name: getattr(self, name) for name in ("json", "regex", "choice", "grammar", "json_object")}
        given = [name for name, value in kinds.items() if value is not None and value is not False]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs with {', '.join(given) or 'nothing'} is not valid: exactly one of "
                f"{', '.join(kinds)} must be set"
            )
        if self.json is not None and not isinstance(self.json, (str, dict)):
            raise ValueError(f"structured_outputs.json={self.json!r} is not valid: it must be a schema, text or dict")
        if isinstance(self.json, str):
            try:
                json.loads(self.json)
            except ValueError as error:
                raise ValueError(
                    f"structured_outputs.json={self.json!r} is not valid: it is no JSON: {error}"
                ) from error
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name}={value!r} is not valid: it must be text, not empty")
        if self.choice is not None:
            texts_only = isinstance(self.choice, tuple) and all(isinstance(text, str) for text in self.choice)
            if not texts_only or not self.choice or not all(self.choice):
                raise ValueError(f"structured_outputs.choice={self.choice!r} is not valid: a list of texts, none empty")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name) or False, bool):
                raise ValueError(f"structured_outputs.{name}={getattr(self, name)!r} is not valid: True or False")
        (kind,) = given
        options = {"disable_any_whitespace": ("json", "json_object"), "whitespace_pattern": ("json", "json_object")}
        for name, kinds_with in (options | {"disable_additional_properties": ("json",)}).items():
            if getattr(self, name) and kind not in kinds_with:
                raise ValueError(
                    f"structured_outputs.{name}={getattr(self, name)!r} is not used with {kind}: leave it out"
                )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError(
                f"structured_outputs.whitespace_pattern={self.whitespace_pattern!r} is not used with "
                "disable_any_whitespace=True: leave one of them out"
            )
