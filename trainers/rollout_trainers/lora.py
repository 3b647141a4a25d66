"""LoRA adapters of PEFT around a policy. `peft` is imported when one is asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from rollout import LLM
from rollout_trainers.policy_config import SENT_ADAPTER, LoraSection

if TYPE_CHECKING:
    from peft import PeftModel


def add_adapter(model: PreTrainedModel, section: LoraSection, seed: int) -> PeftModel:
    """`model` with an adapter, float32, which alone requires gradients. What it begins with follows from `seed`.

    Raises `ValueError` where PEFT is not installed, or the section names modules that are not there.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ValueError("policy.lora needs PEFT: pip install 'rollout-rl[train]'") from error
    _check_names(model, section)
    targets = section.target_modules
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT says int, and multiplies by it
        lora_dropout=section.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=list(section.exclude_modules) or None,
        layers_to_transform=list(section.layers_to_transform) or None,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        use_rslora=section.use_rslora,
        init_lora_weights=True if section.initialization == "uniform" else "gaussian",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(f"policy.lora.target_modules={targets!r} is not valid for this model: {error}") from error
    assert not isinstance(adapted, tuple)
    _check_patterns([name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)], section)
    return adapted  # type: ignore[return-value]  # mixed adapters are another class, which was not asked for


def hand_over(engine: LLM, model: nn.Module) -> None:
    """Gives an engine that applies adapters the one that `model` begins with, for requests that name `SENT_ADAPTER`.

    Raises `ValueError` where the engine cannot apply it.
    """
    from peft import PeftModel

    assert isinstance(model, PeftModel)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_embedding_layers=False)
        try:
            engine.add_lora(replace(SENT_ADAPTER, lora_path=folder))
        except ValueError as error:
            raise ValueError(
                f"policy.lora.send='adapter' is not valid: it must be 'merged', since the engine cannot apply this "
                f"adapter: {error}"
            ) from error


def _check_names(model: PreTrainedModel, section: LoraSection) -> None:
    """Raises `ValueError` for names and layers that the model does not have, of which PEFT says nothing."""
    leaves = {name: module for name, module in model.named_modules() if not list(module.children())}
    head = model.get_output_embeddings()
    targets = [name for name, module in leaves.items() if isinstance(module, nn.Linear) and module is not head]
    if not isinstance(section.target_modules, str):
        _check_endings("target_modules", section.target_modules, list(leaves), "the model has the modules")
        targets = [name for name in leaves if any(_ends(name, ending) for ending in section.target_modules)]
    _check_endings("exclude_modules", section.exclude_modules, targets, "the targets are")
    _check_tied(model, [leaves[name] for name in targets if not any(_ends(name, e) for e in section.exclude_modules)])
    if not section.layers_to_transform:
        return
    if isinstance(section.target_modules, str):
        raise ValueError(
            f"policy.lora.layers_to_transform={list(section.layers_to_transform)} is not valid with target_modules="
            f"{section.target_modules!r}: name the modules, for example [q_proj, v_proj]"
        )
    num_layers = model.config.num_hidden_layers
    missing = [layer for layer in section.layers_to_transform if not 0 <= layer < num_layers]
    if missing:
        layers = f"the model has layers 0 to {num_layers - 1}"
        raise ValueError(f"policy.lora.layers_to_transform has {missing[0]}: {layers}")


def _check_tied(model: PreTrainedModel, targets: Sequence[nn.Module]) -> None:
    """Raises `ValueError` where an adapter is to be of one of two modules that share a weight: it cannot be merged, and
    the engine cannot apply it."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is not None and last.weight is first.weight and any(module in (first, last) for module in targets):
        raise ValueError(
            "policy.lora.target_modules is not valid for this model: its embeddings and its head share their weight "
            "(tie_word_embeddings), so that neither can have an adapter"
        )


def _check_endings(field: str, endings: Sequence[str], names: Sequence[str], what_is_there: str) -> None:
    for ending in endings:
        if not any(_ends(name, ending) for name in names):
            raise ValueError(f"policy.lora.{field} names {ending!r}: {what_is_there} {_last_parts(names)}")


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _last_parts(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _check_patterns(targets: Sequence[str], section: LoraSection) -> None:
    """Raises `ValueError` for a pattern that no target is like; PEFT reads them as regular expressions of endings."""
    for field, patterns in (("rank_pattern", section.rank_pattern), ("alpha_pattern", section.alpha_pattern)):
        for pattern in patterns:
            if not any(_is_like(name, pattern) for name in targets):
                raise ValueError(f"policy.lora.{field} names {pattern!r}: the targets are {_last_parts(targets)}")
            if pattern not in {next((each for each in patterns if _is_like(name, each)), None) for name in targets}:
                others = "all that are like it are like a pattern before it, and the first one counts"
                raise ValueError(f"policy.lora.{field} names {pattern!r}, which no target goes by: {others}")


def _is_like(name: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The model of transformers that `model` is, or that PEFT's adapters are in. Raises `ValueError` for others."""
    if "peft" in sys.modules:  # no model is PEFT's before somebody has imported it, which takes a while
        from peft import PeftModel

        if isinstance(model, PeftModel):
            model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"a {type(model).__name__} is no policy: it must be a model of transformers, or PEFT's")
    return model


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """The model as it was before it got its adapter, inside."""
    from peft import PeftModel

    assert isinstance(model, PeftModel)
    with model.disable_adapter():
        yield


def save_adapter(model: nn.Module, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a folder that `PeftModel.from_pretrained` loads, with the adapter's whole `tensors` by the model's names
    for them."""
    from peft import PeftModel

    assert isinstance(model, PeftModel)
    state = {name: tensor.contiguous() for name, tensor in tensors.items()}
    model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
    make_base_absolute(folder)


def make_base_absolute(folder: Path) -> str:
    """Makes an adapter's configuration name its base model by the absolute path, where that is a folder here, so that
    PEFT finds it from everywhere. Returns what it names then."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    base = str(config["base_model_name_or_path"])
    if Path(base).is_dir():
        base = str(Path(base).resolve())
        path.write_text(json.dumps({**config, "base_model_name_or_path": base}, indent=2) + "\n", encoding="utf-8")
    return base
