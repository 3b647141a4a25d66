"""What vLLM's modules for servers hold, for those who import them: addresses, and a transfer that is not here."""

from __future__ import annotations

import socket
from typing import Any, NoReturn


def get_ip() -> str:
    """An address of this machine at which others reach it; the loopback where it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # a documentation address: nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def refuse_nccl(*_: Any, **__: Any) -> NoReturn:
    """Stands in for vLLM's sending of weights over NCCL. Raises `ValueError`."""
    raise ValueError(
        "vllm_mode='server' sends weights over NCCL to a vLLM server, which rollout.compat does not stand in for: use "
        "vllm_mode='colocate', where the engine is in the trainer's process"
    )
