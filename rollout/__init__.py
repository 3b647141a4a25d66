"""The rollout engine: sampling for reinforcement learning of language models.

from rollout import LLM, SamplingParams

The names below are loaded when they are first used, so that `rollout.core`, the configuration and the command line can
be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from rollout.chat_template import PrefixReport, preserves_prefixes
    from rollout.config import EngineConfig
    from rollout.diagnosis import Cause, Diagnosis, SampleRecord, diagnose
    from rollout.llm import LLM, generate
    from rollout.lora.request import LoRARequest
    from rollout.models.registry import ModelRegistry
    from rollout.outputs import CompletionOutput, Logprob, PolicyVersionSpan, RequestOutput, ScoreOutput
    from rollout.sampling.processors import LogitsBatch
    from rollout.sampling_options import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
    from rollout.sampling_params import SamplingParams
    from rollout.session import Session, Turn, generate_sessions
    from rollout.speculation.config import SpeculativeConfig
    from rollout.tree import RolloutTree

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Cause",
    "CompletionOutput",
    "Diagnosis",
    "EngineConfig",
    "LoRARequest",
    "LogitsBatch",
    "Logprob",
    "ModelRegistry",
    "PolicyVersionSpan",
    "PrefixReport",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "RolloutTree",
    "SampleRecord",
    "SamplingParams",
    "ScoreOutput",
    "Session",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "Turn",
    "diagnose",
    "generate",
    "generate_sessions",
    "preserves_prefixes",
]

_MODULES = {
    "LLM": "rollout.llm",
    "BeamSearchOutput": "rollout.beam_search",
    "BeamSearchParams": "rollout.beam_search",
    "BeamSearchSequence": "rollout.beam_search",
    "Cause": "rollout.diagnosis",
    "CompletionOutput": "rollout.outputs",
    "Diagnosis": "rollout.diagnosis",
    "EngineConfig": "rollout.config",
    "LoRARequest": "rollout.lora.request",
    "LogitsBatch": "rollout.sampling.processors",
    "Logprob": "rollout.outputs",
    "ModelRegistry": "rollout.models.registry",
    "PolicyVersionSpan": "rollout.outputs",
    "PrefixReport": "rollout.chat_template",
    "RepetitionDetectionParams": "rollout.sampling_options",
    "RequestOutput": "rollout.outputs",
    "RequestOutputKind": "rollout.sampling_options",
    "RolloutTree": "rollout.tree",
    "SampleRecord": "rollout.diagnosis",
    "SamplingParams": "rollout.sampling_params",
    "ScoreOutput": "rollout.outputs",
    "Session": "rollout.session",
    "SpeculativeConfig": "rollout.speculation.config",
    "StructuredOutputsParams": "rollout.sampling_options",
    "Turn": "rollout.session",
    "diagnose": "rollout.diagnosis",
    "generate": "rollout.llm",
    "generate_sessions": "rollout.session",
    "preserves_prefixes": "rollout.chat_template",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
