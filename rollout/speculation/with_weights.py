"""From the configuration to a drafter with weights, and to its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from rollout.models.loader import iterate_checkpoint
from rollout.models.pretrained import resolve_model
from rollout.speculation.checkpoint import resolve_drafter
from rollout.speculation.config import DraftMethod, SpeculativeConfig
from rollout.speculation.draft_model import DraftModel
from rollout.speculation.eagle import EagleDrafter, eagle_tensors
from rollout.speculation.medusa import MedusaDrafter, medusa_tensors
from rollout.speculation.model_drafter import DrafterHost, ModelDrafter
from rollout.weights.names import DRAFTER_PREFIX

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
    for name, tensor in _own_tensors(speculative):
        yield f"{DRAFTER_PREFIX}{name}", tensor


def _own_tensors(speculative: SpeculativeConfig) -> Iterable[tuple[str, torch.Tensor]]:
    assert speculative.model is not None
    if speculative.method == "medusa":
        return medusa_tensors(resolve_drafter(speculative.model)).items()
    if speculative.method == "eagle":
        return eagle_tensors(resolve_drafter(speculative.model)).items()
    return iterate_checkpoint(resolve_model(speculative.model))
