"""The worker processes of an engine and the talk with them: messages out, answers in, ends noticed.

Not for several threads at once: whoever calls holds the engine's lock. `interrupt` and `kill_silent` are for those who
cannot get it, since a worker that does not answer keeps its holder waiting.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from rollout.engine.bucket import SharedBucket
from rollout.engine.messages import (
    Command,
    EngineState,
    Loaded,
    Numbered,
    Reply,
    StepFailed,
    StepOutputs,
    Stop,
    decode_answer,
    encode,
)
from rollout.errors import EngineClosedError, WorkerDiedError
from rollout.executor.process import WorkerProcess

T = TypeVar("T")

_GRACE_SECONDS = 5.0  # that a process has to end by itself
_LAST_MESSAGES_MS = 200  # that messages of a process that has ended may take to get here


class NoAnswerError(TimeoutError):
    """Some ranks have not answered in time."""

    def __init__(self, seconds: float, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        super().__init__(f"no answer after {seconds} s from rank {', '.join(map(str, ranks))}")


class WorkerGroup:
    """The processes of ranks 0, 1, ... behind one socket each.

    `inbox` holds, in the order of arrival, what the workers' steps sent and nobody has taken yet; `states` what each
    rank's engine last said of itself.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Starts a process for each of `environments`: what is added to this process's environment variables."""
        self.bucket = SharedBucket.create()
        self.inbox: deque[tuple[int, StepOutputs | StepFailed]] = deque()
        self.states = [EngineState()] * len(environments)
        self._on_tensor: Callable[[str], None] | None = None
        self._died: WorkerDiedError | None = None
        self._numbers = itertools.count()
        self._awaited: dict[int, int] = {}  # numbers of messages whose reply somebody waits for, and the rank's
        self._is_closing = False
        self._closing_lock = threading.Lock()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable once nobody shall wait any more
        self._replies: dict[int, Reply] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="rollout-"))
        self._context = zmq.Context()
        self._processes: list[WorkerProcess] = []
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.close = weakref.finalize(
            self,
            _end,
            os.getpid(),
            self._context,
            self._sockets,
            self._processes,
            self._folder,
            self.bucket,
            self._alarm,
        )
        self._poller.register(self._alarm, zmq.POLLIN)
        try:
            for rank, environment in enumerate(environments):
                address = self._folder / str(rank)
                socket = self._context.socket(zmq.DEALER)
                socket.set_hwm(0)
                socket.setsockopt(zmq.RECONNECT_IVL, 20)  # milliseconds
                socket.connect(f"ipc://{address}")  # the worker binds: so messages wait for it instead of blocking
                self._sockets.append(socket)
                process = WorkerProcess(rank, address, self.bucket.descriptor, environment)
                self._processes.append(process)
                self._poller.register(socket, zmq.POLLIN)
                self._poller.register(process.fileno, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    @property
    def num_ranks(self) -> int:
        return len(self._sockets)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def number(self) -> int:
        """A number for a message."""
        return next(self._numbers)

    @property
    def is_alive(self) -> bool:
        """Every process runs, as far as is known."""
        return self.close.alive and self._died is None

    @property
    def is_closing(self) -> bool:
        """`interrupt` was called: nobody is to wait."""
        return self._is_closing

    def check_alive(self) -> None:
        """Raises `EngineClosedError` after `interrupt` or `close`, `WorkerDiedError` once a process has ended."""
        if self._is_closing:
            raise _closed()
        self._check_not_ended()

    def _check_not_ended(self) -> None:
        if not self.close.alive:
            raise _closed()
        if self._died is not None:
            raise WorkerDiedError(str(self._died), self._died.rank, self._died.exit_code)

    def interrupt(self) -> None:
        """Lets whoever waits for workers raise `EngineClosedError`, since `close` comes next. For any thread."""
        with self._closing_lock:
            if not self._is_closing and self.close.alive:
                os.eventfd_write(self._alarm, 1)
            self._is_closing = True

    def kill_silent(self, ranks: Collection[int], why: str) -> None:
        """Kills the processes of `ranks`, or, where there are none, of those whose reply is awaited just now.

        Their end is noticed as that of any process, also by whoever waits for them. For any thread.
        """
        awaited = dict(self._awaited)
        for rank in ranks or {awaited[number] for number in awaited.keys() - set(self._replies)}:
            self._processes[rank].kill(why)

    def send(self, rank: int, command: Command) -> None:
        self._sockets[rank].send(encode(command))

    def send_to_living(self, command: Command) -> None:
        """To every rank whose process runs; to none after `close`."""
        for process in self._processes:
            if self.close.alive and process.exit_code is None:
                self.send(process.rank, command)

    def ask(self, commands: Mapping[int, Numbered], kind: type[T], timeout: float | None = None) -> list[T]:
        """Sends each rank its message and waits for all replies. Returns them in rank order.

        Raises the error of the lowest rank that has one, once all have answered. See `ask_each` for the others.
        """
        answers = self.ask_each(commands, kind, timeout)
        values: list[T] = []
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
            values.append(answer)
        return values

    def ask_each(
        self, commands: Mapping[int, Numbered], kind: type[T], timeout: float | None = None
    ) -> dict[int, T | BaseException]:
        """Like `ask`, but returns what each rank said, be it a value or an error, by rank in order.

        Raises `WorkerDiedError` at once when a process ends, `NoAnswerError` naming the ranks that have not answered
        after `timeout` seconds, `EngineClosedError` after `interrupt`. A reply that comes later is dropped.
        """
        self.check_alive()
        deadline = None if timeout is None else time.monotonic() + timeout
        numbers = {rank: commands[rank].number for rank in sorted(commands)}
        self._awaited.update({number: rank for rank, number in numbers.items()})
        try:
            for rank in numbers:
                self.send(rank, commands[rank])  # type: ignore[arg-type]  # every numbered message is a command
            while not self._replies.keys() >= set(numbers.values()):
                self.check_alive()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    missing = [rank for rank, number in numbers.items() if number not in self._replies]
                    raise NoAnswerError(timeout or 0.0, missing)
                self.receive(left)
            replies = {rank: self._replies[number] for rank, number in numbers.items()}
        finally:
            for number in numbers.values():
                del self._awaited[number]
                self._replies.pop(number, None)
        return {rank: _value(reply, kind, rank) for rank, reply in replies.items()}

    def start(
        self, commands: Mapping[int, Numbered], kind: type[T], on_tensor: Callable[[str], None] | None
    ) -> list[T]:
        """Like `ask`, for the messages that load the weights; `on_tensor` gets the names that rank 0 has loaded."""
        self._on_tensor = on_tensor
        try:
            return self.ask(commands, kind)
        finally:
            self._on_tensor = None

    def receive(self, timeout: float | None = None) -> None:
        """Waits until something comes, at most so many seconds, and sorts it. `interrupt` ends the waiting.

        When that is the end of a process, the next call raises `WorkerDiedError`: its last messages are there first.
        """
        self._check_not_ended()
        ready = {source for source, _ in self._poller.poll(None if timeout is None else int(timeout * 1000) + 1)}
        for rank, socket in enumerate(self._sockets):
            if socket in ready:
                self._read(rank, 0)
        for process in self._processes:
            if process.fileno in ready:
                self._read(process.rank, _LAST_MESSAGES_MS)
                self._died = WorkerDiedError(process.describe_end(), process.rank, process.exit_code)

    def _read(self, rank: int, patience_ms: int) -> None:
        """Takes every message that is there, or comes within `patience_ms` of the last."""
        socket = self._sockets[rank]
        while socket.poll(patience_ms):
            answer = decode_answer(socket.recv())
            if isinstance(answer, Reply):
                self.states[rank] = answer.state
                if answer.number in self._awaited:
                    self._replies[answer.number] = answer
            elif isinstance(answer, Loaded):
                if rank == 0 and self._on_tensor is not None:
                    self._on_tensor(answer.name)
            else:
                self.inbox.append((rank, answer))


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine's worker processes were ended by close(): make a new LLM")


def _value(reply: Reply, kind: type[T], rank: int) -> T | BaseException:
    if reply.fault is not None:
        return reply.fault.error(rank)
    return msgspec.msgpack.decode(reply.value, type=kind)


def _end(
    owner: int,
    context: zmq.Context[zmq.Socket[bytes]],
    sockets: list[zmq.Socket[bytes]],
    processes: list[WorkerProcess],
    folder: Path,
    bucket: SharedBucket,
    alarm: int,
) -> None:
    """Ends the processes, and gives back sockets, descriptors and the folder. Nothing in a fork of the owner."""
    if os.getpid() != owner:
        return
    for socket in sockets:
        socket.send(encode(Stop()))
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        process.end(max(0.0, deadline - time.monotonic()))
    context.destroy(linger=0)
    os.close(alarm)
    shutil.rmtree(folder, ignore_errors=True)
    bucket.close()
