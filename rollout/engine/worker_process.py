"""The process of one replica: an `EngineCore` behind a socket, stepping as long as it has something to do.

    python -m rollout.engine.worker_process <socket> <parent's pid> <descriptor of the shared bucket>

Messages are taken between steps. The process ends when it is told to, and when its parent is gone.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rollout.engine.bucket import SharedBucket
from rollout.engine.core import EngineCore
from rollout.engine.faults import Fault
from rollout.engine.messages import (
    Abort,
    Add,
    Answer,
    Call,
    Command,
    EngineState,
    Family,
    Finish,
    Loaded,
    Numbered,
    OpenUpdate,
    Proceed,
    Ready,
    Reply,
    Rpc,
    Start,
    StepFailed,
    Stop,
    Update,
    decode_command,
    encode,
)
from rollout.engine.transfer import Reporter, Unpacker
from rollout.engine.update_on_rank import UpdateOnRank
from rollout.models.registry import ModelRegistry
from rollout.request import FinishReason, Request

# The engine's methods that `Call` may name, with plain values as arguments and results.
METHODS: dict[str, Callable[..., Any]] = {
    "check_ready": EngineCore.check_ready,
    "check_running": EngineCore.check_running,
    "mark_unusable": EngineCore.mark_unusable,
    "memory_ledger": EngineCore.memory_ledger,
    "reset_prefix_cache": EngineCore.reset_prefix_cache,
    "sleep": EngineCore.sleep,
    "snapshots": EngineCore.snapshots,
    "verify": EngineCore.verify,
    "wake_up": EngineCore.wake_up,
}


class Replica:
    """The engine of this process and the requests that were given to it."""

    def __init__(self, socket: zmq.Socket[bytes], bucket: SharedBucket) -> None:
        self._socket = socket
        self._bucket = bucket
        self._reporter = Reporter()
        self._unpacker = Unpacker()
        self._engine: EngineCore | None = None
        self._update: UpdateOnRank | None = None
        self._halted = False  # a step failed: no more before the other side has heard of it and says so

    def run(self) -> None:
        """Serves until `Stop`."""
        while True:
            runnable = self._runnable_engine()
            while self._socket.poll(None if runnable is None else 0):
                command = decode_command(self._socket.recv())
                if isinstance(command, Stop):
                    return
                self._handle(command)
                runnable = self._runnable_engine()
            if runnable is not None:
                self._step(runnable)

    def _runnable_engine(self) -> EngineCore | None:
        """The engine, if it has something to do and may do it."""
        engine = self._engine
        if engine is None or self._halted or not engine.has_unfinished or engine.is_held:
            return None
        return engine

    def _send(self, answer: Answer) -> None:
        self._socket.send(encode(answer))

    def _step(self, engine: EngineCore) -> None:
        try:
            outputs = self._reporter.outputs(engine.step())
        except Exception as error:  # noqa: BLE001 - a process boundary: the caller raises it
            self._halted = True
            self._send(StepFailed(Fault.of(error)))
            return
        if outputs is not None:
            self._send(outputs)

    def _handle(self, command: Command) -> None:
        """Does what a message asks for, and answers it where it has a number, also when it fails."""
        if isinstance(command, Finish):
            self._finish(command.handle)
        elif isinstance(command, Proceed):
            self._halted = False
        elif isinstance(command, Numbered):
            value, fault = msgspec.Raw(encode(None)), None
            try:
                value = msgspec.Raw(encode(self._answer(command)))
            except BaseException as error:  # noqa: BLE001 - a process boundary: the caller raises it
                fault = Fault.of(error)
            self._send_ended()
            self._send(Reply(command.number, self._state(), value, fault))

    def _answer(self, command: Numbered) -> Any:
        if isinstance(command, Start):
            return self._start(command)
        engine = self._engine
        assert engine is not None, "the first message must be Start"
        if isinstance(command, Add):
            return self._add(engine, command)
        if isinstance(command, Abort):
            requests = filter(None, map(self._reporter.request, command.handles))
            engine.abort([request.request_id for request in requests])
            return None
        if isinstance(command, OpenUpdate):
            self._update = UpdateOnRank(engine, self._bucket)
        if isinstance(command, Update):
            assert self._update is not None, "the first message of an update must be OpenUpdate"
            return self._update.answer(command)
        if isinstance(command, Rpc):
            method, args, kwargs = pickle.loads(command.payload)
            (result,) = engine.collective_rpc(method, None, args, kwargs)
            return pickle.dumps(result)
        assert isinstance(command, Call), command
        return METHODS[command.method](engine, *command.arguments)

    def _start(self, start: Start) -> Ready:
        for name, model_class in pickle.loads(start.architectures).items():
            ModelRegistry.register_model(name, model_class)
        engine = EngineCore(start.config, Path(start.folder), self._tell_loaded, start.rank)
        self._engine = engine
        assert engine.receipt is not None
        return Ready(engine.vocab_size, engine.scheduler.config, engine.receipt)

    def _tell_loaded(self, name: str) -> None:
        self._send(Loaded(name))

    def _add(self, engine: EngineCore, command: Add) -> None:
        families = [self._unpacker.requests(family, self._parent(family)) for family in command.families]
        engine.add(requests[0] for requests in families)
        for family, requests in zip(command.families, families, strict=True):
            for sample, request in zip(family.samples, requests, strict=True):
                self._reporter.add(sample.handle, request)

    def _parent(self, family: Family) -> Request | None:
        """The request that a message's requests are forks of, while it is unfinished."""
        return None if family.forked_from is None else self._reporter.request(family.forked_from)

    def _finish(self, handle: int) -> None:
        request = self._reporter.request(handle)
        if request is not None and self._engine is not None:
            self._engine.scheduler.finish(request, FinishReason.STOP)
            self._reporter.forget(request)

    def _send_ended(self) -> None:
        """Requests that ended in a call (aborted) are told before its answer."""
        if self._engine is not None:
            outputs = self._reporter.outputs(self._engine.take_ended())
            if outputs is not None:
                self._send(outputs)

    def _state(self) -> EngineState:
        engine = self._engine
        if engine is None:
            return EngineState()
        return EngineState(engine.policy_version, engine.sleeping_tags, engine.is_held, engine.holds_policy)


def end_with_parent(parent: int, folder: Path) -> None:
    """Waits for the end of the parent process, then ends this one and removes the folder of the sockets.

    Its end shows at the standard input, which is a pipe from it, or, where another of its children keeps that pipe
    open, by the process having got another parent.
    """
    while os.getppid() == parent:
        if select.select([sys.stdin.fileno()], [], [], 1.0)[0]:
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(arguments: list[str]) -> None:
    address, parent, bucket = Path(arguments[0]), int(arguments[1]), SharedBucket(int(arguments[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which decides
    threading.Thread(target=end_with_parent, args=(parent, address.parent), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.bind(f"ipc://{address}")
    Replica(socket, bucket).run()
    context.destroy(linger=0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # there is nothing left to do, and to take Python and torch down in order takes a second


if __name__ == "__main__":
    main(sys.argv[1:])
