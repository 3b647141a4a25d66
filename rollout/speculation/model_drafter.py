"""What the worker asks of a drafter that has weights: a draft model, Medusa's heads, EAGLE's layer.

    Scheduler.plan_drafts ─► Worker.propose_drafts ─► ModelDrafter.propose ─► Scheduler.take_drafts ─► schedule

Drafters that guess from tokens alone are `rollout.core.speculation.Drafter`s, which the scheduler asks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from rollout.config import EngineConfig
from rollout.core.schedule import DraftPlan
from rollout.models.causal_lm import CausalLM
from rollout.platform.platform import Platform
from rollout.speculation.config import SpeculativeConfig
from rollout.speculation.features import FeatureCache
from rollout.speculation.guesses import DrawnFrom
from rollout.worker.inputs import StepInputs
from rollout.worker.ledger import MemoryLedger
from rollout_kernels import KVLayout


@dataclass(frozen=True, slots=True)
class DrafterHost:
    """What a drafter is made with: the engine's model and device, and where memory is counted."""

    config: EngineConfig
    speculative: SpeculativeConfig  # the engine's own
    model: CausalLM  # whose tokens are guessed
    folder: Path  # that it was loaded from
    dtype: torch.dtype  # of the engine's weights and KV, which the drafter has too
    longest: int  # tokens of a sequence at most
    platform: Platform
    ledger: MemoryLedger  # owners "drafter", "drafter_kv_cache", "drafter_workspace", "drafter_graphs"
    inputs: StepInputs
    kv_layout: KVLayout  # how the kernels lay out a KV pool
    runs_triton: bool
    features: Callable[[], FeatureCache]  # beside the engine's KV pool, once there is one; for `needs_features`

    def new_record(self) -> DrawnFrom | None:
        """Where a `propose` notes what its guesses are drawn from; None where nobody will ask."""
        return {} if self.speculative.verification == "rejection" else None


class ModelDrafter(Protocol):
    """A drafter with weights on the engine's device, in memory of its own that sleeps and wakes by the ledger.

    Guesses can be wrong in any way. What they must not do: fail, write outside the drafter's own memory, or depend on
    anything but the weights and the sequence itself.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of its own keys and values, over all layers; 0 where it keeps none."""
        ...

    @property
    def has_kv(self) -> bool:
        """Whether plans name blocks of a pool of its own."""
        ...

    @property
    def needs_features(self) -> bool:
        """Whether the engine has to keep the final hidden state of each computed token for it."""
        ...

    @property
    def distributions(self) -> dict[str, torch.Tensor] | None:
        """With `verification="rejection"`, what the guesses of the last `propose` were drawn from: request id ->
        float32 [k, vocab]. Otherwise None."""
        ...

    @property
    def module(self) -> nn.Module:
        """What holds the parameters: the engine notices where one is replaced."""
        ...

    def load(self, on_tensor: Callable[[str], None] | None = None) -> None:
        """Reads its checkpoint into the tensors that are there."""
        ...

    def measure_step(self) -> int:
        """Bytes that its largest step takes at its peak besides weights and KV. No request may be in flight."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Takes memory for a pool of so many blocks, and for recorded steps. Called once, after `load`."""
        ...

    def propose(self, plan: DraftPlan) -> dict[str, list[int]]:
        """Computes the known tokens, and guesses up to `num_drafts` next ones: request id -> guesses.

        A guess of position p is drawn with the request's own noise of p, temperature and filters, so that the model is
        likely to draw the same there. Penalties and masks are for the verification.
        """
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Its own tensors under its checkpoint's names, without those that it shares with the model."""
        ...

    def tied(self) -> Mapping[str, str]:
        """Further names of its own tensors -> the names that `parameters` has."""
        ...

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """What it reads besides parameters, computed from its configuration."""
        ...
