"""The two ends of a way from a trainer's tensors to an engine's memory. One file of this folder for each way.

    trainer rank(s)                                      engine worker(s)
    sender.send(policy_tensors(model)) ──── bytes ────►  with rollout.policy_update(version) as update:
                                                             update.load(transport)

The policy update does what all ways have in common: names, shapes, coverage, fingerprints, roll-back. A transport only
brings tensors, and what the sending side computed from the bytes it sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HeldPolicy:
    """What the engine holds when an update begins: for transports that send only what has changed.

    `tensors` are the engine's own, tied names included: to be read, never written. They may hold anything at all where
    the engine is unusable or its weights were given back, so that a transport checks what it builds upon. `seconds` are
    what is left of the update's time limit: no silence of the other end may last longer.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    seconds: float | None = None

    def limit(self, timeout: float) -> float:
        """A transport's own limit of silence, in seconds, or what the update has left where that is less."""
        return timeout if self.seconds is None else min(timeout, self.seconds)


class Transport(ABC):
    """The receiving end, for one update. An engine with workers in other processes pickles it to each of them."""

    def prepare(self, version: int, held: HeldPolicy) -> None:  # noqa: B027 - many need neither
        """Called once, before `tensors()`: the version that the update is to, and what the engine holds until then.

        What is received must be of this version, else `tensors()` raises `TransportError` before the first tensor.
        """

    @abstractmethod
    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor of the policy once, in any order, under any name that `names.canonical_name` reads.

        A tensor need only stay valid until the next is asked for. Raises `TransportError` where the sending side
        failed, went away, or sent something else than it announced.
        """

    def sent_fingerprints(self) -> Mapping[str, int]:
        """`receipt.fingerprint_of` each tensor as the sending side had it, under the names of `tensors()`.

        Complete once `tensors()` has ended. Empty where both ends are the same memory.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - many have nothing to give back
        """Gives back what the receiving end holds (mappings, sockets). Called once, also after an error."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """What the sending side did. `fingerprint` is `Receipt.parameters_fingerprint` of the policy that was sent,
    `drafter_fingerprint` the receipt's of the drafter; None where none was, as on a rank that only consumed.
    """

    num_tensors: int
    num_bytes: int
    seconds: float
    fingerprint: str | None
    drafter_fingerprint: str | None = None
    largest_bucket: int = 0  # bytes that were gathered or packed at one time, at most


class Sender(ABC):
    """The sending end, on each rank of the trainer; lives as long as the training."""

    @abstractmethod
    def send(self, version: int, named: Iterable[NamedTensor]) -> SendReport:
        """Sends one whole policy. `named` is consumed lazily, and holds Hugging Face names and full tensors.

        Every rank of a trainer calls it together, since producing `named` may gather shards; where one rank is enough
        to send, the others only consume. Raises `TransportError`; unless `named` itself failed, it has been consumed to
        its end even then, so that no other rank waits in a collective for ever.
        """

    def close(self) -> None:  # noqa: B027 - many have nothing to give back
        """Gives back what the sending end holds."""
