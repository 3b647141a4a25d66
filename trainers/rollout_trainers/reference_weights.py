"""Weights as they were, which the parameters hold again for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class ReferenceWeights:
    """A copy of `parameters` as they are now; each is copied as it is, a shard as a shard."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept = _copies(parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters hold the kept values inside, and their own again afterwards, bit for bit."""
        own = _copies(self._parameters)
        try:
            self._write(self._kept)
            yield
        finally:
            self._write(own)

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])


def _copies(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
