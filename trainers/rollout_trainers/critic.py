"""Critics: what reward is to be expected before each token. A head on the policy's hidden states, or a network.

Both are modules of which every parameter is trained, with the head in float32. Padding does not exist here, either: a
critic sees the packed micro-batches of the policy, and says one value for each completion token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig

from rollout.layers.gather import take_rows
from rollout.models.causal_lm import CausalLM
from rollout.models.loader import build_model, iterate_checkpoint, materialize, read_config, resolve_dtype
from rollout.weights.names import canonical_name
from rollout.worker.batch import ForwardBatch, SharedRows
from rollout_trainers.packing import PackedBatch

_HEAD = "score.weight"  # as transformers names the head of its sequence classifiers
_OUTPUT = "lm_head."


class Critic(Protocol):
    """`reads_policy`: whether its values are a function of the policy's hidden states."""

    reads_policy: bool

    def values(self, batch: PackedBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Float32 [C], what is expected before each completion token, given the policy's `hidden` [C, hidden] of the
        rows that predict them (None where `reads_policy` is false). Differentiable where gradients are enabled."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class LinearHead(nn.Module):
    """One number from a hidden state, in float32. It begins small, from `seed`, so that the first values are near 0 and
    a network below it gets a gradient."""

    def __init__(self, hidden_size: int, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1)
        self.weight = nn.Parameter(weight.to(device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [C, hidden] of any dtype -> float32 [C]."""
        return functional.linear(hidden.float(), self.weight, self.bias)[:, 0]


class ValueHead(nn.Module):
    """A critic on the policy's own hidden states. Its gradient reaches them times `policy_gradient`."""

    reads_policy = True

    def __init__(self, hidden_size: int, policy_gradient: float, seed: int, device: torch.device) -> None:
        super().__init__()
        self.policy_gradient = policy_gradient
        self.head = LinearHead(hidden_size, seed, device)

    def values(self, batch: PackedBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            raise ValueError("a value head needs the policy's hidden states")
        detached = hidden.detach()
        return self.head(
            detached + self.policy_gradient * (hidden - detached)
        )  # the difference is 0, but for gradients


class SeparateCritic(nn.Module):
    """A network of its own, over whole sequences: one of the engine's modules, and a head.

    With `gradient_checkpointing` a layer keeps only what it was given, and runs again in the backward pass: the
    gradients are the same bits.
    """

    reads_policy = False

    def __init__(self, network: CausalLM, head: LinearHead, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        if gradient_checkpointing and not network.supports_recompute:
            raise ValueError(
                f"policy.gradient_checkpointing=True is not valid with a critic that is a {type(network).__name__}, "
                "which does not run its layers by rollout.layers.recompute.run_layer (supports_recompute is false)"
            )
        self.network = network.requires_grad_(True)
        self.head = head
        self.gradient_checkpointing = gradient_checkpointing

    def values(self, batch: PackedBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        shared = SharedRows(batch.gather, batch.first)
        context = ForwardBatch.packed(batch.query_start, shared, recompute=self.gradient_checkpointing)
        return self.head(take_rows(self.network(batch.input_ids, batch.positions, context), batch.rows))


def load_critic(
    folder: Path, vocab_size: int, dtype: str, seed: int, device: torch.device, gradient_checkpointing: bool = False
) -> SeparateCritic:
    """A critic with the weights in `folder`: a causal language model's, whose output head it leaves out, or a sequence
    classifier's with one number, whose head becomes its own.

    `dtype` is "auto" (the checkpoint's), "bfloat16" or "float32". Raises `ValueError` for an architecture that the
    engine does not know, another vocabulary than the policy's `vocab_size`, a head of several numbers, and weights that
    are missing, unknown or misshapen.
    """
    config = read_config(folder)
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"critic.model={str(folder)!r} is not valid: its vocabulary has {config.vocab_size} tokens, the policy's "
            f"{vocab_size}, and a critic reads the policy's tokens"
        )
    network = build_model(_without_output(config), resolve_dtype(dtype, config))
    materialize(network, lambda shape, kind: torch.zeros(shape, dtype=kind, device=device), device)
    head = LinearHead(network.output_weight.shape[1], seed, device)
    _load_weights(network, head, folder)
    return SeparateCritic(network, head, gradient_checkpointing)


def _without_output(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the same network as a causal language model that has no output matrix of its own."""
    config = copy.deepcopy(config)
    names = config.architectures or []
    config.architectures = [name.replace("ForSequenceClassification", "ForCausalLM") for name in names]
    config.tie_word_embeddings = True
    return config


@torch.no_grad()
def _load_weights(network: CausalLM, head: LinearHead, folder: Path) -> None:
    places: dict[str, nn.Parameter] = {**dict(network.named_parameters()), _HEAD: head.weight}
    missing = set(places) - {_HEAD}
    for raw_name, tensor in iterate_checkpoint(folder):
        name = canonical_name(raw_name)
        if name is None or name.startswith(_OUTPUT):
            continue
        if name not in places:
            raise ValueError(f"critic.model={str(folder)!r} is not valid: nothing in a critic is named {raw_name!r}")
        if places[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, and not {tuple(places[name].shape)}"
            raise ValueError(f"critic.model={str(folder)!r} is not valid: {raw_name!r} has the shape {shapes}")
        places[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"critic.model={str(folder)!r} is not valid: it lacks {', '.join(sorted(missing)[:8])}")
