"""User-defined worker extensions, named by their import path in tests, and functions for workers to call."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import torch

from rollout.engine.core import EngineCore
from rollout.worker.worker import Worker


class WorkerExtension:
    def scaled_layers(self: Worker, factor: int, plus: int = 0) -> int:  # type: ignore[misc]
        """Reads the worker that it is mixed into."""
        return self.model.shape.num_hidden_layers * factor + plus

    def rank_and_process(self: Worker) -> tuple[int, int]:  # type: ignore[misc]
        return self.rank, os.getpid()

    def fail_on_rank(self: Worker, rank: int, kind: type[Exception], message: str) -> str:  # type: ignore[misc]
        """Raises there, and works elsewhere."""
        if self.rank == rank:
            raise kind(message)
        return "fine"

    def sleep_on_rank(self: Worker, rank: int, seconds: float) -> int:  # type: ignore[misc]
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank


class ClashingExtension:
    def execute(self) -> None:
        """Has the name of a method that the worker needs."""


class OwnError(Exception):
    """A type that the engine does not know."""


def sum_of_parameter(worker: Worker, name: str) -> torch.Tensor:
    return worker.parameters()[name].sum()


def process_id(worker: Worker) -> int:
    return os.getpid()


def torch_threads(worker: Worker) -> int:
    return torch.get_num_threads()


def unpicklable_result(worker: Worker) -> object:
    return (number for number in range(3))


def kill_rank(worker: Worker, rank: int) -> None:
    """Kills the process of that rank, as the system does where memory runs out."""
    if worker.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def nap(worker: Worker, rank: int, seconds: float) -> None:
    if worker.rank == rank:
        time.sleep(seconds)


def end_soon(worker: Worker, rank: int, words: str, code: int) -> None:
    """Lets the process of that rank end by itself a moment later, saying why."""

    def end() -> None:
        print(words, file=sys.stderr, flush=True)
        os._exit(code)

    if worker.rank == rank:
        threading.Timer(0.2, end).start()


def fail_in_step(worker: Worker, rank: int, number: int) -> None:
    """Lets step `number` from now raise on that rank."""
    if worker.rank != rank:
        return
    execute, left = worker.execute, iter(range(number - 1))

    def failing(plan):
        if next(left, None) is None:
            worker.execute = execute
            raise OSError("the device fell off the bus")
        return execute(plan)

    worker.execute = failing


def delay_steps(worker: Worker, seconds: float) -> None:
    """Lets every step take so much longer; 0 ends it."""
    if not seconds:
        del worker.execute
        return
    execute = worker.execute

    def slowly(plan):
        time.sleep(seconds)
        return execute(plan)

    worker.execute = slowly


def fail_once(worker: Worker, rank: int, method: str) -> None:
    """Lets the next call of a method of that rank's worker raise."""
    if worker.rank == rank:
        fail_once_in(worker, method, rank)


def fail_once_in(thing: object, method: str, rank: int) -> None:
    def failing(*_: object, **__: object) -> None:
        delattr(thing, method)
        raise OSError(f"{method} fails on rank {rank}")

    setattr(thing, method, failing)


def fail_engine_once(worker: Worker, rank: int, method: str) -> None:
    """The same for a method of the engine whose worker it is."""
    if worker.rank == rank:
        (engine,) = (o for o in gc.get_objects() if isinstance(o, EngineCore) and o.executor.worker is worker)
        fail_once_in(engine, method, rank)


def add_to_parameter(worker: Worker, rank: int, name: str) -> None:
    """Changes a parameter behind the engine's back, on that rank."""
    if worker.rank == rank:
        with torch.no_grad():
            worker.parameters()[name].add_(1)
