"""Medusa (Cai et al., 2024): heads on the model's last hidden state, each of which guesses one token further ahead.

    feature of the token that drew the last known one ─┬─► head 0 ─► the next token
                                                        ├─► head 1 ─► the one after it
                                                        └─► ...

The feature at position t predicts the token at t + 1, which is known by then; head i predicts the one at t + 2 + i. A
step's guesses are one chain: no tree of alternatives is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.core.schedule import DraftPlan, DraftSequence
from rollout.layers.linear import Linear, multiply
from rollout.models.causal_lm import CausalLM
from rollout.speculation.checkpoint import (
    drafter_tensors,
    load_drafter,
    read_drafter_config,
    resolve_drafter,
    take_memory,
)
from rollout.speculation.guesses import before_failure, draw_guesses, stacked
from rollout.speculation.model_drafter import DrafterHost

_PREFIX = "medusa_head."  # of the names in some checkpoints


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """`num_layers` blocks a head; with `has_own_output` each head has an output matrix of its own, in place of the
    model's."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    has_own_output: bool

    @classmethod
    def of_folder(cls, folder: Path, names: Mapping[str, torch.Tensor], model: CausalLM) -> MedusaConfig:
        """From a checkpoint's `config.json` and its tensors' names. Raises `ValueError` for heads of another model."""
        fields = read_drafter_config(folder)
        if "medusa_num_heads" not in fields:
            raise ValueError(
                f"model={str(folder)!r} is not valid with method='medusa': its config.json has no medusa_num_heads"
            )
        vocab_size, hidden_size = model.output_weight.shape
        for field, size in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
            if fields.get(field, size) != size:
                raise ValueError(f"{field}={fields[field]!r} in {str(folder)!r} is not valid: the model has {size}")
        num_layers = _count(fields, "medusa_num_layers", folder)
        return cls(
            num_heads=_count(fields, "medusa_num_heads", folder),
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            has_own_output=f"0.{num_layers}.weight" in names,
        )


def _count(fields: Mapping[str, Any], field: str, folder: Path) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field}={value!r} in {str(folder)!r} is not valid: it must be an integer of at least 1")
    return value


class MedusaBlock(nn.Module):
    """x + silu(linear(x)), computed in float32 and rounded once."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = Linear(hidden_size, hidden_size, dtype, bias=True, out_dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden] in the same dtype."""
        return (x.float() + nn.functional.silu(self.linear(x))).to(x.dtype)


class MedusaHeads(nn.ModuleList):
    """Head i is a list of blocks, and its own output matrix where it has one: so parameters are named as published."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        for _ in range(config.num_heads):
            head = nn.ModuleList(MedusaBlock(config.hidden_size, dtype) for _ in range(config.num_layers))
            if config.has_own_output:
                head.append(Linear(config.hidden_size, config.vocab_size, dtype, out_dtype=torch.float32))
            self.append(head)

    def hidden(self, head: int, features: torch.Tensor) -> torch.Tensor:
        """features [T, hidden] -> what the head gives to its output matrix, [T, hidden]."""
        for block in self._modules_of(head)[: self.config.num_layers]:
            features = block(features)
        return features

    def output_weight(self, head: int, model: CausalLM) -> torch.Tensor:
        """[vocab, hidden]: the head's own, or the model's."""
        if not self.config.has_own_output:
            return model.output_weight
        return self._modules_of(head)[-1].get_parameter("weight")

    def _modules_of(self, head: int) -> nn.ModuleList:
        modules = self[head]
        assert isinstance(modules, nn.ModuleList)
        return modules


def medusa_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint by the names of `MedusaHeads`' parameters. Raises `ValueError` where there is none."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in drafter_tensors(folder)}


def read_medusa(folder: Path, model: CausalLM) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """The configuration of a folder's heads for `model`, and their tensors.

    Raises `ValueError` where there are none, or they are those of another model.
    """
    tensors = medusa_tensors(folder)
    return MedusaConfig.of_folder(folder, tensors, model), tensors


class MedusaDrafter:
    """Guesses with Medusa heads; see `rollout.speculation.model_drafter.ModelDrafter`. It keeps no keys and values."""

    has_kv = False
    needs_features = True
    block_bytes = 0

    def __init__(self, host: DrafterHost) -> None:
        """Raises `ValueError` for a folder without heads for the host's model, or with too few."""
        assert host.speculative.model is not None
        self.distributions: dict[str, torch.Tensor] | None = None
        self._host = host
        self._folder = resolve_drafter(host.speculative.model)
        config, _ = read_medusa(self._folder, host.model)
        most = host.speculative.num_speculative_tokens
        if most > config.num_heads:
            raise ValueError(
                f"num_speculative_tokens={most} is not valid: {str(self._folder)!r} has {config.num_heads} heads"
            )
        with torch.device("meta"):
            self.heads = MedusaHeads(config, host.dtype)
        take_memory(self.heads, host)

    @property
    def module(self) -> nn.Module:
        return self.heads

    def load(self, on_tensor: Callable[[str], None] | None = None) -> None:
        """Reads the checkpoint (again), into the tensors that are there."""
        load_drafter(self.heads, read_medusa(self._folder, self._host.model)[1], self._folder, on_tensor)

    def measure_step(self) -> int:
        """The logits of all guesses of a step, twice where heads have outputs of their own; the rest is small."""
        speculative, config = self._host.speculative, self.heads.config
        rows = speculative.num_speculative_tokens * speculative.max_batch_for_speculation
        return rows * (4 * config.vocab_size * (1 + config.has_own_output) + 16 * config.hidden_size)

    def allocate(self, num_blocks: int) -> None:
        """There is nothing to keep."""

    @torch.inference_mode()
    def propose(self, plan: DraftPlan) -> dict[str, list[int]]:
        """Up to as many guesses as there are heads."""
        sequences = [sequence for sequence in plan.sequences if sequence.num_drafts]
        if not sequences:
            return {}
        ends = [sequence.start + len(sequence.token_ids) for sequence in sequences]
        features = self._host.features().read(
            [sequence.target_block_ids for sequence in sequences], [np.array([end - 2]) for end in ends]
        )
        rows: list[DraftSequence] = []
        positions: list[int] = []
        hidden: list[torch.Tensor] = []
        for head in range(min(len(self.heads), max(sequence.num_drafts for sequence in sequences))):
            chosen = [index for index, sequence in enumerate(sequences) if sequence.num_drafts > head]
            rows += [sequences[index] for index in chosen]
            positions += [ends[index] + head for index in chosen]
            (some,) = self._host.inputs.send([np.array(chosen)])
            hidden.append(self.heads.hidden(head, features[some]))
        guesses: dict[str, list[int]] = {sequence.request_id: [] for sequence in sequences}
        drawn_from = self._host.new_record()
        drawn = draw_guesses(self._logits(hidden), rows, positions, self._host.inputs, drawn_from=drawn_from)
        self.distributions = stacked(drawn_from)
        for sequence, token_id in zip(rows, drawn, strict=True):
            guesses[sequence.request_id].append(token_id)
        return {request_id: before_failure(token_ids) for request_id, token_ids in guesses.items()}

    def _logits(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """float32 [R, vocab] of the heads' rows, in one product where all have the model's output matrix."""
        if not self.heads.config.has_own_output:
            return self._host.model.compute_logits(torch.cat(hidden))
        return torch.cat(
            [
                multiply(rows, self.heads.output_weight(head, self._host.model), None, torch.float32, None)
                for head, rows in enumerate(hidden)
            ]
        )

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self.heads.named_parameters())

    def tied(self) -> Mapping[str, str]:
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {}
