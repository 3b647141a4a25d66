"""The model card of an exported model: what it is, how it was trained, and how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from rollout_trainers.config import RunConfig

_OF_THE_MACHINE = ("output_dir", "resume", "tracking", "checkpoint")  # not of the training


@dataclass(frozen=True, slots=True)
class Facts:
    """Where a model comes from: the step it is of, the run's configuration (None: not known) and task, and the
    evaluations of the untrained policy and of this one, as `dataclasses.asdict` has them (None: there is none)."""

    step: int
    config: Mapping[str, Any] | None
    task: str
    base: Mapping[str, Any] | None
    trained: Mapping[str, Any] | None

    @property
    def base_model(self) -> str | None:
        """The name of the model that the run began with; of a path only its end, which says nothing of the machine."""
        return None if self.config is None else Path(self.config["model"]).name


def model_card(facts: Facts, num_parameters: int, dtype: str, adapter_of: str | None = None) -> str:
    """Markdown with the metadata that model hubs and their tools read. `adapter_of` is the base model that a LoRA
    adapter needs, as its configuration names it; None for a whole model."""
    is_adapter = adapter_of is not None
    name = "model" if facts.config is None else facts.config["name"]
    algorithm = None if facts.config is None else facts.config["loss"]["algorithm"]
    tags = ["rollout", "reinforcement-learning", *([algorithm.replace("_", "-")] if algorithm else [])]
    head = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [*tags, *(["lora"] if is_adapter else [])],
    }
    what = "A LoRA adapter" if is_adapter else "A language model"
    origin = f" from {facts.base_model}" if facts.base_model else ""
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False) + "---",
        f"# {name}",
        f"{what}, trained{origin} with reinforcement learning on the task `{facts.task}`, {facts.step} steps, with "
        f"rollout {metadata.version('rollout-rl')}. {num_parameters:,} parameters, {dtype}.",
        _scores(facts),
        _use(adapter_of),
    ]
    if facts.config is not None:
        recipe = yaml.safe_dump(changed_values(facts.config), sort_keys=False, allow_unicode=True)
        parts.append(f"## Recipe\n\nWhat differs from the defaults:\n\n```yaml\n{recipe}```")
    return "\n\n".join(part for part in parts if part) + "\n"


def changed_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's configuration has other than by default, and is not of the machine it ran on: a recipe again."""
    default = json.loads(json.dumps(asdict(RunConfig(model=config["model"]))))
    changed = _difference(json.loads(json.dumps(config, default=str)), default)
    return {"model": Path(config["model"]).name, **{k: v for k, v in changed.items() if k not in _OF_THE_MACHINE}}


def _difference(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in values.items():
        other = default.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            value = _difference(value, other)
            other = {}
        if value != other:
            changed[name] = value
    return changed


def _scores(facts: Facts) -> str:
    rows = [("untrained", facts.base), ("this model", facts.trained)]
    lines = [
        f"| {label} | {each['accuracy']:.1%} | {each['low']:.1%} to {each['high']:.1%} | {each['mean_reward']:.3f} | "
        f"{each['num']} |"
        for label, each in rows
        if each is not None
    ]
    if not lines:
        return ""
    head = ["| | right | 95 % interval | mean reward | held-out prompts |", "|---|---|---|---|---|"]
    return "## Scores\n\n" + "\n".join([*head, *lines])


def _use(adapter_of: str | None) -> str:
    load = (
        "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
        if adapter_of is not None
        else "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")\n'
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"
    )
    needs = ""
    if adapter_of is not None:
        needs = (
            f"\n\nThe adapter needs its base model, {Path(adapter_of).name}, where `base_model_name_or_path` of "
            "`adapter_config.json` says: on another machine, change that to where the base model is there."
        )
    return f"## Use\n\n```python\n{load}\n```{needs}"
