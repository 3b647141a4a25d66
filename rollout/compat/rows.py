"""A trainer's rows: a prompt is repeated, once for each sample of its group. Here the copies are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from rollout.outputs import RequestOutput
from rollout.sampling_params import MAX_N, SamplingParams

Generate = Callable[[list[list[int]], list[SamplingParams]], list[RequestOutput]]


def generate_rows(rows: Sequence[list[int]], params: SamplingParams, generate: Generate) -> list[RequestOutput]:
    """One output with one sample for each of `rows` (token ids), in their order; `params` has n=1.

    Equal rows that stand side by side become the samples of one prompt, which fork: it is computed once. A sample keeps
    the seed and the sample index that it was drawn with. With a seed in `params` rows stay apart, as they are under
    vLLM: equal rows then have equal samples.
    """
    assert params.n == 1, "a row has one sample"
    if params.seed is not None:
        return generate(list(rows), [params] * len(rows))
    counts = [(row, count) for row, copies in groupby(rows) for count in _parts(len(list(copies)))]
    outputs = generate([row for row, _ in counts], [replace(params, n=count) for _, count in counts])
    return [replace(output, outputs=[replace(sample, index=0)]) for output in outputs for sample in output.outputs]


def _parts(count: int) -> list[int]:
    """`count` as numbers of at most MAX_N."""
    whole, rest = divmod(count, MAX_N)
    return [MAX_N] * whole + [rest] * bool(rest)
