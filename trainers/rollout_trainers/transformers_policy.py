"""A policy that is any causal language model of transformers, whole or with PEFT's LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rollout.weights.gather import gathered, reshard
from rollout.weights.trainer_tensors import policy_tensors
from rollout_trainers.checkpoint import save_model
from rollout_trainers.lora import adapter_disabled, causal_lm_of, save_adapter
from rollout_trainers.packing import PackedBatch
from rollout_trainers.padding import pad
from rollout_trainers.policy import PolicyUpdate
from rollout_trainers.policy_config import SENT_ADAPTER
from rollout_trainers.reference_weights import ReferenceWeights
from rollout_trainers.split_model import SplitModel

ADAPTER = "adapter"  # folder beside the merged weights
_LOGIT_BYTES = 64 << 20  # float32 logits that are there at a time


class TransformersPolicy:
    """Log-probabilities by the model's own forward pass, over batches that are padded on the right.

    Of `model`, which is one of transformers or a PEFT model around one, the parameters that require a gradient are
    trained. What the reference of a KL term is: the model with its adapters switched off, or else a copy of the weights
    as they are now, where `keep_reference` says so. `gradient_checkpointing` is the model's own.

    With `sends_adapter` an update brings the adapter alone to an engine that applies it, in place of merged weights.

    Dropout that adapters have is active only where gradients are computed; the model should have none itself.
    """

    is_exact = False
    is_padded = True
    is_collective = False

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        keep_reference: bool = False,
        gradient_checkpointing: bool = False,
        sends_adapter: bool = False,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.causal_lm = causal_lm_of(model)
        self._split = SplitModel(model, self.causal_lm, float32_logits=True)
        self._entry = model
        self._writes = True
        self._at_once = False
        self._most: Callable[[int], int] = int  # of all ranks' numbers
        self._recomputes = gradient_checkpointing
        self._sends_adapter = sends_adapter
        if gradient_checkpointing:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        model.eval()
        SplitModel(model, self.causal_lm).check(self.causal_lm)
        self._keeps_reference = keep_reference
        self._reference = None
        if keep_reference and not self.has_adapter:
            self._reference = ReferenceWeights(dict(self.named_parameters()))

    @property
    def has_adapter(self) -> bool:
        return self.causal_lm is not self.model

    @property
    def hidden_size(self) -> int:
        return self.causal_lm.config.get_text_config().hidden_size

    @property
    def vocab_size(self) -> int:
        return self.causal_lm.config.get_text_config().vocab_size

    @property
    def device(self) -> torch.device:
        return self.causal_lm.device

    def wrap(self, entry: nn.Module, writes: bool, most: Callable[[int], int], at_once: bool = False) -> None:
        """From now on forward passes call `entry`, which wraps the model or is the model itself, now that its weights
        are spread over ranks: the passes of all ranks then wait for one another, and all call `save`, which `writes`
        on one of them. `most`: the largest of the numbers with which all ranks call it.

        `at_once`: logits must be made in the pass through `entry` that makes the hidden states, and not apart from it:
        those of a micro-batch are then all there at a time, and `hidden` is of no use.
        """
        if entry is not self.model:  # what makes logits shares the hooks that are there now
            self._split = SplitModel(entry, self.causal_lm)
        self._entry = entry
        self._writes = writes
        self._at_once = at_once
        self._most = most
        self.is_collective = True
        if self._reference is not None:
            self._reference = ReferenceWeights(dict(self.named_parameters()), lambda: reshard(self.model))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Final hidden states [C, hidden], in the model's dtype, of the rows that predict the batch's completion
        tokens."""
        self._set_mode()
        padded = pad(batch)
        return self._split.hidden(padded.input_ids, padded.attention_mask, padded.rows)

    def _set_mode(self) -> None:
        learns = torch.is_grad_enabled()
        if self.model.training != learns:
            self.model.train(learns)

    def token_logprobs(self, hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` from the rows that `hidden` has given. Where there are many, a part of them has logits at a time,
        which are computed again for the gradient, as they are with gradient checkpointing. Each part is a pass of its
        own through the head, and all ranks make as many, with the same gradients to compute."""
        parts = self._parts(hidden, batch.targets)
        if torch.is_grad_enabled() and (len(parts) > 1 or self._recomputes):
            found = [checkpoint(self._part, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        else:
            found = [self._part(*part) for part in parts]
        logprobs, entropies = zip(*found, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _parts(self, hidden: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows and their targets in as many parts as some rank needs; a part may be empty."""
        most_rows = max(1, _LOGIT_BYTES // (4 * self.vocab_size))
        num_parts = self._most(max(1, -(-len(hidden) // most_rows)))
        return list(zip(hidden.tensor_split(num_parts), targets.tensor_split(num_parts), strict=True))

    def _part(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._of_logits(self._split.logits(hidden), targets)

    def _of_logits(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies float32 [C] of the batch's completion tokens at the sampling temperature."""
        if self._at_once:
            self._set_mode()
            padded = pad(batch)
            logits = self._split.logits_at_once(padded.input_ids, padded.attention_mask, padded.rows)
            return self._of_logits(logits, batch.targets)
        return self.token_logprobs(self.hidden(batch), batch)

    @torch.no_grad()
    def frozen_logprobs(self, batch: PackedBatch) -> torch.Tensor:
        return self.logprobs(batch)[0]

    @torch.no_grad()
    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        if not self._keeps_reference:
            raise ValueError("this policy keeps no reference: make it with keep_reference=True")
        if self._reference is not None:
            with self._reference.in_place():
                return [self.logprobs(batch)[0] for batch in batches]
        with adapter_disabled(self.model):
            return [self.logprobs(batch)[0] for batch in batches]

    def load_into(self, update: PolicyUpdate) -> None:
        """Sends all weights, with what adapters add to them, or the adapter alone."""
        if self._sends_adapter:
            update.load_adapter(SENT_ADAPTER.lora_name, self._entry)
        else:
            update.load(self._entry)

    def save(self, folder: Path, source: Path) -> None:
        """The weights, with what adapters add to them, and the adapter itself in the folder `adapter` below."""
        tensors = policy_tensors(self._entry)
        if self._writes:
            save_model(folder, tensors, source)
        tensors.close()  # also where others write: it takes part in their gathers
        if self.has_adapter:
            with gathered([parameter for _, parameter in self.named_parameters()]) as whole:
                adapter = {name: whole(parameter) for name, parameter in self.named_parameters()}
                if self._writes:
                    save_adapter(self.model, folder / ADAPTER, adapter)
