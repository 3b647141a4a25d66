"""From `StructuredOutputsParams` to a grammar in llguidance's notation, with what is wrong named by its field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from llguidance import LLMatcher, grammar_from, regex_to_lark

from rollout.sampling_options import StructuredOutputsParams

# Between the parts of JSON: nothing, a space, or a new line with its indentation. Unbounded white space is legal JSON
# too, and a model that begins to write it often goes on until `max_tokens`.
BOUNDED_WHITESPACE = r"( |\n {0,20}|\n\t{0,5})?"

# Where only one text can come next, llguidance would allow it in one tokenisation alone. With this every token that
# begins what may come is allowed, so that a draw is from the model's own distribution over such tokens.
_EVERY_TOKENISATION = '\n%llguidance {"no_forcing": true}\n'
_QUOTED_LINES = re.compile(r"\n +\d+ \|")  # of the grammar, in llguidance's messages
_GBNF_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
# JSON schema's keywords that hold schemas: under names of the user's, in a list, and by themselves.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar, as `LLMatcher` takes it; equal parameters give equal text. It is not compiled here.

    Raises `ValueError` naming the field for what cannot be put into this notation.
    """
    if params.json_object:
        return _json_grammar({"type": "object"}, params)
    if params.json is not None:
        return _json_grammar(_schema(params), params)
    if params.regex is not None:
        return _regex_grammar(params.regex)
    if params.choice is not None:
        # One regular expression for all of them: where one text is the beginning of another, both stay possible.
        return _regex_grammar("|".join(map(_literal, params.choice)))
    assert params.grammar is not None
    return _context_free(params.grammar, params)


def kind_of(params: StructuredOutputsParams) -> str:
    """The name of the field that says the form."""
    kinds = ("json", "regex", "choice", "grammar")
    return next((kind for kind in kinds if getattr(params, kind) is not None), "json_object")


def fail(params: StructuredOutputsParams, reason: str, field: str | None = None) -> NoReturn:
    """Raises `ValueError` for the field, by default that which says the form."""
    field = field or kind_of(params)
    text = repr(getattr(params, field))
    shown = text if len(text) <= 200 else text[:200] + "…"
    reason = _QUOTED_LINES.split(reason.strip())[0]
    raise ValueError(f"structured_outputs.{field}={shown} is not valid: {reason}")


def _schema(params: StructuredOutputsParams) -> dict[str, Any] | bool:
    """The user's JSON schema as a new value."""
    given = params.json
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (ValueError, TypeError, RecursionError) as error:
        fail(params, f"it must be a JSON schema, and is no JSON ({error})")
    if not isinstance(schema, (dict, bool)):
        fail(params, "it must be a JSON schema, which is an object")
    return schema


def _json_grammar(schema: dict[str, Any] | bool, params: StructuredOutputsParams) -> str:
    if params.disable_additional_properties:
        _close_objects(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        fail(params, f"x-guidance={own!r} is no object")
    options: dict[str, Any] = {"whitespace_pattern": BOUNDED_WHITESPACE} | own
    if params.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "whitespace_pattern": ""}
    elif params.whitespace_pattern is not None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(_regex_grammar(params.whitespace_pattern))
        if is_error:
            fail(params, messages[0], "whitespace_pattern")
        options["whitespace_pattern"] = params.whitespace_pattern
    return _lark_grammar("start: %json " + json.dumps(schema | {"x-guidance": options}))


def _close_objects(schema: object) -> None:
    """Objects whose schema names properties, and says nothing of others, get no others."""
    if not isinstance(schema, dict):
        return
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    for keyword in _NAMED_SCHEMAS:
        named = schema.get(keyword)
        for part in named.values() if isinstance(named, Mapping) else ():
            _close_objects(part)
    for keyword in _LISTED_SCHEMAS:
        listed = schema.get(keyword)
        for part in listed if isinstance(listed, list) else ():
            _close_objects(part)
    for keyword in _SCHEMAS:
        _close_objects(schema.get(keyword))


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _regex_grammar(regex: str) -> str:
    return _lark_grammar(f"start: /{regex_to_lark(regex, use_ascii='')}/")


def _context_free(grammar: str, params: StructuredOutputsParams) -> str:
    if not _GBNF_RULE.search(grammar):
        return _lark_grammar(grammar)
    try:
        return _lark_grammar(grammar_from("gbnf", grammar))
    except ValueError as error:
        fail(params, str(error))


def _lark_grammar(lark: str) -> str:
    return LLMatcher.grammar_from_lark(lark + _EVERY_TOKENISATION)
