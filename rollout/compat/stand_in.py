"""A module that stands in `sys.modules` for one of vLLM's, and carries what the engine is to be made with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "vllm"


class StandIn(ModuleType):
    """`names` are what it holds; `engine_options` fields of `EngineConfig` that win over a trainer's arguments.

    It has a `__spec__` and, as every package, a `__path__`, since that is what `importlib.util.find_spec` and
    `import vllm.…` look at; nothing is found on that path.
    """

    def __init__(self, name: str, names: Mapping[str, Any], engine_options: Mapping[str, Any]) -> None:
        super().__init__(name, f"Stands in for {name}: put here by rollout.compat.install().")
        self.__spec__ = ModuleSpec(name, loader=None, origin="rollout.compat", is_package=True)
        self.__path__: list[str] = []
        self.engine_options = dict(engine_options)
        vars(self).update(names)


def installed_options() -> dict[str, Any]:
    """The options that `install` was given; none where it was not called."""
    module = sys.modules.get(NAME)
    return dict(module.engine_options) if isinstance(module, StandIn) else {}
