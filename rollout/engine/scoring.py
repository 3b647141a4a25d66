"""Scoring given tokens: one request a sequence, which computes its prompt and samples nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout.engine.admission import Admission, LoRAChoice
from rollout.engine.collect import Group, prompt_logprobs_of
from rollout.engine.interface import Engine
from rollout.outputs import ScoreOutput
from rollout.prompts import Prompt
from rollout.request import FinishReason, Request
from rollout.sampling_params import SamplingParams


def submit_scores(
    engine: Engine,
    admission: Admission,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    choices: Sequence[LoRAChoice],
) -> list[Group]:
    """Queues a request for each sequence. Raises `ValueError`, and queues nothing, where one cannot be scored. The
    engine's lock is held."""
    for index, prompt in enumerate(prompts):
        problem = prompt.error or admission.problem(prompt, None)
        if problem is not None:
            raise ValueError(f"token_ids[{index}]: {problem}")
    engine.check_ready()
    requests = []
    for prompt, adapter in zip(prompts, engine.adapters_for(choices), strict=True):
        requests += admission.make_requests(prompt, params, 0, adapter, scores=True)
    return admission.submit([(prompt, [request]) for prompt, request in zip(prompts, requests, strict=True)])


def score_output(group: Group, tokenizer: PreTrainedTokenizerBase | None) -> ScoreOutput:
    """Raises `RuntimeError` where the sequence was not scored to its end."""
    request = group.samples[0]
    if request.finish_reason is not FinishReason.LENGTH:
        raise RuntimeError(_why_not_scored(request))
    logprobs = np.array(request.prompt_logprobs, np.float32)
    return ScoreOutput(request.prompt_token_ids, logprobs, prompt_logprobs_of(request, tokenizer))


def _why_not_scored(request: Request) -> str:
    """Why the scoring of a request's prompt has ended before all its tokens were scored."""
    if request.finish_reason is FinishReason.ERROR:
        return (
            "scoring ended with error: the model's logits were not numbers (NaN or infinite): either weights are not, "
            "or a computation overflows"
        )
    return f"scoring ended with {request.finish_reason}: the engine was put to sleep, or its policy replaced, meanwhile"
