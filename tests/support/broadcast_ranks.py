"""A trainer of two ranks and an engine of two processes, each pair in a default group of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rollout.errors import TransportError
from rollout.weights.broadcast import BroadcastReceiver, BroadcastSender
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import NamedTensor
from tests.support.recording_engine import NAMES, RecordingEngine, assert_holds, new_policy


def main(folder: Path) -> None:
    """Ranks 0 and 1 train, 2 and 3 serve."""
    rank = int(os.environ["RANK"])
    side = "trainer" if rank < 2 else "engine"
    dist.init_process_group("gloo", init_method=f"file://{folder}/{side}", rank=rank % 2, world_size=2)
    (train if side == "trainer" else serve)(folder, rank % 2)
    total = torch.ones(1)
    dist.all_reduce(total)  # the default group is as it was
    assert (total.item(), dist.get_world_size()) == (2, 2)


def train(folder: Path, rank: int) -> None:
    sender = BroadcastSender(num_receivers=2, bucket_bytes=2048, sends=rank == 0)
    if rank == 0:
        (folder / "address.part").write_text(sender.address)
        (folder / "address.part").rename(folder / "address")
    for version in (1, 2):
        report = sender.send(version, gathered(rank, version))
        assert report.num_tensors == len(NAMES)
        assert (report.num_bytes > 0) == (rank == 0)
    if rank == 0:
        with pytest.raises(TransportError):
            sender.send(3, gathered(rank, 3))
    else:
        sender.send(3, gathered(rank, 3))  # is not left waiting in a gather, although rank 0 failed
    sender.send(4, gathered(rank, 4))
    sender.close()


def gathered(rank: int, version: int) -> Iterator[NamedTensor]:
    """Each rank holds every second row; whole tensors are made by a collective of both."""
    for name, tensor in new_policy(RecordingEngine(), seed=version).items():
        parts = [torch.empty_like(tensor[::2].contiguous()) for _ in range(2)]
        dist.all_gather(parts, tensor[rank::2].contiguous())
        whole = torch.empty_like(tensor)
        whole[::2], whole[1::2] = parts
        yield name, whole


def serve(folder: Path, rank: int) -> None:
    while not (folder / "address").exists():
        time.sleep(0.05)
    address = (folder / "address").read_text()
    engine = RecordingEngine()
    for version in (1, 2, 3, 4):
        if version == 3:
            fail(engine, address, rank)
            continue
        with PolicyUpdate(engine, version) as update:
            update.load(BroadcastReceiver(address))
        assert_holds(engine, new_policy(RecordingEngine(), seed=version))
        receipts: list[str | None] = [None, None]
        dist.all_gather_object(receipts, update.receipt.id)
        assert receipts[0] == receipts[1] == update.receipt.id


def fail(engine: RecordingEngine, address: str, rank: int) -> None:
    """One engine process refuses a tensor; the other's update ends too, and neither serves a mixture."""
    kept = engine.tensors.pop(NAMES[3]) if rank == 1 else None
    with pytest.raises(Exception) as raised, PolicyUpdate(engine, 3) as update:  # noqa: PT011 - told apart below
        update.load(BroadcastReceiver(address))
    assert type(raised.value).__name__ == ("UnknownTensorError" if rank == 1 else "TransportError"), raised.value
    assert engine.policy_version == 2
    if kept is not None:
        engine.tensors[NAMES[3]] = kept
