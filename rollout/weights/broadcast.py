"""Over torch.distributed: flattened buckets, broadcast from a trainer's rank to every engine process.

    trainer ranks (their own group)                            engine processes (theirs, or none)
    sender.send(7, named)    ◄── {"version": 7} ────────────   update.load(BroadcastReceiver(sender.address))
      rank 0 sends               a new group: the sender is its rank 0, the receivers are 1 to N
      pack into bucket 0     ─── {"bucket": 0, "entries"} ──►
                             ═══ broadcast (gloo or NCCL) ══►    read, copy into the engine
      pack into bucket 1     ...                                 ...
      the policy's end       ─── {"end": fingerprint} ──────►  ── {"done": "end"} ──► send() returns

What is said goes over a connection of its own, so that either end notices at once when the other has gone; only bytes
go through the group. The group lives as long as one policy is on its way: processes may come and go between policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from rollout.errors import TransportError
from rollout.weights.buckets import Bucket, Entry, Tally, check_above_zero, only_consumed, send_policy, unpack
from rollout.weights.channel import Channel, Rendezvous, connect, greet, listen
from rollout.weights.process_group import Group, backend_of, hosted_store, joined_store
from rollout.weights.transport import HeldPolicy, NamedTensor, Sender, SendReport, Transport

_NUM_BUCKETS = 2


class BroadcastSender(Sender):
    """Sends policies to `num_receivers` engine processes, each of which reads with a `BroadcastReceiver`.

    `host` is the address of this machine at which they reach it: anybody who does can read the weights, as everywhere
    in torch.distributed. `address` is what the receivers are given. `device` says where the bytes are when they travel:
    "cpu" (gloo) or a CUDA device (NCCL), the same kind at both ends. `bucket_bytes` is the size of each of the two
    buckets; a larger tensor gets one of its own size. `dtype` casts floating-point tensors. `timeout` is the longest
    silence of a receiver, in seconds, also before the first one comes. `sends=False` is for the other ranks of a
    trainer, which only take part in gathering; they have no address.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        num_receivers: int = 1,
        bucket_bytes: int = 64 << 20,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        timeout: float = 120.0,
        sends: bool = True,
    ) -> None:
        check_above_zero(num_receivers=num_receivers, bucket_bytes=bucket_bytes, timeout=timeout)
        self.host = host
        self.address = ""
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._device = torch.device(device)
        self._timeout = timeout
        self._memory: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * _NUM_BUCKETS
        self._rendezvous: Rendezvous | None = None
        if sends:
            listener = listen(host, port)
            self.address = f"{host}:{listener.getsockname()[1]}"
            self._rendezvous = Rendezvous(listener, num_receivers, timeout)

    def send(self, version: int, named: Iterable[NamedTensor]) -> SendReport:
        if self._rendezvous is None:
            return only_consumed(named)
        session = _Session(self, self._rendezvous, version)
        return send_policy(session, named, self._bucket_bytes, self._dtype)

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
        self._memory = [torch.empty(0, dtype=torch.uint8)] * _NUM_BUCKETS


class _Session:
    """One policy on its way."""

    def __init__(self, sender: BroadcastSender, rendezvous: Rendezvous, version: int) -> None:
        self._sender = sender
        self._rendezvous = rendezvous
        self._version = version
        self._channels: list[Channel] = []
        self._group: Group | None = None
        self._broadcasts: list[int | None] = [None] * _NUM_BUCKETS
        self._num_taken = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next bucket's memory, once what was in it has been sent."""
        index = self._num_taken % _NUM_BUCKETS
        self._wait(index)
        memory = self._sender._memory
        if memory[index].numel() < num_bytes:
            memory[index] = torch.empty(0, dtype=torch.uint8)  # given back before the larger one is made
            memory[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._sender._device)
        self._num_taken += 1
        return memory[index]

    def announce(self, bucket: Bucket) -> None:
        group = self._joined()
        entries = [entry.as_json() for entry in bucket.entries]
        for channel in self._channels:
            channel.send({"bucket": self._num_taken - 1, "num_bytes": bucket.num_bytes, "entries": entries})
        if bucket.num_bytes:
            index = (self._num_taken - 1) % _NUM_BUCKETS
            self._broadcasts[index] = group.begin_broadcast(bucket.memory[: bucket.num_bytes])

    def end(self, told: Mapping[str, Any]) -> None:
        """Says that this was the whole policy, and waits until everybody has taken it over."""
        self._joined()
        for index in range(_NUM_BUCKETS):
            self._wait(index)
        for channel in self._channels:
            channel.send({"end": told})
        for channel in self._channels:
            channel.receive()
        self.close()

    def give_up(self, reason: str) -> None:
        if not self._channels:
            self._rendezvous.turn_away(reason)
        for channel in self._channels:
            channel.give_up(reason)
        self.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._group is not None:
            self._group.close()

    def _wait(self, index: int) -> None:
        number, self._broadcasts[index] = self._broadcasts[index], None
        if number is not None:
            self._joined().wait_for(number)

    def _joined(self) -> Group:
        """The group; its members are waited for when the first bucket is packed."""
        sender = self._sender
        if self._group is None:
            self._channels = self._rendezvous.join(self._version, backend=backend_of(sender._device))
            store = hosted_store(sender.host, sender._timeout)
            size = len(self._channels) + 1
            for rank, channel in enumerate(self._channels, start=1):
                channel.send({"port": store.port, "rank": rank, "size": size})
            self._group = Group(store, 0, size, sender._device, sender.host, sender._timeout)
        return self._group


