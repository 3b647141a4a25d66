"""One name map from whatever a trainer or a checkpoint calls a tensor to its Hugging Face name.

    module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight  -> model.layers.0.mlp.up_proj.weight
    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight       -> model.layers.0.self_attn.q_proj.weight
    base_model.model.lm_head.modules_to_save.default.weight                  -> lm_head.weight
    base_model.model.lm_head.original_module.weight                          -> None (the copy that PEFT put aside)
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight   -> AdapterTensorError
    drafter.module.model.norm.weight                                         -> drafter.model.norm.weight

Wrappers may be combined and repeated in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout.errors import AdapterTensorError, UnknownTensorError

# Segments that wrappers insert, wherever they stand: torch.compile, FSDP, gradient checkpointing, PEFT's wrapped layer.
_INSERTED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
# Prefixes of a whole model: DDP, DeepSpeed and DataParallel; PEFT.
_LEADING = (("module",), ("base_model", "model"))
# How the segments of PEFT's adapters begin: LoRA and DoRA, VeRA, IA3, OFT, BOFT, LoHa, LoKr, HRA, trainable tokens.
_ADAPTER = ("lora_", "vera_", "ia3_", "oft_", "boft_", "hada_", "lokr_", "hra_", "trainable_tokens_", "prompt_encoder")
DRAFTER_PREFIX = "drafter."  # before the names of a drafter's tensors in policy updates, receipts and errors
# Buffers that old checkpoints carry and that the engine computes from the configuration.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def canonical_name(name: str) -> str | None:
    """The Hugging Face name of a parameter, or None for a tensor that is rightly left out.

    None stands for PEFT's `original_module` copies and for buffers that the engine computes itself. Raises
    `AdapterTensorError` for a key of an adapter, `UnknownTensorError` for a flattened FSDP parameter.
    """
    segments = [segment for segment in name.split(".") if segment not in _INSERTED]
    adapter = next((segment for segment in segments if segment.startswith(_ADAPTER)), None)
    if adapter is not None:
        raise AdapterTensorError(
            f"{name!r} is a key of an adapter ({adapter}), not a weight of the model: send the merged weights "
            "(rollout.weights.trainer_tensors.policy_tensors(model) makes them without touching the trainer's tensors)"
            ", or the adapter alone with update.load_adapter(name, model)"
        )
    if "_flat_param" in segments or "flat_param" in segments:
        raise UnknownTensorError(
            f"{name!r} is a flattened FSDP parameter: gather the parameters first (FSDP.summon_full_params, or "
            "use_orig_params=True)"
        )
    if "original_module" in segments:
        return None
    segments = _without_leading(segments)
    if segments[0] == DRAFTER_PREFIX[:-1]:  # a model of its own, wrapped or not
        segments[1:] = _without_leading(segments[1:])
    canonical = ".".join(_without_saved_modules(segments))
    return None if canonical.endswith(_COMPUTED) else canonical


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Maps every name of `names` that stands for a parameter to its Hugging Face name, in the order given."""
    mapped = ((name, canonical_name(name)) for name in names)
    return {name: canonical for name, canonical in mapped if canonical is not None}


def is_drafters(name: str) -> bool:
    """Whether a tensor of this Hugging Face name belongs to a drafter, not to the model itself."""
    return name.startswith(DRAFTER_PREFIX)


def _without_leading(segments: list[str]) -> list[str]:
    for prefix in _LEADING:
        if len(segments) > len(prefix) and tuple(segments[: len(prefix)]) == prefix:
            return _without_leading(segments[len(prefix) :])
    return segments


def _without_saved_modules(segments: list[str]) -> list[str]:
    """Drops `modules_to_save.<adapter>`: PEFT trains a copy of the whole module under the adapter's name."""
    while "modules_to_save" in segments:
        place = segments.index("modules_to_save")
        segments = segments[:place] + segments[place + 2 :]
    return segments
