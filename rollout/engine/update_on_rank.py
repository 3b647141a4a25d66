"""A policy update in a worker process: the ordinary `PolicyUpdate` of its engine, led by messages."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from rollout.engine.bucket import SharedBucket
from rollout.engine.core import EngineCore
from rollout.engine.messages import Arrived, GiveUp, Layout, LoadBucket, LoadTransport, OpenUpdate, Update
from rollout.errors import PolicyUpdateError
from rollout.weights.receipt import Receipt
from rollout.weights.transaction import Outcome, PolicyUpdate


class UpdateOnRank:
    """One update of this process's engine, from `OpenUpdate` to the last step or to `GiveUp`.

    An error of a step does not end the update: the other side hears of it, and gives up on all ranks.
    """

    def __init__(self, engine: EngineCore, bucket: SharedBucket) -> None:
        self._engine = engine
        self._bucket = bucket
        self._update: PolicyUpdate | None = None

    def answer(self, message: Update) -> Any:
        """Does what a message asks for."""
        if isinstance(message, OpenUpdate):
            self._update = PolicyUpdate(
                self._engine, message.version, message.in_flight, message.timeout, message.roll_back
            )
            self._update.pause()
            self._update.count_from(message.spent)
            return None
        if isinstance(message, GiveUp):
            return self._give_up(message)
        assert self._update is not None, "the update was not opened"
        if isinstance(message, LoadBucket):
            return self._load_bucket(self._update, message)
        if isinstance(message, LoadTransport):
            return self._load_transport(self._update, message)
        step = {
            "wake": self._wake,
            "post_process": PolicyUpdate.post_process,
            "verify": self._verify,
            "invalidate": PolicyUpdate.invalidate,
            "resume": PolicyUpdate.resume,
        }[message.step]
        return step(self._update)

    def _wake(self, update: PolicyUpdate) -> Layout:
        update.wake()
        return Layout(
            {
                name: (dtype_name(tensor.dtype), tuple(tensor.shape))
                for name, tensor in self._engine.parameters().items()
            },
            dict(self._engine.tied()),
        )

    def _verify(self, update: PolicyUpdate) -> Receipt:
        update.verify()
        return update.verified_receipt

    def _load_bucket(self, update: PolicyUpdate, message: LoadBucket) -> None:
        self._bucket.map(message.num_bytes)
        update.load([(t.name, self._bucket.view(t.offset, t.shape, dtype_of(t.dtype))) for t in message.tensors])

    def _load_transport(self, update: PolicyUpdate, message: LoadTransport) -> Arrived:
        before, num_bytes = update.fingerprints, update.bytes_copied
        names = update.load(pickle.loads(message.transport))
        new = {name: value for name, value in update.fingerprints.items() if name not in before}
        return Arrived(names, new, update.bytes_copied - num_bytes)

    def _give_up(self, message: GiveUp) -> Outcome:
        update = self._update
        if update is None:  # it could not be opened
            return Outcome.UNCHANGED
        update.give_up(PolicyUpdateError(message.reason))
        assert update.outcome is not None
        return update.outcome


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`dtype_name` backwards."""
    dtype = vars(torch)[name]
    assert isinstance(dtype, torch.dtype), name
    return dtype
