"""Between processes of one machine: buckets of memory that both ends map, announced over a Unix socket.

    trainer                                                    engine process(es)
    SharedMemorySender(folder).send(7, named)                  update.load(SharedMemoryReceiver(folder))
      pack into bucket 0 ── {"bucket": 0, "entries"} ────────►   read in place, copy into the engine
      pack into bucket 1 ── {"bucket": 1, "entries"} ────────►   ...
      pack into bucket 0 ◄───────────────────── {"done": 0} ──   (reused when every receiver has read it)
      the policy's end   ── {"end": fingerprint} ────────────►   ── {"done": "end"} ──► send() returns

One copy on each side. The memory has no name: its file descriptor travels with the first announcement, and it goes when
the last process that maps it has gone, however that ended. On CUDA the buckets lie on the device and their IPC handles
travel instead.
"""

from __future__ import annotations

import base64
import itertools
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollout.errors import TransportError
from rollout.weights.buckets import Bucket, Entry, Tally, check_above_zero, only_consumed, send_policy, unpack
from rollout.weights.channel import (
    Channel,
    Rendezvous,
    connect_locally,
    greet,
    listen_locally,
    private_folder,
)
from rollout.weights.transport import HeldPolicy, NamedTensor, Sender, SendReport, Transport

_NUM_BUCKETS = 2
_SOCKET = "policy.sock"


class SharedMemorySender(Sender):
    """Sends policies to `num_receivers` processes at once, each of which reads with a `SharedMemoryReceiver`.

    `folder` is where they find each other: it is made for this user alone. `bucket_bytes` is the size of each of the
    two buckets; a larger tensor makes a bucket as large as itself, and it stays so. `dtype` casts floating-point
    tensors on their way into the bucket: the engine's dtype halves the bytes of a float32 trainer. `device` is where
    the buckets lie, "cpu" or a CUDA device that both ends can see. `timeout` is the longest silence of a receiver, in
    seconds, also before the first one comes. `sends=False` is for ranks that only take part in gathering.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_receivers: int = 1,
        bucket_bytes: int = 64 << 20,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        timeout: float = 120.0,
        sends: bool = True,
    ) -> None:
        check_above_zero(num_receivers=num_receivers, bucket_bytes=bucket_bytes, timeout=timeout)
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = torch.device(device)
        self._slots: list[_Slot | None] = [None] * _NUM_BUCKETS
        self._numbers = itertools.count()
        self._path = Path(folder) / _SOCKET
        self._rendezvous: Rendezvous | None = None
        if sends:
            private_folder(Path(folder))
            self._rendezvous = Rendezvous(listen_locally(self._path), num_receivers, timeout)

    def send(self, version: int, named: Iterable[NamedTensor]) -> SendReport:
        if self._rendezvous is None:
            return only_consumed(named)
        session = _Session(self, self._rendezvous, version)
        return send_policy(session, named, self._bucket_bytes, self._dtype)

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
            self._path.unlink(missing_ok=True)
        self._slots = [None] * _NUM_BUCKETS

    def _slot(self, index: int, num_bytes: int) -> _Slot:
        """The ring's bucket `index`, with room for `num_bytes`."""
        slot = self._slots[index]
        if slot is None or slot.memory.numel() < num_bytes:
            self._slots[index] = None  # given back before the larger one is made
            slot = self._slots[index] = _Slot.make(next(self._numbers), num_bytes, self._device)
        return slot


@dataclass(slots=True)
class _Receiver:
    """The sender's view of one receiver."""

    channel: Channel
    num_read: int = 0  # buckets that it is done with; it reads them in order
    slots: set[int] = field(default_factory=set)  # the memory that it maps


