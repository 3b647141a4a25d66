"""What the matrix products of a model alone would allow on this machine: a ceiling for tokens per second."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from rollout.layers.linear import multiply
from rollout.models.causal_lm import CausalLM
from rollout.models.products import MatrixProduct, matrix_products
from rollout_kernels.cpu.program import Workspace, record

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS = 0.3  # of measuring for each number of rows, at least


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step's matrix products by number of rows: all but the head's, and the head's."""

    rows: tuple[int, ...]
    body_seconds: list[float]
    head_seconds: list[float]
    num_bytes: int  # of the weights
    flops_per_row: int

    @classmethod
    def measure(cls, model: CausalLM, rows: tuple[int, ...] = ROWS) -> Roofline:
        *body, head = matrix_products(model)
        return cls(
            rows=rows,
            body_seconds=[_measure(body, count) for count in rows],
            head_seconds=[_measure([head], count) for count in rows],
            num_bytes=sum(_num_bytes(product) for product in (*body, head)),
            flops_per_row=2 * sum(product.weight.numel() for product in (*body, head)),
        )

    def step_seconds(self, num_rows: int, num_drawn: int) -> float:
        """Seconds of the products of a step with `num_rows` tokens, of which `num_drawn` need logits."""
        return self._interpolate(self.body_seconds, num_rows) + self._interpolate(self.head_seconds, num_drawn)

    def _interpolate(self, seconds: list[float], count: int) -> float:
        """Linear between measured counts, in proportion beyond the last."""
        if count == 0:
            return 0.0
        if count >= self.rows[-1]:
            return seconds[-1] * count / self.rows[-1]
        high = bisect_left(self.rows, count)
        if self.rows[high] == count:
            return seconds[high]
        low, above = self.rows[high - 1], self.rows[high]
        weight = (count - low) / (above - low)
        return seconds[high - 1] * (1 - weight) + seconds[high] * weight

    def workload_seconds(self, workload: dict[str, Any], max_num_seqs: int) -> float:
        """Seconds of all products of a workload: each different prompt token once, then decode steps with every
        unfinished request in each (at most `max_num_seqs`), as an ideal engine would run it."""
        requests = workload["requests"]
        prompt_tokens = _num_different_prompt_tokens([request["prompt_token_ids"] for request in requests])
        seconds = self.step_seconds(prompt_tokens, len(requests))
        waiting = [request["max_tokens"] - 1 for request in requests]
        running: list[int] = []
        while waiting or running:
            while waiting and len(running) < max_num_seqs:
                running.append(waiting.pop(0))
            running = [left for left in running if left > 0]
            seconds += self.step_seconds(len(running), len(running))
            running = [left - 1 for left in running]
        return seconds

    def table(self) -> str:
        """A line for each number of rows."""
        lines = ["rows   ms a step   GB/s   GFLOP/s   tokens/s"]
        for index, count in enumerate(self.rows):
            seconds = self.body_seconds[index] + self.head_seconds[index]
            lines.append(
                f"{count:>4}{seconds * 1e3:>12.2f}{self.num_bytes / seconds / 1e9:>7.1f}"
                f"{self.flops_per_row * count / seconds / 1e9:>10.1f}{count / seconds:>11.1f}"
            )
        return "\n".join(lines)


def _num_bytes(product: MatrixProduct) -> int:
    int8 = product.holder.int8
    return product.weight.nbytes if int8 is None else int8.values.nbytes


@torch.inference_mode()
def _measure(products: list[MatrixProduct], rows: int) -> float:
    """Median seconds of the products of `rows` rows with every weight, as the engine reads it, one after another."""
    weights = [product.weight for product in products]
    generator = torch.Generator().manual_seed(rows)
    inputs: dict[int, torch.Tensor] = {}
    for weight in weights:
        size = weight.shape[1]
        if size not in inputs:
            inputs[size] = torch.randn(rows, size, generator=generator).to(weight.dtype)

    def multiply_all() -> None:
        for product, weight in zip(products, weights, strict=True):
            multiply(inputs[weight.shape[1]], weight, None, None, product.holder.int8)

    # Recorded, so that neither Python nor fresh memory for the outputs is part of the time.
    outputs = max(rows * sum(weight.shape) * weight.itemsize for weight in weights)  # and rows of x in int8
    _, program = record(multiply_all, Workspace(torch.empty(2 * outputs + 4096, dtype=torch.uint8)))
    taken: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(taken) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        program.replay()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _num_different_prompt_tokens(prompts: list[list[int]]) -> int:
    """Tokens of the prompts, those of common beginnings counted once."""
    total = 0
    previous: list[int] = []
    for prompt in sorted(prompts):  # neighbours in this order share their longest beginnings
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(previous, prompt, strict=False)))
        total += len(prompt) - shared
        previous = prompt
    return total
