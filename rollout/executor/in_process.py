"""One worker in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.config import EngineConfig
from rollout.core.schedule import DraftPlan, SchedulePlan, StepResult
from rollout.worker.worker import Worker

_ENGINE_ONLY = {
    "execute": "LLM.generate",
    "propose_drafts": "LLM.generate",
    "sleep": "LLM.sleep",
    "resize_kv_cache": "LLM.resize_kv_cache",
    "reload_weights": "LLM.reload_weights",
    "remake_quantized_weights": "LLM.reload_weights",
}


class InProcessExecutor:
    """Calls its worker directly. Other executors offer the same methods."""

    def __init__(
        self, config: EngineConfig, folder: Path, on_tensor: Callable[[str], None] | None = None, rank: int = 0
    ) -> None:
        self.worker = _worker_class(config.worker_extension_cls)(config, folder, on_tensor, rank)

    def execute(self, plan: SchedulePlan) -> StepResult:
        return self.worker.execute(plan)

    def propose_drafts(self, plan: DraftPlan) -> dict[str, list[int]]:
        return self.worker.propose_drafts(plan)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls `method` on every worker: a method's name, or a callable that gets the worker first.

        Returns the results in rank order. An error of the method is raised here. `timeout` cannot interrupt a call in
        the caller's own process, so that a value other than None raises `ValueError`. So do the methods that only the
        engine may call, since it must know of what they change.
        """
        if isinstance(method, str) and method in _ENGINE_ONLY:
            raise ValueError(f"method={method!r} cannot be called by RPC: use {_ENGINE_ONLY[method]} instead")
        if timeout is not None:
            raise ValueError(f"timeout={timeout!r} is not supported by a worker in this process: use None")
        keywords = dict(kwargs or {})
        if callable(method):
            return [method(self.worker, *args, **keywords)]
        if method.startswith("_") or not callable(getattr(self.worker, method, None)):
            raise ValueError(f"method={method!r} is not valid: {type(self.worker).__name__} has no such public method")
        return [getattr(self.worker, method)(*args, **keywords)]


def _worker_class(extension: str | None) -> type[Worker]:
    """The worker class with the user's extension mixed in; its methods see the worker as `self`.

    Raises `ValueError` where the name cannot be imported, or the extension would replace an attribute of the worker.
    """
    if extension is None:
        return Worker
    module_name, _, class_name = extension.replace(":", ".").rpartition(".")
    try:
        extension_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"worker_extension_cls={extension!r} is not valid: {error}") from error
    clashes = sorted(name for name in vars(extension_class) if not name.startswith("__") and hasattr(Worker, name))
    if clashes:
        raise ValueError(f"worker_extension_cls={extension!r} would replace: {', '.join(clashes)}")
    return type("ExtendedWorker", (Worker, extension_class), {})
