"""What a sample begins with that does not begin at its prompt's end: a resumed one, or a fork of another."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.outputs import CompletionOutput
from rollout.request import Request

COLUMNS = ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy")


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first output tokens of a sample, with all that was told of them.

    `columns` hold one float32 value a token, in the order of `COLUMNS`; `policy_spans` are (version, first token).
    The other fields are those of `Request`.
    """

    token_ids: list[int]
    columns: list[array[float]]
    policy_spans: list[tuple[int, int]]
    num_forced_tokens: int
    parent: tuple[str, int] | None = None
    branch_position: int = 0
    forked_from: Request | None = None

    @classmethod
    def of_output(cls, output: CompletionOutput) -> Beginning:
        """All of an output. Raises `ValueError` where an array has not one value a token."""
        columns = []
        for name in COLUMNS:
            values = np.ascontiguousarray(getattr(output, name), np.float32)
            if values.shape != (len(output.token_ids),):
                raise ValueError(f"{name} has the shape {values.shape} for {len(output.token_ids)} tokens")
            columns.append(array("f", values.tobytes()))
        return cls(
            token_ids=list(output.token_ids),
            columns=columns,
            policy_spans=[(span.version, span.start) for span in output.policy_versions],
            num_forced_tokens=output.num_forced_tokens,
            parent=output.parent,
            branch_position=output.branch_position,
        )

    @classmethod
    def of_request(cls, request: Request) -> Beginning:
        """All that a request has by now."""
        return cls(
            token_ids=request.output_token_ids,
            columns=[values[: request.num_output_tokens] for values in request.arrays],
            policy_spans=list(request.policy_spans),
            num_forced_tokens=min(request.num_forced_tokens, request.num_output_tokens),
            parent=request.parent,
            branch_position=request.branch_position,
        )

    def branch(self, at: int, parent: tuple[str, int], forked_from: Request | None) -> Beginning:
        """That of a fork after `at` tokens of the sample `parent`, which `forked_from` is while it runs."""
        return Beginning(
            token_ids=self.token_ids[:at],
            columns=[values[:at] for values in self.columns],
            policy_spans=[(version, start) for version, start in self.policy_spans if start < at],
            num_forced_tokens=min(self.num_forced_tokens, at),
            parent=parent,
            branch_position=at,
            forked_from=forked_from,
        )

    def request_fields(self, prompt_token_ids: list[int]) -> dict[str, Any]:
        """Fields of a `Request` that begins so; every call makes lists of its own."""
        return {
            "token_ids": [*prompt_token_ids, *self.token_ids],
            "policy_spans": list(self.policy_spans),
            "num_forced_tokens": self.num_forced_tokens,
            "parent": self.parent,
            "branch_position": self.branch_position,
            "forked_from": self.forked_from,
            **{name: values[:] for name, values in zip(COLUMNS, self.columns, strict=True)},
        }
