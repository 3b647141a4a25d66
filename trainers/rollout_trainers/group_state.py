"""Groups of samples as plain values, for checkpoints: numbers, text, lists, and float32 tensors for the arrays."""

from __future__ import annotations

from typing import Any

import torch

from rollout.outputs import CompletionOutput, PolicyVersionSpan, RequestOutput

_ARRAYS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")
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
