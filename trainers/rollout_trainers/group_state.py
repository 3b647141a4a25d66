"""Groups of samples as plain values, for checkpoints: numbers, text, lists, and float32 tensors for the arrays."""

from __future__ import annotations

import json
from typing import Any

import torch

from rollout.outputs import CompletionOutput, PolicyVersionSpan, RequestOutput
from rollout_trainers.types import EpisodeNotes, Example, Sample

_ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
_EPISODE_ARRAYS = ("sampled_logprobs", "raw_logprobs", "entropy")
_PLAIN = ("index", "text", "token_ids", "finish_reason", "stop_reason", "seed", "sample_index")


def output_to_plain(output: RequestOutput) -> dict[str, Any]:
    """All of an output that `LLM.resume` and the trainers ask of it. It was asked for no logprobs beside the arrays."""
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "policy_version": output.policy_version,
        "receipt_ids": dict(output.receipt_ids),
        "samples": [_sample_to_plain(sample) for sample in output.outputs],
    }


def _sample_to_plain(sample: CompletionOutput) -> dict[str, Any]:
    return {
        **{name: getattr(sample, name) for name in _PLAIN},
        **{name: torch.from_numpy(getattr(sample, name).copy()) for name in _ARRAYS},
        "policy_versions": [list(span) for span in sample.policy_versions],
    }


def output_from_plain(values: dict[str, Any]) -> RequestOutput:
    """The output again, with the same bits."""
    samples = [_sample_from_plain(each) for each in values["samples"]]
    receipt_ids = dict(values["receipt_ids"])
    return RequestOutput(
        request_id=values["request_id"],
        prompt=None,
        prompt_token_ids=list(values["prompt_token_ids"]),
        outputs=samples,
        finished=all(sample.finish_reason is not None for sample in samples),
        policy_version=values["policy_version"],
        receipt_id=receipt_ids.get(values["policy_version"]),
        receipt_ids=receipt_ids,
    )


def _sample_from_plain(values: dict[str, Any]) -> CompletionOutput:
    arrays: dict[str, Any] = {name: values[name].numpy().copy() for name in _ARRAYS}
    spans = [PolicyVersionSpan(*span) for span in values["policy_versions"]]
    return CompletionOutput(**{name: values[name] for name in _PLAIN}, **arrays, policy_versions=spans)


def episode_to_plain(sample: Sample) -> dict[str, Any]:
    """An episode that has ended and that nobody has scored, without its example and its environment. What the
    environment has said becomes what JSON makes of it."""
    notes, mask = sample.episode, sample.loss_mask
    assert notes is not None and mask is not None
    return {
        "prompt_token_ids": list(sample.prompt_token_ids),
        "completion_token_ids": list(sample.completion_token_ids),
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        **{name: torch.from_numpy(getattr(sample, name).copy()) for name in _EPISODE_ARRAYS},
        "seed": sample.seed,
        "policy_version": sample.policy_version,
        "receipt_id": sample.receipt_id,
        "versions": [list(span) for span in sample.versions],
        "loss_mask": torch.from_numpy(mask.copy()),
        "messages": json.loads(json.dumps(notes.messages, default=str)),
        "turn_rewards": [float(reward) for reward in notes.turn_rewards],
        "turn_ends": list(notes.turn_ends),
        "metrics": {str(name): float(value) for name, value in notes.metrics.items()},
        "error": notes.error,
    }


def episode_from_plain(values: dict[str, Any], example: Example) -> Sample:
    """The episode again, with the same bits; its environment is gone."""
    arrays: dict[str, Any] = {name: values[name].numpy().copy() for name in _EPISODE_ARRAYS}
    return Sample(
        example=example,
        group=0,
        prompt_token_ids=list(values["prompt_token_ids"]),
        completion_token_ids=list(values["completion_token_ids"]),
        text=values["text"],
        finish_reason=values["finish_reason"],
        **arrays,
        seed=values["seed"],
        sample_index=0,
        policy_version=values["policy_version"],
        receipt_id=values["receipt_id"],
        versions=tuple(PolicyVersionSpan(*span) for span in values["versions"]),
        loss_mask=values["loss_mask"].numpy().copy(),
        episode=EpisodeNotes(
            messages=values["messages"],
            turn_rewards=list(values["turn_rewards"]),
            turn_ends=list(values["turn_ends"]),
            environment=None,
            metrics=dict(values["metrics"]),
            error=values["error"],
        ),
    )
