"""A process with the other end of a transport: a trainer that sends, or an engine that receives.

It does one command after the other: a JSON object a line on its standard input, and an answer for each on its standard
output. `PeerProcess` is its handle; the process ends with it, and with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.errors import PolicyUpdateError
from rollout.weights.sparse_delta import SparseDeltaSender
from rollout.weights.transaction import PolicyUpdate
from rollout.weights.transport import NamedTensor
from tests.support.recording_engine import RecordingEngine
from tests.support.transports import Ends, overwriting, receiver_of

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 300.0  # seconds until an answer must have come, on a machine that other work may have stopped meanwhile
_PR_SET_PDEATHSIG = 1


class PeerProcess:
    """A context in which the process runs. `tell` and `answer` are apart, since both ends of a transport must act."""

    def __init__(self) -> None:
        self._number = 0

    def __enter__(self) -> PeerProcess:
        paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "trainers"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transport_process"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def resume(self) -> None:
        """Ends a pause that the process has put itself into."""
        self._process.send_signal(signal.SIGCONT)

    def tell(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._number += 1
        self._process.stdin.write(
            json.dumps({"command": command, "number": self._number, **arguments}).encode() + b"\n"
        )

    def answer(self) -> dict[str, Any]:
        """To the last command; answers to earlier ones, which a failed test did not wait for, are passed over."""
        assert self._process.stdout is not None
        while True:
            ready, _, _ = select.select([self._process.stdout], [], [], _LIMIT)
            line = self._process.stdout.readline() if ready else b""
            assert line, f"the process gave no answer; exit code {self._process.poll()}"
            answer = json.loads(line)
            if answer["number"] == self._number:
                return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.tell(command, **arguments)
        return self.answer()


def policy(folder: str, form: str, stop_after: int | None, stop_by: str) -> Iterator[NamedTensor]:
    """A checkpoint's tensors as a trainer gives them, whole or spoilt in the way that `form` names."""
    weights = load_file(Path(folder) / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    if form == "placeholder":
        weights[name] = torch.empty(0)
    elif form == "narrow":
        weights[name] = weights[name][:, :-1]
    elif form == "missing":
        del weights[name]
    elif form == "wrapped":
        weights = {f"module._orig_mod.base_model.model.{key}": tensor for key, tensor in weights.items()}
    for index, pair in enumerate(overwriting(weights.items())):
        if index == stop_after:
            os.kill(os.getpid(), signal.Signals[stop_by])
        yield pair


def _send(ends: Ends, command: dict[str, Any]) -> dict[str, Any]:
    if command.get("whole") and isinstance(ends.sender, SparseDeltaSender):
        ends.sender.send_whole_next()
    named = policy(
        command["weights"], command.get("form", ""), command.get("stop_after"), command.get("stop_by", "SIGKILL")
    )
    report = ends.sender.send(command["version"], named)
    return {"fingerprint": report.fingerprint, "num_bytes": report.num_bytes}


def _receive(command: dict[str, Any]) -> dict[str, Any]:
    """An update of a small engine made for it."""
    engine = RecordingEngine()
    with PolicyUpdate(engine, command["version"]) as update:
        update.load(receiver_of(command["transport"], command["where"]))
    return {"fingerprint": update.receipt.parameters_fingerprint}


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    opened: dict[str, Ends] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any]
        try:
            if command["command"] == "open":
                ends = Ends(command["transport"], Path(command["folder"]), **command.get("options", {}))
                opened[command["transport"]] = ends
                answer = {"where": ends.where}
            elif command["command"] == "send":
                answer = _send(opened[command["transport"]], command)
            else:
                answer = _receive(command)
        except PolicyUpdateError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
            traceback.print_exc()
        print(json.dumps(answer | {"number": command["number"]}), flush=True)


if __name__ == "__main__":
    _main()
