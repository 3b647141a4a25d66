"""What `LLM` asks of an engine: `EngineCore` in this process, or `EngineReplicas` with one in each of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from rollout.config import EngineConfig
from rollout.engine.core import EngineCore, Update
from rollout.engine.lock import FairLock
from rollout.engine.profile import StepProfile
from rollout.engine.replicas import EngineReplicas
from rollout.lora.manager import LoadedAdapter
from rollout.lora.request import LoRARequest
from rollout.metrics import EngineSnapshot
from rollout.models.causal_lm import CausalLM
from rollout.request import Request
from rollout.sampling_params import SamplingParams
from rollout.weights.receipt import Receipt
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import PolicyUpdate
from rollout.worker.ledger import LedgerReport, SleepReport, WakeReport


class Engine(Protocol):
    """See `EngineCore` for what each does. Callers hold `lock`, except for properties, `sleep`, `close`,
    `wait_while_held` and within `policy_update`.

    What `step` returns and `deliver` gets is to be gone through to its end, in order: an engine may change a request
    only when it is its turn.
    """

    config: EngineConfig
    lock: FairLock
    vocab_size: int
    max_model_len: int
    deliver: Callable[[Iterable[Update]], None]

    @property
    def policy_version(self) -> int: ...

    @property
    def receipt(self) -> Receipt | None: ...

    @property
    def is_sleeping(self) -> bool: ...

    @property
    def sleeping_tags(self) -> tuple[str, ...]: ...

    @property
    def is_held(self) -> bool: ...

    def wait_while_held(self, until: Callable[[], bool]) -> None: ...

    def check_running(self) -> None: ...

    def check_ready(self) -> None: ...

    def check_fits(self, request: Request) -> None: ...

    def check_grammar(
        self, params: SamplingParams, eos_token_ids: AbstractSet[int], output: Sequence[int] = ()
    ) -> None: ...

    def adapters_for(self, choices: Sequence[LoRARequest | str | None]) -> list[LoadedAdapter | None]: ...

    def add(self, requests: Iterable[Request]) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> object: ...

    def flush(self) -> None: ...

    def step(self) -> Iterable[Update]: ...

    def finish(self, request: Request, stop: str, num_output_tokens: int) -> None: ...

    def sleep(self, level: int, mode: InFlightMode, timeout: float | None) -> SleepReport: ...

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport: ...

    def policy_update(
        self, version: int | None, in_flight: InFlightMode, timeout: float | None, roll_back: bool
    ) -> PolicyUpdate: ...

    def verify(self) -> Receipt: ...

    def shared_model(self) -> CausalLM: ...

    def shared_drafter(self) -> nn.Module: ...

    def reset_prefix_cache(self) -> bool: ...

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]: ...

    def resize_kv_cache(self, num_bytes: int) -> int: ...

    def memory_ledger(self) -> LedgerReport: ...

    def snapshots(self) -> list[EngineSnapshot]: ...

    def profile(self) -> AbstractContextManager[list[StepProfile]]: ...

    def close(self) -> None: ...


def make_engine(config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None) -> Engine:
    """The engine that the configuration asks for; `on_tensor` gets the name of every tensor that was loaded."""
    if config.data_parallel_size == 1:
        return EngineCore(config, folder, on_tensor)
    return EngineReplicas(config, folder, on_tensor)
