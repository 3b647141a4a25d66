"""What a sample begins with that does not begin at its prompt's end: a resumed one, or a fork of another."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.config import LogprobsMode
from rollout.core.logprob_columns import LogprobColumns
from rollout.outputs import CompletionOutput
from rollout.request import Request
from rollout.sampling_params import SamplingParams

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
    top_logprobs: LogprobColumns | None = None  # a position a token, where they were asked for
    chosen_token_ids: tuple[int, ...] = ()  # the named tokens of which they have the logprobs
    logprobs_mode: LogprobsMode | None = None  # of an output; None: the engine's

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
            top_logprobs=None if output.logprobs is None else output.logprobs.columns(),
            chosen_token_ids=() if output.logprobs is None else output.logprobs.chosen_token_ids,
            logprobs_mode=output.logprobs_mode,
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
            top_logprobs=_leading(request.top_logprobs, request.num_output_tokens),
            chosen_token_ids=tuple(request.params.logprob_token_ids or ()),
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
            top_logprobs=_leading(self.top_logprobs, at),
            chosen_token_ids=self.chosen_token_ids,
            logprobs_mode=self.logprobs_mode,
        )

    def request_fields(
        self, prompt_token_ids: list[int], params: SamplingParams, num_top: int, mode: LogprobsMode
    ) -> dict[str, Any]:
        """Fields of a `Request` that begins so and goes on with `params`; every call makes lists of its own.

        Raises `ValueError` where it would go on with other logprobs (of `num_top` most likely tokens, in this mode)
        than the beginning comes with.
        """
        return {
            "token_ids": [*prompt_token_ids, *self.token_ids],
            "policy_spans": list(self.policy_spans),
            "num_forced_tokens": self.num_forced_tokens,
            "parent": self.parent,
            "branch_position": self.branch_position,
            "forked_from": self.forked_from,
            "top_logprobs": self._top_logprobs(params, num_top, mode),
            **{name: values[:] for name, values in zip(COLUMNS, self.columns, strict=True)},
        }

    def _top_logprobs(self, params: SamplingParams, num_top: int, mode: LogprobsMode) -> LogprobColumns | None:
        """What a request with these parameters begins with."""
        if not params.wants_top_logprobs or not self.token_ids:
            return None
        if self.logprobs_mode not in (None, mode):
            raise ValueError(
                f"logprobs={params.logprobs} is not valid: the engine's are {mode}, and those of the first "
                f"{len(self.token_ids)} tokens are {self.logprobs_mode}"
            )
        top, chosen = self.top_logprobs, tuple(params.logprob_token_ids or ())
        if top is None or top.num_top != num_top or self.chosen_token_ids != chosen:
            has = "none" if top is None else f"logprobs={top.num_top}, logprob_token_ids={list(self.chosen_token_ids)}"
            raise ValueError(
                f"logprobs={params.logprobs}, logprob_token_ids={list(chosen)} is not valid: the first "
                f"{len(self.token_ids)} tokens, which are there already, come with {has}"
            )
        return top.copy()


def _leading(columns: LogprobColumns | None, count: int) -> LogprobColumns | None:
    """The first `count` positions."""
    if columns is None:
        return None
    leading = columns.copy()
    leading.truncate(count)
    return leading