class _Session:
    """One policy on its way."""

    def __init__(self, sender: SharedMemorySender, rendezvous: Rendezvous, version: int) -> None:
        self._sender = sender
        self._rendezvous = rendezvous
        self._version = version
        self._receivers: list[_Receiver] | None = None
        self._slot: _Slot | None = None
        self._num_taken = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next bucket's memory, once everybody is done with what was in it."""
        for receiver in self._receivers or ():
            while receiver.num_read <= self._num_taken - _NUM_BUCKETS:
                receiver.channel.receive()
                receiver.num_read += 1
        self._slot = self._sender._slot(self._num_taken % _NUM_BUCKETS, num_bytes)
        self._num_taken += 1
        return self._slot.memory

    def announce(self, bucket: Bucket) -> None:
        assert self._slot is not None
        self._slot.written()
        message = {
            "bucket": self._num_taken - 1,
            "slot": self._slot.number,
            "entries": [entry.as_json() for entry in bucket.entries],
        }
        for receiver in self._joined():
            new = self._slot.number not in receiver.slots
            receiver.slots.add(self._slot.number)
            description = {"size": self._slot.memory.numel(), "handle": self._slot.handle} if new else {}
            receiver.channel.send(message | description, self._slot.descriptor if new else None)

    def end(self, told: Mapping[str, Any]) -> None:
        """Says that this was the whole policy, and waits until everybody has taken it over."""
        for receiver in self._joined():
            receiver.channel.send({"end": told})
        for receiver in self._joined():
            for _ in range(self._num_taken - receiver.num_read + 1):
                receiver.channel.receive()
            receiver.channel.close()

    def give_up(self, reason: str) -> None:
        if self._receivers is None:
            self._rendezvous.turn_away(reason)
        for receiver in self._receivers or ():
            receiver.channel.give_up(reason)

    def _joined(self) -> list[_Receiver]:
        """The receivers; they are waited for when the first bucket is packed."""
        if self._receivers is None:
            self._receivers = [_Receiver(channel) for channel in self._rendezvous.join(self._version)]
        return self._receivers


class SharedMemoryReceiver(Transport):
    """Reads what a `SharedMemorySender` in another process sends from `folder`.

    `timeout` is the longest silence of the sender, in seconds, also until it begins to send.
    """

    def __init__(self, folder: str | Path, *, timeout: float = 120.0) -> None:
        self._path = Path(folder).absolute() / _SOCKET
        self._timeout = timeout
        self._version: int | None = None
        self._channel: Channel | None = None
        self._tally = Tally()
        self._ended = False

    def prepare(self, version: int, held: HeldPolicy) -> None:
        self._version = version
        self._timeout = held.limit(self._timeout)

    def tensors(self) -> Iterator[NamedTensor]:
        channel = greet(connect_locally(self._path, self._timeout), self._timeout, self._version)
        self._channel = channel
        memory: dict[int, torch.Tensor] = {}
        while True:
            message, descriptor = channel.receive()
            if "end" in message:
                break
            if "size" in message:
                memory[message["slot"]] = _open(message["size"], message["handle"], descriptor)
            bucket = memory[message["slot"]]
            entries = [Entry.from_json(value) for value in message["entries"]]
            self._tally.add_bucket(entries, bucket.numel())
            yield from unpack(bucket, entries)
            _finish_reading(bucket)
            channel.send({"done": message["bucket"]})
        self._tally.check_end(message["end"])
        self._ended = True
        channel.send({"done": "end"})

    def sent_fingerprints(self) -> Mapping[str, int]:
        return self._tally.fingerprints

    def close(self) -> None:
        if self._channel is not None:
            self._channel.leave(self._ended)
        self._channel = None


@dataclass(slots=True, eq=False)
class _Slot:
    """A bucket's memory on the sending side, and how another process gets it: a file descriptor, or a CUDA handle."""

    number: int  # unique among the sender's slots, also over time
    memory: torch.Tensor
    descriptor: int | None
    handle: str | None

    @classmethod
    def make(cls, number: int, num_bytes: int, device: torch.device) -> _Slot:
        if device.type == "cuda":
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return cls(number, memory, None, _cuda_handle(memory))
        descriptor = os.memfd_create("rollout-policy", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        return cls(number, memory, descriptor, None)

    def written(self) -> None:
        """Returns once everything written is there for other processes."""
        _finish_reading(self.memory)

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


def _open(num_bytes: int, handle: str | None, descriptor: int | None) -> torch.Tensor:
    """A sender's bucket in this process."""
    if handle is not None:
        rebuild, arguments = pickle.loads(base64.b64decode(handle))
        return rebuild(*arguments)
    if descriptor is None:
        raise TransportError("the sender announced memory and sent no file descriptor with it")
    try:  # private: nothing that is written here by mistake reaches the others
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _cuda_handle(memory: torch.Tensor) -> str:
    from torch.multiprocessing.reductions import reduce_tensor

    return base64.b64encode(pickle.dumps(reduce_tensor(memory))).decode()


def _finish_reading(memory: torch.Tensor) -> None:
    """Work on a CUDA bucket is queued: other processes must not touch it before it is done."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()
