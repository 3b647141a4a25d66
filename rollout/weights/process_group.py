"""A torch.distributed group of a sender and its receivers, apart from the default group of either side."""
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# torch's stubs leave out what torch.distributed exports at run time, and the options of the gloo backend.

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

from rollout.errors import TransportError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL, Store, TCPStore, Work

    Group = ProcessGroupGloo | ProcessGroupNCCL

_Result = TypeVar("_Result")


def backend_of(device: torch.device) -> str:
    """Which library moves bytes between devices of this kind."""
    return "nccl" if device.type == "cuda" else "gloo"


def hosted_store(host: str, timeout: float) -> TCPStore:
    """A store for one group, reachable at `host` alone; its port is a free one."""
    from torch.distributed import TCPStore

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=timeout)
    store = TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store


def joined_store(host: str, port: int, timeout: float) -> TCPStore:
    """The store that the sender hosts. Raises `TransportError`."""
    from torch.distributed import TCPStore

    return guarded(lambda: TCPStore(host, port, None, False, timedelta(seconds=timeout)), "joining the group")


def make_group(store: Store, rank: int, size: int, device: torch.device, host: str, timeout: float) -> Group:
    """Returns when all `size` members have come. `timeout` limits that and every later operation.

    `host` is an address of the sender: the group's connections use the network that leads there. Nothing of
    torch.distributed's global state is touched. Raises `TransportError`.
    """
    if backend_of(device) == "nccl":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=timeout)
        return guarded(lambda: ProcessGroupNCCL(store, rank, size, nccl), "joining the NCCL group")
    from torch.distributed import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_own_address(host))]
    gloo._timeout = timedelta(seconds=timeout)
    return guarded(lambda: ProcessGroupGloo(store, rank, size, gloo), "joining the gloo group")


def broadcast(group: Group, tensor: torch.Tensor) -> Work:
    """Begins to send what the group's rank 0 has in `tensor` into the others' `tensor`. Raises `TransportError`."""
    return guarded(lambda: group.broadcast(tensor, 0), "broadcasting")


def wait_for(work: Work, device: torch.device, timeout: float) -> None:
    """Returns when an operation is done, on the device too. Raises `TransportError`."""
    guarded(lambda: work.wait(timedelta(seconds=timeout)), "broadcasting")
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def guarded(do: Callable[[], _Result], what: str) -> _Result:
    """Runs something of torch.distributed, which raises `RuntimeError` for whatever goes wrong between processes."""
    try:
        return do()
    except RuntimeError as error:
        raise TransportError(f"{what} failed: {str(error).splitlines()[0]}") from error


def _own_address(host: str) -> str:
    """This machine's address on the way to `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only chooses the route
        return probe.getsockname()[0]
