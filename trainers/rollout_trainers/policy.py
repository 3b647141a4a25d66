"""What the trainers ask of a policy, and the one that is the engine's own module, whose parameters are the tensors that
the sampler reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from rollout.layers.gather import take_rows
from rollout.models.causal_lm import CausalLM
from rollout.worker.batch import ForwardBatch, SharedRows
from rollout_kernels import linear_token_logprobs
from rollout_trainers.checkpoint import save_model
from rollout_trainers.packing import PackedBatch
from rollout_trainers.reference_weights import ReferenceWeights


class PolicyUpdate(Protocol):
    """What a policy asks of an update: of `rollout.engine.policy_update.PolicyUpdate`, or of one over replicas."""

    def load(self, source: Any) -> Any: ...

    def load_adapter(self, name: str, source: Any) -> Any: ...


class Policy(Protocol):
    """A causal language model that is trained, and how its weights come to the engine that samples.

    `is_exact` says whether its logprobs are the sampler's, bit for bit; where they are not, the trainer recomputes the
    old ones and corrects for the difference (`algorithm.recompute_logprobs`). `is_padded` says that its forward pass
    pads sequences, so that a micro-batch's size is counted with padding, and with shared prompts once a sequence.
    `is_collective` says that its passes wait for those of other ranks, which make as many.
    """

    temperature: float
    is_exact: bool
    is_padded: bool
    is_collective: bool

    @property
    def model(self) -> nn.Module: ...  # what is trained

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained, and no others."""
        ...

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Final hidden states [C, hidden], in the model's dtype, of the rows that predict the batch's completion
        tokens. Differentiable where gradients are enabled."""
        ...

    def token_logprobs(self, hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies float32 [C] of the batch's completion tokens at the sampling temperature, from the
        rows that `hidden` has given. Differentiable likewise."""
        ...

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_logprobs` of `hidden`."""
        ...

    def frozen_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Logprobs float32 [C] under the weights as they are, without gradient."""
        ...

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Logprobs float32 [C] of each batch under the weights that the run has begun with, without gradient.

        Call it outside of a forward pass that still waits for its backward pass: the weights may change meanwhile.
        """
        ...

    def load_into(self, update: PolicyUpdate) -> None:
        """Brings the weights to the engine, inside of `with engine.policy_update() as update`."""
        ...

    def save(self, folder: Path, source: Path) -> None:
        """Writes a Hugging Face folder that transformers and vLLM load, with the configuration and tokenizer of the
        model in `source`."""
        ...


class SharedPolicy:
    """Log-probabilities of sampled tokens, on the sampler's own weights and kernels: the same bits as the sampler's.

    Every parameter of `model` is trained from now on (`requires_grad` is set).

    `keep_reference` copies the weights as they are now, for a KL term. With `gradient_checkpointing` a layer keeps only
    what it was given, and runs again in the backward pass: the gradients are the same bits.
    """

    is_exact = True
    is_padded = False
    is_collective = False

    def __init__(
        self,
        model: CausalLM,
        temperature: float,
        keep_reference: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        if gradient_checkpointing and not model.supports_recompute:
            raise ValueError(
                f"policy.gradient_checkpointing=True is not valid for {type(model).__name__}, which does not run its "
                "layers by rollout.layers.recompute.run_layer (supports_recompute is false)"
            )
        self.model = model
        self.gradient_checkpointing = gradient_checkpointing
        for _, parameter in model.named_parameters():
            parameter.requires_grad_(True)
        self.temperature = temperature
        self._reference = ReferenceWeights(dict(model.named_parameters())) if keep_reference else None

    @property
    def hidden_size(self) -> int:
        return self.model.output_weight.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.model.output_weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.model.output_weight.device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All of the model's."""
        return self.model.named_parameters()

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies float32 [C] of the batch's completion tokens at the sampling temperature.

        Differentiable where gradients are enabled. Only the rows that predict completion tokens meet the output head.
        """
        return self.token_logprobs(self.hidden(batch), batch)

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Final hidden states [C, hidden], in the model's dtype, of the rows that predict the batch's completion
        tokens."""
        shared = SharedRows(batch.gather, batch.first)
        context = ForwardBatch.packed(batch.query_start, shared, recompute=self.gradient_checkpointing)
        hidden = self.model(batch.input_ids, batch.positions, context)  # [T, H]
        return take_rows(hidden, batch.rows)

    def token_logprobs(self, hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` from the rows that `hidden` has given."""
        return linear_token_logprobs(hidden, self.model.output_weight, batch.targets, self.temperature)

    @torch.no_grad()
    def frozen_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Logprobs float32 [C] under the weights as they are, without gradient."""
        return self.logprobs(batch)[0]

    @torch.no_grad()
    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Logprobs float32 [C] of each batch under the weights that this object was made with.

        Call it outside of a forward pass that still waits for its backward pass: the parameters change meanwhile.
        """
        if self._reference is None:
            raise ValueError("this policy keeps no reference: make it with keep_reference=True")
        with self._reference.in_place():
            return [self.logprobs(batch)[0] for batch in batches]

    def load_into(self, update: PolicyUpdate) -> None:
        """Hands over the tensors that are the engine's already: nothing is copied, all are fingerprinted."""
        update.load(self.model.named_parameters())

    def save(self, folder: Path, source: Path) -> None:
        save_model(folder, self.model.named_parameters(), source)
