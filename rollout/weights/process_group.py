"""A torch.distributed group of a sender and its receivers, apart from the default group of either side."""
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# torch's stubs leave out what torch.distributed exports at run time, and the options of the gloo backend.

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rollout.errors import TransportError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL, Store, TCPStore

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


class Group:
    """One member of a group of `size`. Made when all members have come, within `timeout`, which also limits every
    operation.

    `host` is an address of the sender: the group's connections use the network that leads there. Nothing of
    torch.distributed's global state is touched. Raises `TransportError`.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, host: str, timeout: float) -> None:
        self._device = device
        self._timeout = timedelta(seconds=timeout)
        make = self._nccl if backend_of(device) == "nccl" else self._gloo
        # Nothing else may refer to these, not even a traceback's frames: connections are closed when they go.
        self._group: Any = guarded(lambda: make(store, rank, size, host), f"joining the {backend_of(device)} group")
        self._work: dict[int, Any] = {}
        self._numbers = itertools.count()

    def begin_broadcast(self, tensor: torch.Tensor) -> int:
        """Begins to send what rank 0 has in `tensor` into the others' `tensor`; returns what `wait_for` needs.

        Raises `TransportError`.
        """
        if self._group is None:
            raise TransportError("the group is closed")
        number = next(self._numbers)
        self._work[number] = guarded(lambda: self._group.broadcast(tensor, 0), "broadcasting")
        return number

    def wait_for(self, number: int) -> None:
        """Returns when a broadcast is done, on the device too. Raises `TransportError`."""
        guarded(lambda: self._work[number].wait(self._timeout), "broadcasting")
        self._work.pop(number, None)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Leaves. Others that still wait for this member fail at once."""
        self._work.clear()
        self._group = None

    def _gloo(self, store: Store, rank: int, size: int, host: str) -> ProcessGroupGloo:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(host))]
        options._timeout = self._timeout
        return ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: Store, rank: int, size: int, host: str) -> ProcessGroupNCCL:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return ProcessGroupNCCL(store, rank, size, options)


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
