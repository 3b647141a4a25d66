"""From the configuration to a drafter with weights, and to its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from rollout.models.loader import iterate_checkpoint
from rollout.models.pretrained import resolve_model
from rollout.speculation.config import DraftMethod, SpeculativeConfig
from rollout.speculation.draft_model import DraftModel
from rollout.speculation.eagle import EagleDrafter
from rollout.speculation.medusa import MedusaDrafter
from rollout.speculation.model_drafter import DRAFTER_PREFIX, DrafterHost, ModelDrafter

_MAKERS: dict[DraftMethod, Callable[[DrafterHost], ModelDrafter]] = {
    "draft_model": DraftModel,
    "medusa": MedusaDrafter,
    "eagle": EagleDrafter,
}


def make_model_drafter(host: DrafterHost) -> ModelDrafter:
    """The drafter that the configuration asks for, with memory for its weights, which are not loaded yet.

    Raises `ValueError` where the folder cannot be used.
    """
    try:
        return _MAKERS[host.speculative.method](host)
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def drafter_checkpoint(speculative: SpeculativeConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a drafter's checkpoint, under the names that policy updates have for them."""
    assert speculative.model is not None
    for name, tensor in iterate_checkpoint(resolve_model(speculative.model)):
        yield f"{DRAFTER_PREFIX}{name}", tensor
