"""`diagnose`: why a trainer's logprobs are not the sampler's, in a sentence with numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rollout.diagnosis.causes import Cause, Diagnosis, Part, summarize
from rollout.diagnosis.records import SampleRecord, make_cases, records_of
from rollout.diagnosis.scorers import CallableScorer, LogprobFunction, ModuleScorer, NamedTensors
from rollout.diagnosis.split import Findings, Splitter
from rollout.diagnosis.wording import sentence
from rollout.outputs import RequestOutput
from rollout.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rollout.llm import LLM

Trainer = LogprobFunction | torch.nn.Module

_WORTH_NAMING = 0.05  # share of the gap
_NOT_ROUNDING = 0.5  # of precision's part: what is left in float32 and is as much comes first, since it is a fault


def diagnose(
    llm: LLM,
    samples: Sequence[RequestOutput | SampleRecord],
    trainer: Trainer,
    *,
    parameters: NamedTensors | None = None,
    trainer_logprobs: Sequence[np.ndarray | Sequence[float]] | None = None,
    trainer_token_ids: Sequence[Sequence[int]] | None = None,
    trainer_version: int | None = None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    max_samples: int = 8,
    tolerance: float = 1e-4,
) -> Diagnosis:
    """See `LLM.diagnose`."""
    if isinstance(max_samples, bool) or not isinstance(max_samples, int) or max_samples < 1:
        raise ValueError(f"max_samples={max_samples!r} is not valid: it must be an integer of at least 1")
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance={tolerance!r} is not valid: it must be a finite number of at least 0")
    if not isinstance(trainer, torch.nn.Module) and not callable(trainer):
        raise ValueError(
            f"trainer={trainer!r} is not valid: it must be a torch module, or a function from lists of token ids to "
            "the logprobs of all tokens after the first"
        )
    if trainer_version is not None and (
        isinstance(trainer_version, bool) or not isinstance(trainer_version, int) or trainer_version < 0
    ):
        raise ValueError(
            f"trainer_version={trainer_version!r} is not valid: it must be an integer of at least 0, or None for the "
            "engine's"
        )
    _check_samples(samples)
    records = records_of(samples, sampling_params)
    cases = make_cases(records, trainer_logprobs, trainer_token_ids, _tokenizer(llm), max_samples)
    scorer = ModuleScorer(trainer) if isinstance(trainer, torch.nn.Module) else CallableScorer(trainer)
    splitter = Splitter(llm, cases, scorer, parameters, trainer_version, tolerance)
    found = splitter.run()
    parts, gap = summarize(found.parts)
    causes = _causes(parts, found, tolerance)
    return Diagnosis(
        parts=parts,
        gap=gap,
        causes=causes,
        sentence=sentence(causes, parts, gap, found, splitter),
        num_samples=len(splitter.cases),
        num_tokens=sum(case.num_tokens for case in splitter.cases),
        evidence=_evidence(found, splitter),
    )


def _check_samples(samples: object) -> None:
    takes = "samples must be a sequence of RequestOutput, as generate returns them, or of SampleRecord"
    if not isinstance(samples, Sequence):
        raise TypeError(f"{takes}, not {type(samples).__name__}")
    for index, sample in enumerate(samples):
        if not isinstance(sample, (RequestOutput, SampleRecord)):
            raise TypeError(f"{takes}: samples[{index}] is {sample!r}")


def _tokenizer(llm: LLM) -> PreTrainedTokenizerBase | None:
    try:
        return llm.get_tokenizer()
    except ValueError:  # its folder has none
        return None


def _causes(parts: dict[Cause, Part], found: Findings, tolerance: float) -> tuple[Cause, ...]:
    """What is worth naming, the largest first. Weights that are known to be wrong are, however small their part."""
    named = [cause for cause, part in parts.items() if part.max_abs > tolerance and part.share >= _WORTH_NAMING]
    pair = Cause.IMPLEMENTATION, Cause.PRECISION
    if set(pair) <= set(named) and parts[pair[0]].mean_abs >= _NOT_ROUNDING * parts[pair[1]].mean_abs:
        named.remove(Cause.IMPLEMENTATION)
        named.insert(named.index(Cause.PRECISION), Cause.IMPLEMENTATION)
    if found.weights_are_wrong and not {Cause.WRONG_WEIGHTS, Cause.POLICY_LAG} & set(named):
        named.append(Cause.WRONG_WEIGHTS)
    return (Cause.NOT_FINITE, *named) if found.not_finite is not None else tuple(named)


def _evidence(found: Findings, splitter: Splitter) -> dict[str, object]:
    evidence: dict[str, object] = {
        "samples": [case.index for case in splitter.cases],
        "policy_version": splitter.version,
        "trainer_version": splitter.trainer_version,
        "quantity": found.quantity.value,
        "tensors_differ": found.tensors_differ,
        "engine_changed": found.engine_changed,
        "retokenised": {case.index: case.first_difference() for case in splitter.cases if case.is_retokenised},
    }
    return evidence | found.evidence