class BroadcastReceiver(Transport):
    """Reads what the `BroadcastSender` at `address` sends. `device` is where the bytes arrive, see there.

    `timeout` is the longest silence of the sender, in seconds, also until it begins to send.
    """

    def __init__(self, address: str, *, device: str | torch.device = "cpu", timeout: float = 120.0) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"address={address!r} is not valid: it must be 'host:port', the sender's `address`")
        self._host, self._port = host, int(port)
        self._device = torch.device(device)
        self._timeout = timeout
        self._version: int | None = None
        self._tally = Tally()
        self._ended = False
        self._channel: Channel | None = None
        self._group: Group | None = None
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, version: int, held: HeldPolicy) -> None:
        self._version = version
        self._timeout = held.limit(self._timeout)

    def tensors(self) -> Iterator[NamedTensor]:
        connection = connect(self._host, self._port, self._timeout)
        channel = greet(connection, self._timeout, self._version, backend=backend_of(self._device))
        self._channel = channel
        place, _ = channel.receive()
        store = joined_store(self._host, place["port"], self._timeout)
        self._group = Group(store, place["rank"], place["size"], self._device, self._host, self._timeout)
        memory = [torch.empty(0, dtype=torch.uint8, device=self._device)] * _NUM_BUCKETS
        for message, bucket in self._buckets(channel, self._group, memory):
            entries = [Entry.from_json(value) for value in message["entries"]]
            self._tally.add_bucket(entries, bucket.numel())
            yield from unpack(bucket, entries)
        self._ended = True
        channel.send({"done": "end"})

    def sent_fingerprints(self) -> Mapping[str, int]:
        return self._tally.fingerprints

    def close(self) -> None:
        if self._channel is not None:
            self._channel.leave(self._ended)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        if self._group is not None:
            self._group.close()
        self._channel = self._group = self._thread = None

    def _buckets(
        self, channel: Channel, group: Group, memory: list[torch.Tensor]
    ) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Buckets with what was said of them; while one is read, the next one arrives."""

        def fetch(index: int) -> tuple[dict[str, Any], torch.Tensor]:
            message, _ = channel.receive()
            num_bytes = message.get("num_bytes", 0)
            if memory[index].numel() < num_bytes:
                memory[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            bucket = memory[index][:num_bytes]
            try:
                if num_bytes:
                    group.wait_for(group.begin_broadcast(bucket))
            except TransportError:
                if channel.is_closed():
                    channel.receive()  # raises with the sender's reason, if it gave one
                raise
            return message, bucket

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-broadcast")
        index = 0
        arriving: Future[tuple[dict[str, Any], torch.Tensor]] = self._thread.submit(fetch, index)
        while True:
            message, bucket = arriving.result()
            if "end" in message:
                self._tally.check_end(message["end"])
                return
            if "entries" not in message:
                raise TransportError(f"the sender said something that is not known here: {sorted(message)}")
            index = (index + 1) % _NUM_BUCKETS
            arriving = self._thread.submit(fetch, index)
            yield message, bucket
            if bucket.is_cuda:  # copies out of it are queued, and the next fetch may write there
                torch.cuda.current_stream(bucket.device).synchronize()
