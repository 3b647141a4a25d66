"""Engines over two clearly different policies, and the ways to push one into an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rollout import LLM, SamplingParams
from rollout.outputs import CompletionOutput, RequestOutput
from rollout.weights.receipt import Receipt
from tests.support.extension import delay_steps
from tests.support.oracle import assert_greedy_matches, load_reference, sampled_reference
from tests.support.tiny import make_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@dataclass(frozen=True)
class Policies:
    """Checkpoints W0, W1, W2 of one architecture; `tie` says whether the head is the embedding."""

    folders: tuple[Path, Path, Path]
    tie: bool

    @classmethod
    def make(cls, folder: Path, tie: bool = True, **options: Any) -> Policies:
        paths = [make_tiny_llama(folder / f"w{seed}", seed=seed, tie=tie, **options) for seed in range(3)]
        return cls((paths[0], paths[1], paths[2]), tie)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, in memory of their own."""
        return load_file(self.folders[number] / "model.safetensors")

    def reference(self, number: int) -> PreTrainedModel:
        return load_reference(self.folders[number])

    def engine(self, number: int = 0, **options: Any) -> LLM:
        settings = {"kv_cache_memory": "2MiB", "block_size": 4, "max_num_batched_tokens": 64, **options}
        return LLM(self.folders[number], **settings)


def push_mapping(llm: LLM, weights: dict[str, torch.Tensor]) -> Receipt:
    with llm.policy_update() as update:
        assert sorted(update.load(weights)) == sorted(weights)
    return update.receipt


def push_generator(llm: LLM, weights: dict[str, torch.Tensor]) -> Receipt:
    """One buffer, overwritten after each yield."""

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(max(tensor.numel() for tensor in weights.values()))
        for name, tensor in weights.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield f"module._orig_mod.{name}", view.copy_(tensor)
            buffer.fill_(float("nan"))

    with llm.policy_update() as update:
        update.load(gathered())
    return update.receipt


def push_buckets(llm: LLM, weights: dict[str, torch.Tensor]) -> Receipt:
    """Backwards, in buckets of three, in float64."""
    pairs = [(name, tensor.double()) for name, tensor in reversed(weights.items())]
    with llm.policy_update() as update:
        for first in range(0, len(pairs), 3):
            update.load(pairs[first : first + 3])
    return update.receipt


def push_shared(llm: LLM, weights: dict[str, torch.Tensor]) -> Receipt:
    """The trainer owns the engine's very tensors and changes them in place."""
    model = llm.shared_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    with llm.policy_update() as update:
        update.load(model.named_parameters())
    assert update.receipt.bytes_copied == 0
    return update.receipt


PUSHES: dict[str, Callable[[LLM, dict[str, torch.Tensor]], Receipt]] = {
    "mapping": push_mapping,
    "generator": push_generator,
    "buckets": push_buckets,
    "shared": push_shared,
}


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, length).tolist()


def assert_sampled_by(reference: PreTrainedModel, output: RequestOutput) -> None:
    """Greedy tokens and raw logprobs are those of the reference's weights."""
    for completion in output.outputs:
        assert_greedy_matches(reference, output.prompt_token_ids, completion.token_ids)
        expected = sampled_reference(reference, output.prompt_token_ids, completion.token_ids)
        np.testing.assert_allclose(completion.raw_logprobs, expected, atol=1e-4)


def assert_same_samples(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> None:
    """Token ids and every array, bit for bit."""
    for first, second in zip(one, other, strict=True):
        for a, b in zip(first.outputs, second.outputs, strict=True):
            assert a.token_ids == b.token_ids
            for field_name in ("raw_logprobs", "sampled_logprobs", "kept_mass", "entropy"):
                np.testing.assert_array_equal(getattr(a, field_name), getattr(b, field_name))


def assert_is_beginning(partial: CompletionOutput, whole: CompletionOutput) -> None:
    """An aborted sample kept the tokens it had, with an array value for each."""
    count = len(partial.token_ids)
    assert partial.finish_reason == "abort"
    assert partial.token_ids == whole.token_ids[:count]
    np.testing.assert_array_equal(partial.raw_logprobs, whole.raw_logprobs[:count])


@contextmanager
def slow_steps(llm: LLM) -> Iterator[Callable[[], None]]:
    """Inside, steps take 20 ms longer, so that workers in other processes do not run away from a test that is slow
    itself. Yields what ends that."""
    llm.collective_rpc(delay_steps, args=(0.02,))
    with ExitStack() as stack:
        stack.callback(llm.collective_rpc, delay_steps, args=(0,))
        yield stack.close


@dataclass
class InFlight:
    """`generate` in a thread of its own."""

    llm: LLM
    prompts: list[list[int]]
    params: SamplingParams
    outputs: list[RequestOutput] = field(default_factory=list)

    def __enter__(self) -> InFlight:
        self._steps = self._num_steps()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._result = self._thread.submit(self.llm.generate, self.prompts, self.params, use_tqdm=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self.outputs = self._result.result(timeout=0)

    def wait_for_steps(self, count: int) -> None:
        """Returns once the engine has made `count` steps since the thread began, while requests are in flight."""
        deadline = time.monotonic() + 240
        while self._num_steps() < self._steps + count:
            assert time.monotonic() < deadline, "the engine does not step"
            time.sleep(0.0005)

    def _num_steps(self) -> float:
        return self.llm.get_metrics()["num_steps_total"]
