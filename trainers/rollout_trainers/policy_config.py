"""The policy: which implementation of the model is trained, and what of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from rollout.lora.request import LoRARequest
from rollout_trainers.checks import check_choice, check_flag, check_integer, check_real, fail

PolicyKind = Literal["shared", "transformers"]
PolicyDtype = Literal["auto", "bfloat16", "float32"]
LoraInitialization = Literal["uniform", "gaussian"]
LoraSend = Literal["merged", "adapter"]

SENT_ADAPTER = LoRARequest("policy", 1)  # what requests name in an engine that applies the adapter itself
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer but the head


@dataclass(frozen=True, slots=True)
class LoraSection:
    """Low-rank adapters (Hu et al. 2021; PEFT's `LoraConfig` has the same names but for `rank`, which it calls r). With
    a `rank` above 0 the model's weights stay as they are, and only the adapters learn.

    What an adapter adds is scaled by alpha / rank, or by alpha / sqrt(rank) with `use_rslora` (Kalajdzievski 2023).
    `target_modules` are the ends of module names, or "all-linear"; `exclude_modules` leaves some of them out, and
    `layers_to_transform` all but some layers. `rank_pattern` and `alpha_pattern` give modules other numbers. An adapter
    begins as no change at all: B is zero, and A is drawn by the run's seed, "uniform" or "gaussian" (`initialization`).
    `dropout` is applied to what the adapters read while the policy learns, and not where logprobs are only compared.

    `send` is what an update brings to the engine: "merged" whole weights, or the "adapter" alone, which the engine then
    applies beside its weights (`docs/lora.md`): a small part of the model's bytes.
    """

    rank: int = 0
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] = ALL_LINEAR
    exclude_modules: Sequence[str] = ()
    layers_to_transform: Sequence[int] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    initialization: LoraInitialization = "uniform"
    send: LoraSend = "merged"

    def __post_init__(self) -> None:
        check_integer("policy.lora", "rank", self.rank, 0)
        check_real("policy.lora", "alpha", self.alpha, 0.0, open_low=True)
        check_real("policy.lora", "dropout", self.dropout, 0.0)
        if self.dropout >= 1:
            fail("policy.lora", "dropout", self.dropout, "below 1")
        if self.target_modules != ALL_LINEAR:
            _check_texts("target_modules", self.target_modules)
            if not self.target_modules:
                fail("policy.lora", "target_modules", self.target_modules, f"{ALL_LINEAR!r}, or names of modules")
        _check_texts("exclude_modules", self.exclude_modules)
        _check_list("layers_to_transform", self.layers_to_transform, "a list of layers' numbers")
        for layer in self.layers_to_transform:
            check_integer("policy.lora", "layers_to_transform", layer, 0)
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, name):
                _check_pattern(name, pattern)
        for number in self.rank_pattern.values():
            check_integer("policy.lora", "rank_pattern", number, 1)
        for number in self.alpha_pattern.values():
            check_real("policy.lora", "alpha_pattern", number, 0.0, open_low=True)
        check_flag("policy.lora", "use_rslora", self.use_rslora)
        check_choice("policy.lora", "initialization", self.initialization, get_args(LoraInitialization))
        check_choice("policy.lora", "send", self.send, get_args(LoraSend))
        plain = LoraSection.__dataclass_fields__
        for chosen in fields(self):
            value = getattr(self, chosen.name)
            default = {} if plain[chosen.name].default_factory is dict else chosen.default
            if self.rank == 0 and value != default:
                fail("policy.lora", chosen.name, value, "left out where rank is 0, which is no LoRA")

    @property
    def highest_rank(self) -> int:
        """Of all modules."""
        return max((self.rank, *self.rank_pattern.values()))


def _check_texts(name: str, value: object) -> None:
    _check_list(name, value, "a list of module names")
    assert isinstance(value, Sequence)
    for text in value:
        if not isinstance(text, str) or not text:
            fail("policy.lora", name, value, "a list of module names")


def _check_pattern(name: str, pattern: object) -> None:
    valid = "numbers by names of modules, or by regular expressions of their ends"
    if not isinstance(pattern, str):
        fail("policy.lora", name, pattern, valid)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"policy.lora.{name} has {pattern!r}, which is not valid ({error}): it must be {valid}"
        ) from None


def _check_list(name: str, value: object, valid: str) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        fail("policy.lora", name, value, valid)


@dataclass(frozen=True, slots=True)
class PolicySection:
    """Whose forward and backward pass the trainer runs.

    `kind` "shared" trains the engine's own module, whose weights are the tensors that the sampler reads: its logprobs
    are the sampler's bit for bit, and an update moves nothing. "transformers" trains any causal language model of
    transformers, in `model_dtype` ("auto": the engine's), and sends its weights to the engine at each update. Its
    logprobs are the sampler's only to rounding, so that `algorithm.recompute_logprobs` must be on.

    `gradient_checkpointing` keeps no activations within the layers: they are computed again in the backward pass, which
    takes about a third longer and changes no bit. With `lora` only adapters learn, of kind "transformers".

    Gradients are there only while the policy learns. `offload` moves the optimiser's float32 weights and moments to
    the host's memory as well, from each update to the next; it is for devices that have memory of their own. All this
    goes for a separate critic as well.
    """

    kind: PolicyKind = "shared"
    model_dtype: PolicyDtype = "auto"
    gradient_checkpointing: bool = False
    offload: bool = False
    lora: LoraSection = field(default_factory=LoraSection)

    def __post_init__(self) -> None:
        check_choice("policy", "kind", self.kind, get_args(PolicyKind))
        check_choice("policy", "model_dtype", self.model_dtype, get_args(PolicyDtype))
        for name in ("gradient_checkpointing", "offload"):
            check_flag("policy", name, getattr(self, name))
        if self.kind == "shared":
            if self.model_dtype != "auto":
                fail("policy", "model_dtype", self.model_dtype, "'auto' where kind is 'shared': it is engine.dtype")
            if self.uses_lora:
                fail("policy.lora", "rank", self.lora.rank, "0 where kind is 'shared': PEFT needs 'transformers'")

    @property
    def is_exact(self) -> bool:
        """Whether its logprobs are the sampler's, bit for bit."""
        return self.kind == "shared"

    @property
    def uses_lora(self) -> bool:
        return self.lora.rank > 0

    @property
    def sent_adapter(self) -> LoRARequest | None:
        """What samples are drawn with, where the engine applies the adapter; None: with the weights alone."""
        return SENT_ADAPTER if self.uses_lora and self.lora.send == "adapter" else None
