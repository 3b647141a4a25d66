"""Both ends of a transport in one process: the sending end in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import NamedTensor, Sender, SendReport, Transport
from tests.support.recording_engine import RecordingEngine


def transfer(
    engine: RecordingEngine,
    sender: Sender,
    receiver: Transport,
    named: Iterable[NamedTensor],
    version: int | None = None,
) -> tuple[PolicyUpdate, SendReport]:
    """One policy through a transport into an engine: the finished update, and what the sender reports."""
    version = engine.policy_version + 1 if version is None else version
    with sending(sender, version, named) as report, PolicyUpdate(engine, version) as update:
        update.load(receiver)
    return update, report[0]


@contextmanager
def sending(sender: Sender, version: int, named: Iterable[NamedTensor]) -> Iterator[list[SendReport]]:
    """Sends while the block runs; the report is there after it. The sender's error is raised if the block has none."""
    report: list[SendReport] = []
    with ThreadPoolExecutor(max_workers=1) as thread:
        sent = thread.submit(sender.send, version, named)
        yield report
        report.append(sent.result(timeout=120))


def send_error(sender: Sender, version: int, named: Iterable[NamedTensor]) -> ErrorOfSender:
    return ErrorOfSender(sender, version, named)


class ErrorOfSender:
    """A context in which a sender sends and fails; `error` is what it raised."""

    def __init__(self, sender: Sender, version: int, named: Iterable[NamedTensor]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._sent = self._thread.submit(sender.send, version, named)
        self.error: BaseException | None = None

    def __enter__(self) -> ErrorOfSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.error = self._sent.exception(timeout=120)
        self._thread.shutdown()
        assert self.error is not None, "the sender did not fail"


def overwriting(named: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yields one buffer again and again, filled with rubbish as soon as the next tensor is asked for."""
    pairs: Sequence[NamedTensor] = list(named)
    buffer = torch.empty(max(tensor.numel() for _, tensor in pairs), dtype=pairs[0][1].dtype)
    for name, tensor in pairs:
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(float("nan"))
