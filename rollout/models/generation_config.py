"""The sampling parameters that a `generation_config.json` suggests: used where nothing was asked for, and said."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rollout.sampling_params import SamplingParams

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_OF_THE_MODEL = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What `sampling_params=None` means. `changed` are the fields that are not `SamplingParams()`'s, with both values;
    `unused` what the file holds besides."""

    params: SamplingParams
    changed: dict[str, tuple[Any, Any]]
    unused: dict[str, Any]

    def describe(self, path: Path) -> str:
        changes = ", ".join(f"{field} {old!r} -> {new!r}" for field, (old, new) in self.changed.items())
        unused = ", ".join(f"{field}={value!r}" for field, value in self.unused.items())
        return (
            f"{path}: prompts without sampling_params are sampled with {changes or 'the usual defaults'}"
            f"{f'; not used: {unused}' if unused else ''}"
        )


def read_generation_defaults(generation_config: str, folder: Path) -> GenerationDefaults:
    """The defaults that `EngineConfig.generation_config` asks for: those of `SamplingParams` ("off"), or of the file in
    the model's `folder` ("auto") or in another one. What a file changes is logged in one line.

    The end-of-sequence ids of the model's own file are used in any case. Raises `ValueError` for a folder without the
    file, and for a file that cannot be read or suggests what `SamplingParams` refuses.
    """
    if generation_config == "off":
        return GenerationDefaults(SamplingParams(), {}, {})
    path = Path(folder if generation_config == "auto" else generation_config) / "generation_config.json"
    if not path.is_file():
        if generation_config == "auto":
            return GenerationDefaults(SamplingParams(), {}, {})
        raise ValueError(
            f"generation_config={generation_config!r} is not valid: it must be 'off', 'auto' or a folder with a "
            "generation_config.json"
        )
    defaults = _parse(path)
    _logger.warning("%s", defaults.describe(path))
    return defaults


def _parse(path: Path) -> GenerationDefaults:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} cannot be read: it must hold an object")
    suggested = {field: given[name] for name, field in _FIELDS.items() if given.get(name) is not None}
    usual = SamplingParams()
    try:
        params = replace(usual, **suggested)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    pairs = {field.name: (getattr(usual, field.name), getattr(params, field.name)) for field in fields(params)}
    return GenerationDefaults(
        params,
        {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        {name: value for name, value in given.items() if name not in _FIELDS.keys() | _OF_THE_MODEL},
    )
