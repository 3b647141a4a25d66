"""An adapter as plain tensors: read from a PEFT folder, from a PEFT model, or from pairs of names and tensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight -> (model.layers.0.self_attn.q_proj, A)
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight         -> the same: a file names no adapter

What the engine does not apply is refused by name, never left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open

from rollout.errors import AdapterTensorError, DuplicateTensorError, TensorShapeError
from rollout.weights.gather import check_gatherable, gathered, reshard
from rollout.weights.incoming import check_kind
from rollout.weights.names import canonical_name

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"

# Fields of PEFT's LoraConfig that change what an adapter computes, and that this engine does not do.
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# Other initialisations ("pissa", "olora", "loftq", ...) change the base weights too.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "eva")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One projection's part of an adapter: it adds `scale * b @ (a @ x)`."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter. `modules` maps paths such as "model.layers.0.self_attn.q_proj" to what is added there."""

    modules: Mapping[str, LowRank]


def read_folder(path: Path | str) -> Adapter:
    """A folder that PEFT's `save_pretrained` wrote. Raises `ValueError` where a file is missing or unreadable, and as
    `from_pairs`."""
    folder = Path(path).expanduser()
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"lora_path={str(path)!r} is not valid: there is no {name} in it")
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"lora_path={str(path)!r} is not valid: {CONFIG_FILE} is no JSON: {error}") from error
    with safe_open(folder / TENSOR_FILE, framework="pt") as tensors:
        pairs = [(name, tensors.get_tensor(name)) for name in tensors.keys()]  # noqa: SIM118  # not a dict
    return from_pairs(pairs, config)


def from_pairs(
    named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], config: LoraConfig | Mapping[str, Any]
) -> Adapter:
    """An adapter's tensors under PEFT's names, wrapped or not, with its configuration (`adapter_config.json`).

    The tensors are taken as they are, not copied. Raises `AdapterTensorError` for what cannot be applied (DoRA, biases,
    embeddings, `modules_to_save`, ...), keys of two adapters, an A without its B; `TensorShapeError` where a rank is
    not the configuration's; `TensorKindError` for tensors without dense floating-point values.
    """
    fields = _checked_fields(config)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    adapters: set[str | None] = set()
    pairs = cast(Iterable[tuple[str, torch.Tensor]], named.items() if isinstance(named, Mapping) else named)
    for name, tensor in pairs:
        module, half, adapter = _parse(name)
        check_kind(name, tensor)
        if half in halves.setdefault(module, {}):
            raise DuplicateTensorError(f"lora_{half} of {module} was given twice, the second time as {name!r}")
        halves[module][half] = tensor
        adapters.add(adapter)
    if len(adapters) > 1:
        raise AdapterTensorError(f"the keys are those of several adapters ({sorted(map(str, adapters))}): give one")
    if not halves:
        raise AdapterTensorError("the adapter has no tensors: there is nothing to apply")
    modules: dict[str, LowRank] = {}
    for module, found in halves.items():
        modules[module] = _joined(module, found, _scale(module, fields))
        rank = int(_pattern(fields.get("rank_pattern"), module, fields["r"]))
        if modules[module].rank != rank:
            shape = tuple(modules[module].a.shape)
            raise TensorShapeError(f"lora_A of {module} has shape {shape}, the configuration has rank {rank}")
    return Adapter(modules)


def from_peft_model(model: torch.nn.Module, adapter: str | None = None) -> Adapter:
    """The adapter of a PEFT model, wrapped (DDP, compile, accelerate) or not; `adapter` None is the active one.

    The tensors and their scales are those that the model computes with now. Where it is sharded (FSDP2, ZeRO-3) the
    adapter's tensors alone are gathered, by all ranks together. Raises `AdapterTensorError` as `from_pairs` does, for a
    model without LoRA, and where the adapter is switched off or more than one is active; before anything is gathered.
    """
    from peft import LoraConfig, PeftModel  # peft is optional
    from peft.tuners.lora import Linear, LoraLayer

    peft_model = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if peft_model is None:
        raise AdapterTensorError(f"{type(model).__name__} holds no PEFT model: there is no adapter in it")
    known = peft_model.peft_config
    active = list(peft_model.active_adapters)
    if adapter is None and len(active) != 1:
        raise AdapterTensorError(f"{len(active)} adapters are active ({active}): say which one with adapter=...")
    name = active[0] if adapter is None else adapter
    if name not in known:
        raise AdapterTensorError(f"adapter={name!r} is not valid: the model has {sorted(known)}")
    config = known[name]
    if not isinstance(config, LoraConfig):
        raise AdapterTensorError(f"adapter {name!r} is {type(config).__name__}, not LoRA")
    _checked_fields(config)
    reshard(model)
    found: dict[str, tuple[dict[str, torch.Tensor], float]] = {}
    for path, layer in peft_model.named_modules():
        if not isinstance(layer, LoraLayer) or name not in layer.scaling:
            continue
        module = _without_wrappers(path)
        if not isinstance(layer, Linear):
            raise AdapterTensorError(
                f"{module} is a {type(layer).__name__} layer of PEFT: only linear ones are applied"
            )
        if name in layer.lora_variant or layer.disable_adapters:
            what = "switched off" if layer.disable_adapters else "a variant of LoRA"
            raise AdapterTensorError(f"the adapter {name!r} of {module} is {what}: the engine would compute another")
        halves: dict[str, torch.Tensor] = {
            "A": layer.lora_A[name].get_parameter("weight"),
            "B": layer.lora_B[name].get_parameter("weight"),
        }
        for half, tensor in halves.items():
            check_gatherable(f"{module}.lora_{half}", tensor)
        found[module] = halves, float(layer.scaling[name])
    if not found:
        raise AdapterTensorError(f"adapter {name!r} has no layers in this model: there is nothing to apply")
    with gathered([tensor for halves, _ in found.values() for tensor in halves.values()]) as whole:
        return Adapter(
            {
                module: _joined(module, {half: whole(tensor) for half, tensor in halves.items()}, scale)
                for module, (halves, scale) in found.items()
            }
        )


