"""What the engine asks of a model class. `rollout.models.llama` is the example to follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn
from transformers import PretrainedConfig

from rollout.layers.linear import multiply
from rollout.worker.batch import ForwardBatch
from rollout_kernels import Int8Weight


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that the engine needs to plan memory and to check input."""

    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


class CausalLM(nn.Module, ABC):
    """Maps tokens to final hidden states, and hidden states to float32 logits.

    Parameters are named as in the checkpoint. `tied_names` maps names that a checkpoint or a trainer may also use to
    the parameter that holds their values. `int8` is the engine's copy of `output_weight`, where it quantises.
    `supports_lora` says that the forward pass hands `ForwardBatch.adapter_ids` to its linear layers, and
    `supports_recompute` that it runs its layers by `rollout.layers.recompute.run_layer`.
    """

    supports_lora: ClassVar[bool] = False
    supports_recompute: ClassVar[bool] = False
    shape: ModelShape
    tied_names: dict[str, str]
    int8: Int8Weight | None = None

    @classmethod
    @abstractmethod
    def from_pretrained_config(cls, config: PretrainedConfig, dtype: torch.dtype) -> Self:
        """Builds the module. Raises `ValueError` for what the implementation does not do."""

    @property
    @abstractmethod
    def output_weight(self) -> torch.Tensor:
        """[vocab, hidden]: the head's own weight, or the embedding where they are tied."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """input_ids, positions: int64 [T] -> final normalised hidden states [T, hidden] in the model's dtype.

        With `batch.last_rows` set it may return those rows alone.
        """

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64 [T] -> float32 [T, hidden], what the first layer gets. Only EAGLE's layer asks for it: it
        refuses models that have not said how."""
        raise NotImplementedError(f"{type(self).__name__} has no `embed`, which method='eagle' needs")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden] -> float32 [R, vocab]; never rounded to the model's dtype."""
        return multiply(hidden, self.output_weight, None, torch.float32, self.int8)
