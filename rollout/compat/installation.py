"""Puts stand-ins for vLLM's modules into `sys.modules` when asked to, and takes them out again."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from rollout.beam_search import BeamSearchParams
from rollout.compat.network import get_ip, get_open_port, refuse_nccl
from rollout.compat.stand_in import NAME, StandIn
from rollout.compat.vllm import LLM
from rollout.config import EngineConfig
from rollout.logprobs import Logprob
from rollout.lora.request import LoRARequest
from rollout.outputs import CompletionOutput, RequestOutput
from rollout.sampling_options import RequestOutputKind, StructuredOutputsParams
from rollout.sampling_params import SamplingParams

VERSION = "0.31.0"  # of vLLM: the newest that TRL 1.16 takes without a warning

_MODULES: dict[str, dict[str, Any]] = {
    NAME: {
        "__version__": VERSION,
        "LLM": LLM,
        "CompletionOutput": CompletionOutput,
        "RequestOutput": RequestOutput,
        "SamplingParams": SamplingParams,
    },
    "vllm.distributed": {},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": refuse_nccl},
    "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": refuse_nccl},
    "vllm.logprobs": {"Logprob": Logprob},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.outputs": {"CompletionOutput": CompletionOutput, "RequestOutput": RequestOutput},
    "vllm.sampling_params": {
        "BeamSearchParams": BeamSearchParams,
        "RequestOutputKind": RequestOutputKind,
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
    },
    "vllm.utils": {},
    "vllm.utils.network_utils": {"get_ip": get_ip, "get_open_port": get_open_port},
}
# Modules of TRL that look for vLLM once, when they are imported, and a name that they have where they found it.
_READERS = {
    "trl.generation.vllm_client": "get_ip",
    "trl.generation.vllm_generation": "LLM",
    "trl.experimental.online_dpo.online_dpo_trainer": "LLM",
}
_NOT_OPTIONS = {
    "model": "the trainer names it",
    "seed": "the trainer gives each of its processes another",
}


def install(**engine: Any) -> None:
    """From now on `import vllm` finds this engine, in this process, until `uninstall`.

        rollout.compat.install(kv_cache_memory="2GiB", dtype="float32")
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))

    Call it before TRL's trainers are imported. `engine` are fields of `EngineConfig` for which vLLM's arguments have no
    name, or another value; they win over what a trainer passes. A second call replaces them for engines made later.

    Raises `ValueError` for a field that there is not, and `RuntimeError` where vLLM itself, or a module of TRL that has
    looked for it in vain, has been imported already.
    """
    known = {field.name for field in fields(EngineConfig)}
    for field, value in engine.items():
        if field in _NOT_OPTIONS:
            raise ValueError(f"{field}={value!r} cannot be given to install(): {_NOT_OPTIONS[field]}")
        if field not in known:
            raise ValueError(f"{field}={value!r} is not a field of EngineConfig: {', '.join(sorted(known))} are")
    EngineConfig(model="", **engine)  # each must be valid by itself
    found = sys.modules.get(NAME)
    if found is not None and not isinstance(found, StandIn):
        raise RuntimeError(f"vLLM itself has been imported already ({found.__spec__}): call install() before")
    for reader, name in _READERS.items():
        if reader in sys.modules and name not in vars(sys.modules[reader]):
            raise RuntimeError(f"{reader} has been imported already, and has found no vllm: call install() before")
    for name, names in _MODULES.items():
        module = sys.modules[name] = StandIn(name, names, engine)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def uninstall() -> None:
    """Takes the stand-ins out of `sys.modules`; nothing happens where there are none. Who has imported names from them
    keeps those."""
    for name in _MODULES:
        if isinstance(sys.modules.get(name), StandIn):
            del sys.modules[name]
