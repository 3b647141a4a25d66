"""Every transport by name, and both ends of one in a single process: the sending end in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout.weights.broadcast import BroadcastReceiver, BroadcastSender
from rollout.weights.safetensors_folder import SafetensorsFolderReceiver, SafetensorsFolderSender
from rollout.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from rollout.weights.sparse_delta import SparseDeltaReceiver, SparseDeltaSender
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import NamedTensor, Sender, SendReport, Transport
from tests.support.recording_engine import RecordingEngine

CARRIERS = ("shared_memory", "broadcast", "folder")
SPARSE = tuple(f"sparse_over_{carrier}" for carrier in CARRIERS)
TRANSPORTS = (*CARRIERS, *SPARSE)
CONNECTED = tuple(name for name in TRANSPORTS if not name.endswith("folder"))  # both ends know of each other
_PREFIX = "sparse_over_"


class Ends:
    """A sender, and receivers of what it sends. `options` are the sender's; `timeout` is also the receivers'."""

    def __init__(self, name: str, folder: Path, *, timeout: float = 120.0, **options: Any) -> None:
        self.name = name
        self.timeout = timeout
        carrier = name.removeprefix(_PREFIX)
        if carrier == "folder":
            options.pop("num_receivers", None)
            options = {"max_file_bytes" if key == "bucket_bytes" else key: value for key, value in options.items()}
            self._carrier: Sender = SafetensorsFolderSender(folder / "policies", **options)
            self.where = str(folder / "policies")
        elif carrier == "broadcast":
            self._carrier = BroadcastSender(timeout=timeout, **options)
            self.where = self._carrier.address
        else:
            self._carrier = SharedMemorySender(folder / "ring", timeout=timeout, **options)
            self.where = str(folder / "ring")
        is_sparse = name.startswith(_PREFIX)
        self.sender = SparseDeltaSender(self._carrier, dtype=options.get("dtype")) if is_sparse else self._carrier

    def receiver(self, timeout: float | None = None) -> Transport:
        return receiver_of(self.name, self.where, self.timeout if timeout is None else timeout)


def receiver_of(name: str, where: str, timeout: float = 120.0) -> Transport:
    """The receiving end of the sender that said `where` it is."""
    if name.startswith(_PREFIX):
        return SparseDeltaReceiver(receiver_of(name.removeprefix(_PREFIX), where, timeout))
    if name == "broadcast":
        return BroadcastReceiver(where, timeout=timeout)
    return (SafetensorsFolderReceiver if name == "folder" else SharedMemoryReceiver)(where, timeout=timeout)


@contextmanager
def ends_of(name: str, folder: Path, **options: Any) -> Iterator[Ends]:
    ends = Ends(name, folder, **options)
    try:
        yield ends
    finally:
        ends.sender.close()


@contextmanager
def sending(sender: Sender, version: int, named: Iterable[NamedTensor]) -> Iterator[list[SendReport]]:
    """Sends while the block runs; the report is there after it. The sender's error is raised if the block has none."""
    report: list[SendReport] = []
    with ThreadPoolExecutor(max_workers=1) as thread:
        sent = thread.submit(sender.send, version, named)
        yield report
        report.append(sent.result(timeout=120))


@contextmanager
def failing_to_send(sender: Sender, version: int, named: Iterable[NamedTensor]) -> Iterator[list[BaseException]]:
    """Sends while the block runs, and must fail; the error is there after the block."""
    errors: list[BaseException] = []
    with ThreadPoolExecutor(max_workers=1) as thread:
        sent = thread.submit(sender.send, version, named)
        yield errors
        error = sent.exception(timeout=120)
        assert error is not None, "the sender did not fail"
        errors.append(error)


def transfer(
    engine: RecordingEngine, ends: Ends, named: Iterable[NamedTensor], version: int | None = None
) -> tuple[PolicyUpdate, SendReport]:
    """One policy through a transport into an engine: the finished update, and what the sender reports."""
    version = engine.policy_version + 1 if version is None else version
    with sending(ends.sender, version, named) as report, PolicyUpdate(engine, version) as update:
        update.load(ends.receiver())
    return update, report[0]


def overwriting(named: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yields one buffer again and again, filled with rubbish as soon as the next tensor is asked for."""
    pairs: Sequence[NamedTensor] = list(named)
    buffer = torch.empty(max(tensor.numel() for _, tensor in pairs), dtype=pairs[0][1].dtype)
    for name, tensor in pairs:
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(float("nan"))


class Counted:
    """Pairs that know how far they were asked for; `fail_at` raises in place of that one."""

    def __init__(self, named: Iterable[NamedTensor], fail_at: int | None = None) -> None:
        self._named = list(named)
        self._fail_at = fail_at
        self.count = 0

    def __iter__(self) -> Iterator[NamedTensor]:
        for pair in self._named:
            if self.count == self._fail_at:
                raise GatherError("a shard could not be gathered")
            self.count += 1
            yield pair

    @property
    def is_consumed(self) -> bool:
        return self.count == len(self._named)


class GatherError(Exception):
    """The trainer's own fault, in the middle of a policy."""
