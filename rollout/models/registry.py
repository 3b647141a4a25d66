"""Which class implements which architecture. Other packages may add theirs."""

from __future__ import annotations

from typing import ClassVar

from transformers import PretrainedConfig

from rollout.models.causal_lm import CausalLM
from rollout.models.llama import LlamaForCausalLM
from rollout.models.mistral import MistralForCausalLM


class ModelRegistry:
    """Architectures by the name that a checkpoint's `config.json` lists under `architectures`."""

    _classes: ClassVar[dict[str, type[CausalLM]]] = {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
    }

    @classmethod
    def register_model(cls, architecture: str, model_class: type[CausalLM]) -> None:
        """Adds an architecture. Raises `ValueError` where the name is taken by another class, `TypeError` for a class
        that is not a `CausalLM`."""
        if not issubclass(model_class, CausalLM):
            raise TypeError(f"{model_class.__qualname__} must derive from rollout.models.causal_lm.CausalLM")
        known = cls._classes.get(architecture)
        if known is not None and known is not model_class:
            raise ValueError(f"architecture {architecture!r} is already registered as {known.__qualname__}")
        cls._classes[architecture] = model_class

    @classmethod
    def get_supported_archs(cls) -> list[str]:
        return sorted(cls._classes)

    @classmethod
    def classes_for(cls, config: PretrainedConfig) -> dict[str, type[CausalLM]]:
        """The classes known here for a config's architectures, for another process that is to load the same model."""
        return {name: cls._classes[name] for name in config.architectures or [] if name in cls._classes}

    @classmethod
    def resolve(cls, config: PretrainedConfig) -> type[CausalLM]:
        """The class for a config. Raises `ValueError` naming the known architectures."""
        names = config.architectures or []
        for name in names:
            if name in cls._classes:
                return cls._classes[name]
        raise ValueError(
            f"architectures={names!r} is not supported: {', '.join(cls.get_supported_archs())} are, and "
            "ModelRegistry.register_model adds more"
        )