def _parse(name: str) -> tuple[str, str, str | None]:
    """(path of the module, "A" or "B", name of the adapter where the key has one) of an adapter's key."""
    match = re.fullmatch(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight", name)
    if match is None:
        raise AdapterTensorError(f"{name!r} is not a key that the engine applies: {_why_not(name)}")
    return _without_wrappers(match[1]), match[2], match[3]


def _why_not(name: str) -> str:
    segments = name.split(".")
    if "modules_to_save" in segments:
        return "modules_to_save are whole weights, send a full policy update with merged weights"
    if any(segment.startswith("lora_embedding") for segment in segments):
        return "adapters of embeddings are not supported"
    if any(segment.startswith("lora_magnitude") for segment in segments):
        return "DoRA is not supported"
    if any(segment.startswith("lora_") for segment in segments):
        return "adapters with biases are not supported" if segments[-1] == "bias" else "it is no weight of lora_A or B"
    return "it is no LoRA weight; give the PEFT model itself, or peft.get_peft_model_state_dict(model)"


def _without_wrappers(path: str) -> str:
    """The module's path in the model, from a path among the wrappers of PEFT and of trainers."""
    canonical = canonical_name(f"{path}.weight")
    if canonical is None:
        raise AdapterTensorError(f"{path!r} is a copy that PEFT has put aside, not a layer of the model")
    return canonical.removesuffix(".weight")


def _joined(module: str, halves: Mapping[str, torch.Tensor], scale: float) -> LowRank:
    for half, other in ("AB", "BA"):
        if half not in halves:
            raise AdapterTensorError(f"lora_{half} of {module} is missing: its lora_{other} came alone")
    a, b = halves["A"], halves["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] < 1:
        raise TensorShapeError(
            f"lora_A of {module} has shape {tuple(a.shape)} and lora_B {tuple(b.shape)}: they must be [rank, in] and "
            "[out, rank], with one rank of at least 1"
        )
    return LowRank(a, b, scale)


def _checked_fields(config: LoraConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a configuration that can be applied."""
    fields = config if isinstance(config, Mapping) else config.to_dict()
    kind = str(fields.get("peft_type", "LORA")).rpartition(".")[2]
    if kind != "LORA":
        raise AdapterTensorError(f"peft_type={kind!r} is not supported: it must be 'LORA'")
    for field in ("r", "lora_alpha"):
        if isinstance(fields.get(field), bool) or not isinstance(fields.get(field), (int, float)):
            raise AdapterTensorError(f"{field}={fields.get(field)!r} is not valid: the configuration needs a number")
    if fields.get("bias", "none") != "none":
        raise AdapterTensorError(f"bias={fields['bias']!r} is not supported: it must be 'none'")
    for field in _REFUSED:
        if fields.get(field):
            raise AdapterTensorError(
                f"{field}={fields[field]!r} is not supported in an adapter that the engine applies"
            )
    initialisation = fields.get("init_lora_weights", True)
    if initialisation not in _PLAIN_INITIALISATIONS:
        raise AdapterTensorError(
            f"init_lora_weights={initialisation!r} is not supported: it changes the base weights too, so the adapter "
            "alone is not the policy; send the merged weights (rollout.weights.trainer_tensors.policy_tensors(model))"
        )
    return fields


def _scale(module: str, fields: Mapping[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) (Kalajdzievski, 2023, "rsLoRA")."""
    rank = int(_pattern(fields.get("rank_pattern"), module, fields["r"]))
    if rank < 1:
        raise AdapterTensorError(f"the configuration gives {module} the rank {rank}: it must be at least 1")
    alpha = _pattern(fields.get("alpha_pattern"), module, fields["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """The value of the first key, a regular expression, that ends the module's path, as PEFT reads its patterns."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
