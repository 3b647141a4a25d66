"""What the engine asks of a CUDA device: memory and what the driver says of it, copies beside kernels, CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from rollout.platform.platform import Event
from rollout.worker.device_slab import SavedSlab, StorageSlab, installed_memory_saver
from rollout.worker.ledger import trim_heap
from rollout.worker.slab import Slab

_PoolHandle = Any  # what torch.cuda.graph_pool_handle() returns: opaque


def unavailable_reason() -> str | None:
    """Why there is no CUDA device to run on; None where there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (driver, or CUDA_VISIBLE_DEVICES)"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}: the kernels need 8.0 or newer"
    return None


class CudaPlatform:
    """The current CUDA device. Its numbers are the driver's: other processes on the device count too."""

    max_profile_tokens = None

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._saver = installed_memory_saver()

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def used_memory(self) -> int:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def reset_peak(self) -> bool:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return True

    def peak_memory(self) -> int:
        """What torch's allocator gave out at most, and what the driver says is taken besides: by libraries, graphs and
        other processes. What the allocator holds unused does not count, since it can be given back."""
        besides = self.used_memory() - torch.cuda.memory_reserved(self.device)
        return besides + torch.cuda.max_memory_allocated(self.device)

    def measure_peak(self, work: Callable[[], object]) -> int:
        work()  # the first time: kernels are compiled, libraries take their workspaces
        self.trim()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def trim(self) -> None:
        """Returns what torch's allocator holds unused to the driver, and unused heap to the operating system."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        trim_heap()

    def memory(self, owner: str, num_bytes: int, huge_pages: bool = True) -> StorageSlab | SavedSlab:
        """`huge_pages` says nothing on a device."""
        if self._saver is not None:
            return SavedSlab(owner, num_bytes, self.device, self._saver)
        return StorageSlab(owner, num_bytes, self.device)

    def host_memory(self, owner: str, num_bytes: int) -> PinnedSlab:
        return PinnedSlab(owner, num_bytes)

    def copies(self) -> CopyStream:
        return CopyStream(self.device)

    def step_capture(self) -> GraphCapture:
        return GraphCapture(self.device)


class PinnedSlab(Slab):
    """Host memory that the device reads and writes by itself: its pages are locked, from the start to `release`."""

    def __init__(self, owner: str, num_bytes: int) -> None:
        super().__init__(owner, num_bytes, huge_pages=False)
        self._locked = False
        self.resume()

    def resume(self) -> int:
        """Raises `RuntimeError` where the operating system does not let so many pages be locked."""
        if self._locked:
            return 0
        _check_runtime(_runtime().cudaHostRegister(self.address, self.num_bytes, 0))
        self._locked = True
        return self.num_bytes

    def release(self) -> None:
        if self._locked:
            torch.cuda.synchronize()  # no copy may still be under way
            _check_runtime(_runtime().cudaHostUnregister(self.address))
            self._locked = False
        super().release()


def _runtime() -> Any:
    """The functions of the CUDA runtime, which torch has loaded."""
    return torch.cuda.cudart()


def _check_runtime(result: Any) -> None:
    """Raises for an error code (an enum that converts to a number) of the CUDA runtime."""
    code = int(result)
    if code:
        raise RuntimeError(f"the CUDA runtime could not lock or unlock host memory (error {code})")


class CopyStream:
    """Copies from pinned memory on a stream of their own, so that they overlap kernels which do not need them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        buffer.record_stream(self._stream)  # it is written there: not to be reused before those copies are done
        return buffer

    def mark(self) -> Event:
        return torch.cuda.current_stream(self._device).record_event()

    def upload(self, host: torch.Tensor, device: torch.Tensor, after: Event) -> Event:
        assert isinstance(after, torch.cuda.Event)
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
            done = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(done)
        return done


class CapturedGraph:
    """A CUDA graph and the tensor that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


class GraphCapture:
    """Captures steps as CUDA graphs that share one memory pool: the output of one is valid until another is replayed.

    All captures and their warm-ups run on one stream of their own, as torch asks for graphs that share a pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: _PoolHandle | None = None
        self.num_bytes = 0

    def capture(self, step: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Runs `step` once, so that nothing is compiled or set up during the capture, then captures it."""
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            step()
        compute.wait_stream(self._stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = self._free_memory()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads do meanwhile (a trainer that allocates memory) does not break the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()
        # Other processes on the device may change the number meanwhile; the ledger's entry is then off by as much.
        self.num_bytes += max(0, before - self._free_memory())
        return CapturedGraph(graph, output)

    def reset(self) -> None:
        self._pool = None
        self.num_bytes = 0

    def _free_memory(self) -> int:
        """Free bytes of the device once the allocator holds nothing unused: a capture starts in this state."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]
