"""Notices that a trainer has changed, in place, the parameters that the engine shares with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from rollout.errors import StaleWeightsError
from rollout.weights.receipt import fingerprint_of

_PROBE_ELEMENTS = 2048


def change_count(tensor: torch.Tensor) -> int:
    """torch's own count of in-place changes of a tensor.

    An in-place operation on the tensor, on a view of it or on `tensor.detach()` counts, inside `torch.no_grad()` too.
    Changes through `tensor.data`, through NumPy, through another process and by `fused=True` optimisers do not;
    inference tensors have no count (0).
    """
    return 0 if tensor.is_inference() else tensor._version


def shared_versions(parameters: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """`change_count` of each."""
    return tuple(map(change_count, parameters))


class SharedWeightsGuard:
    """Knows the state of the tensors that trainer and engine share, as it was when the receipt was written.

    `check()` is cheap enough for every call of `generate`: it compares torch's change counters (exact for ordinary
    in-place operations such as `optimizer.step()`) and a fingerprint of a piece of every tensor (which catches what
    the counters miss, a fused optimiser or an edit through `.data`, where it changes most tensors: it is a probe, not
    a proof). `verify_receipt` reads every byte. The guard holds aliases of the tensors, which cost no memory.

    Parameters that are computed as one product (gate and up projection) lie in one storage, whose changes torch counts
    together: all of them are reported, those first that were seen to hold other values.
    """

    def __init__(self, shared: Mapping[str, torch.Tensor]) -> None:
        self._shared = {name: tensor.detach() for name, tensor in shared.items()}
        self._versions = shared_versions(self._shared.values())
        self._probes = self._probe()

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of the shared parameters; empty where the trainer owns none of the engine's memory."""
        return tuple(self._shared)

    def changed(self) -> list[str]:
        """Names of the shared parameters that were seen to have changed since, those first whose probe has changed."""
        counted = self._differing(self._versions, shared_versions(self._shared.values()))
        probed = self._differing(self._probes, self._probe())
        return probed + [name for name in counted if name not in probed]

    def _differing(self, then: Sequence[int], now: Sequence[int]) -> list[str]:
        return [name for name, before, after in zip(self._shared, then, now, strict=True) if before != after]

    def check(self) -> None:
        """Raises `StaleWeightsError` if shared parameters were seen to change without a policy update."""
        self._refuse(self.changed())

    def check_counters(self) -> None:
        """The same by torch's change counters alone, for every step of the engine: a microsecond for ten tensors."""
        if shared_versions(self._shared.values()) != self._versions:
            self._refuse(self.changed())

    def _refuse(self, changed: list[str]) -> None:
        if changed:
            raise StaleWeightsError(
                f"{len(changed)} of {len(self._shared)} parameters that the trainer shares with the engine changed in "
                f"place since the last receipt (first: {changed[0]}): run a policy_update with them before generating"
            )

    def _probe(self) -> list[int]:
        return [fingerprint_of(_piece(tensor)) for tensor in self._shared.values()]


def _piece(tensor: torch.Tensor) -> torch.Tensor:
    """Some `_PROBE_ELEMENTS` elements from the middle of a tensor, as a view."""
    if tensor.dim() == 0:
        return tensor
    rows = max(1, _PROBE_ELEMENTS * tensor.shape[0] // max(1, tensor.numel()))
    start = max(0, (tensor.shape[0] - rows) // 2)
    piece = tensor[start : start + rows]
    return piece[..., :_PROBE_ELEMENTS]
