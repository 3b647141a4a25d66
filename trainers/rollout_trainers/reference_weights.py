"""Weights as they were, which the parameters hold again for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


class ReferenceWeights:
    """A copy of `parameters` as they are now; each is copied as it is, a shard as a shard. `before_writing` is called
    before they change, to forget what was gathered of them."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], before_writing: Callable[[], None] | None = None
    ) -> None:
        self._tensors = {name: _own_part(parameter) for name, parameter in parameters.items()}
        self._before_writing = before_writing
        self._kept = _copies(self._tensors)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters hold the kept values inside, and their own again afterwards, bit for bit."""
        own = _copies(self._tensors)
        try:
            self._write(self._kept)
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        if self._before_writing is not None:
            self._before_writing()
        for name, tensor in self._tensors.items():
            tensor.copy_(values[name])


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _own_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter. That of ZeRO-3 is a placeholder, with the part beside it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter  # pyright: ignore[reportAttributeAccessIssue]
