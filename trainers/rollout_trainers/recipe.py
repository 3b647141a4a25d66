"""Recipes: YAML of plain values, read into a `RunConfig` and checked; wrong keys are named with the nearest right one.

name: sums
model: path/to/model
optimizer:
  learning_rate: 1e-6
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from yaml.composer import ComposerError

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe_errors import unknown_name

# Choices of the objective that recipes could name in the section `algorithm` before there was a section for them.
_CHOICES_OF_LOSS = (
    "clip_low",
    "clip_high",
    "aggregation",
    "loss_normalizer",
    "advantage_scale",
    "kl_coefficient",
    "kl_estimator",
    "drop_truncated",
    "importance_cap",
)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML recipe describes, with `section.key=value` overrides applied.

    Raises `ValueError` with the file, the key and the nearest known key, or with what the value must be.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such recipe")
    try:
        values = _read_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe is a mapping of names to values")
    try:
        return config_from_values(values, overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def config_from_values(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A `RunConfig` from nested plain values and `section.key=value` overrides. Raises `ValueError` naming the key."""
    merged = _deep_copy(values)
    for override in overrides:
        _apply_override(merged, override)
    _move_choices_of_loss(merged)
    return _build(RunConfig, merged, "")


class _Loader(yaml.SafeLoader):
    """YAML's plain values. A key that is given twice is an error, where YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"the key {key.value!r} is given twice"
                raise ComposerError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # it is a SafeLoader


def _deep_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"override {override!r} is not valid: it must read key=value, e.g. optimizer.beta2=0.99")
    *sections, name = key.strip().split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"override {override!r} is not valid: {section!r} is not a section")
        values = inner
    try:
        values[name] = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r} is not valid: its value is not valid YAML: {error}") from error


def _move_choices_of_loss(values: dict[str, Any]) -> None:
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    for name in [name for name in _CHOICES_OF_LOSS if name in algorithm]:
        loss = values.setdefault("loss", {})
        if not isinstance(loss, dict) or name in loss:
            raise ValueError(f"algorithm.{name} and loss.{name} are both given: leave the first out")
        loss[name] = algorithm.pop(name)


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    for key in values:
        if key not in known:
            raise ValueError(unknown_name(f"a key of {prefix.removesuffix('.') or 'the recipe'}", key, known))
    arguments = {key: _convert(value, hints[key], f"{prefix}{key}") for key, value in values.items()}
    if cls is RunConfig and "model" not in arguments:
        raise ValueError("model is missing: give the folder of a model, or a name that the engine knows")
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type that a field wants; what the dataclass checks itself passes through."""
    if is_dataclass(hint):
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{key}={value!r} is not valid: it must be a section of keys and values")
        return _build(typing.cast(type, hint), value, f"{key}.")
    allowed = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if float in allowed and isinstance(value, str):
        return _number(value, key)  # YAML reads 1e-6 as text, since it has no dot
    if float in allowed and isinstance(value, int) and not isinstance(value, bool) and int not in allowed:
        return float(value)
    if bool in allowed and not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} is not valid: it must be true or false")
    if allowed == (str,) and not isinstance(value, str):
        raise ValueError(f"{key}={value!r} is not valid: it must be text")
    if str in allowed and type(None) in allowed and int not in allowed and not isinstance(value, str | None):
        raise ValueError(f"{key}={value!r} is not valid: it must be text or null")
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(value)
    if get_origin(hint) is Mapping and not isinstance(value, Mapping):
        if value is not None:
            raise ValueError(f"{key}={value!r} is not valid: it must be a section of keys and values")
        return {}
    return value


def _number(text: str, key: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{key}={text!r} is not valid: it must be a number") from error
