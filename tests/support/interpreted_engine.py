"""The engine with Triton's kernels in the interpreter, run as a program: what it finds is printed as one JSON object.

A process of its own, since Triton decides when it is imported whether kernels are interpreted. `CudaLikePlatform` gives
the CPU everything of a CUDA device that can be had there: storages that shrink in sleep and come back elsewhere, a pool
sized from a full step and from captured ladders, host memory for swapping apart from the device's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rollout.worker.worker
from rollout import LLM, SamplingParams
from rollout.outputs import RequestOutput
from rollout.platform.cpu import CpuPlatform
from rollout.worker.device_slab import StorageSlab
from rollout.worker.graphs import DecodeGraphs

# Bytes of 7 blocks (of 8 tokens, in tiles of 16) of one layer: keys and values, 2 heads of 16 float32 values.
_TINY_POOL = 7 * 16 * 2 * 2 * 16 * 4
CONFIG = {"r": 4, "lora_alpha": 8}
ENGINE: dict[str, Any] = {"block_size": 8, "max_num_seqs": 12, "kv_cache_memory": "4MiB", "max_model_len": 96}


class MovingSlab(StorageSlab):
    """Comes back elsewhere for sure: something else has taken its place."""

    def resume(self) -> int:
        if self.resident_bytes() == 0:
            self.in_its_place = torch.empty(self.num_bytes, dtype=torch.uint8)
        return super().resume()


class CudaLikePlatform(CpuPlatform):
    """See the module's docstring. `budget` stands for the device's memory."""

    max_profile_tokens = None  # type: ignore[assignment]
    budget = 64 << 20

    def total_memory(self) -> int:
        return self.budget

    def free_memory(self) -> int:  # type: ignore[override]
        return 2 * self.budget

    def measure_peak(self, work: Callable[[], object]) -> int:
        work()
        return 1 << 20

    def memory(self, owner: str, num_bytes: int, huge_pages: bool = True) -> StorageSlab:  # type: ignore[override]
        return MovingSlab(owner, num_bytes, self.device)


@contextmanager
def cuda_like() -> Iterator[None]:
    """Engines made in the block run on a `CudaLikePlatform`."""
    original, rollout.worker.worker.platform_for = rollout.worker.worker.platform_for, lambda _: CudaLikePlatform()
    try:
        yield
    finally:
        rollout.worker.worker.platform_for = original


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 8, 9, 21, 3)
    return [torch.randint(3, 131, (length,), generator=generator).tolist() for length in lengths]


def sampling() -> list[SamplingParams]:
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 4},
        {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {9: 1.5}},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "min_tokens": 4, "allowed_token_ids": range(1, 120, 2)},
    ]
    return [
        SamplingParams(max_tokens=4, seed=index, ignore_eos="min_tokens" not in variant, **variant)
        for index, variant in enumerate(variants)
    ]


def plain(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """Everything of the outputs that contract 1 speaks of; floats as exact texts."""
    return [
        {
            "token_ids": list(sample.token_ids),
            "raw": [float(value).hex() for value in sample.raw_logprobs],
            "sampled": [float(value).hex() for value in sample.sampled_logprobs],
            "kept": [float(value).hex() for value in sample.kept_mass],
            "entropy": [float(value).hex() for value in sample.entropy],
        }
        for output in outputs
        for sample in output.outputs
    ]


def generated(folder: Path, **options: Any) -> list[dict[str, Any]]:
    llm = LLM(folder, **(ENGINE | options))
    return plain(llm.generate(prompts(), sampling(), use_tqdm=False))


def graphs_of(llm: LLM) -> DecodeGraphs:
    graphs = llm.engine.executor.worker.runner.decode_graphs
    assert graphs is not None
    return graphs


def tokens_and_bits(folder: Path) -> dict[str, Any]:
    """The reference's outputs, and Triton's by every way that must give the same bits."""
    alone = LLM(folder, kernels="triton", **ENGINE)
    return {
        "reference": generated(folder, kernels="reference"),
        "triton": generated(folder, kernels="triton"),
        "eager, small chunks, large blocks": generated(
            folder, kernels="triton", enforce_eager=True, max_num_batched_tokens=13, block_size=32
        ),
        "one at a time": [
            sample
            for prompt, params in zip(prompts(), sampling(), strict=True)
            for sample in plain(alone.generate([prompt], params, use_tqdm=False))
        ],
        "captured": graphs_of(alone).captured_sizes,
    }


def forced_along(folder: Path) -> dict[str, Any]:
    """A sample, the same one forced along its own tokens, in one chunk and in several, and a fork of it resumed."""
    llm = LLM(folder, kernels="triton", **ENGINE)
    params = SamplingParams(max_tokens=6, seed=3, temperature=0.9, top_k=30, ignore_eos=True)
    prompt = prompts()[4]
    (drawn,) = llm.generate(prompt, params, use_tqdm=False)
    forced = replace(params, forced_token_ids=drawn.outputs[0].token_ids[:5])
    (chunk,) = llm.generate(prompt, forced, use_tqdm=False)
    short = LLM(folder, kernels="triton", max_num_batched_tokens=3, **ENGINE)
    (rows,) = short.generate(prompt, forced, use_tqdm=False)
    request_id = llm.enqueue(prompt, params)[0]
    for _ in range(5):
        llm.step()
    fork_id = llm.fork(request_id, at=3)
    llm.step()
    llm.abort([fork_id])
    (fork,) = [output for output in llm.wait_for_completion(use_tqdm=False) if output.request_id == fork_id]
    (resumed,) = llm.resume(fork, params, use_tqdm=False)
    begun = replace(params, forced_token_ids=drawn.outputs[0].token_ids[:3], first_sample_index=1)
    return {
        "drawn": plain([drawn]),
        "chunk": plain([chunk]),
        "rows": plain([rows]),
        "captured": graphs_of(short).captured_sizes,
        "fork": plain([resumed]),
        "fork alone": plain(llm.generate(prompt, begun, use_tqdm=False)),
    }


def preempted(folder: Path) -> dict[str, Any]:
    """A pool that is too small for all: requests are swapped to the host, or computed again."""
    found: dict[str, Any] = {}
    for mode, swap_space in (("swap", "4MiB"), ("recompute", 0)):
        options: dict[str, Any] = ENGINE | {"kv_cache_memory": _TINY_POOL, "swap_space": swap_space}
        llm = LLM(folder, kernels="triton", preemption_mode=mode, **options)
        params = [SamplingParams(max_tokens=12, seed=index, ignore_eos=True) for index in range(3)]
        samples = plain(llm.generate(prompts()[1:4], params, use_tqdm=False))
        found[mode] = {"samples": samples, "preemptions": llm.engine.scheduler.stats().num_preemptions}
    return found


def life(folder: Path) -> dict[str, Any]:
    """An engine on a device whose tensors move in sleep: ledger, sleep, wake, update, verify, score."""
    with cuda_like():
        llm = LLM(folder, kernels="triton", **(ENGINE | {"kv_cache_memory": None, "max_num_batched_tokens": 48}))
    params = [SamplingParams(max_tokens=3, seed=index, ignore_eos=True) for index in range(2)]

    def run() -> list[dict[str, Any]]:
        return plain(llm.generate(prompts()[1:3], params, use_tqdm=False))

    parameters = llm.engine.parameters()
    addresses = [tensor.data_ptr() for tensor in parameters.values()]
    found: dict[str, Any] = {"first": run(), "captured": graphs_of(llm).captured_sizes}
    ledger = llm.memory_ledger()
    found["ledger"] = {entry.owner: entry.resident for entry in ledger.entries}
    found["asleep at 1"] = llm.sleep(1).released
    found["captured asleep"] = graphs_of(llm).captured_sizes
    llm.wake_up()
    found["after level 1"] = run()
    found["asleep at 2"] = llm.sleep(2).released
    found["resident asleep"] = {entry.owner: entry.resident for entry in llm.memory_ledger().entries}
    llm.wake_up()
    found["receipt"] = llm.reload_weights().parameters_fingerprint
    found["moved"] = addresses != [tensor.data_ptr() for tensor in llm.engine.parameters().values()]
    found["after level 2"] = run()
    found["scores"] = [output.logprobs.tolist() for output in llm.score(prompts()[2:4], use_tqdm=False)]
    shared = llm.shared_model()
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.mul_(1.25)
    with llm.policy_update() as update:
        update.load(shared.named_parameters())
    llm.verify()
    found["shared"] = {"bytes_copied": update.receipt.bytes_copied, "version": llm.policy_version}
    found["after update"] = run()
    found["kept at 2"] = llm.sleep(2).released
    return found


def with_adapters(folder: Path) -> dict[str, Any]:
    """A batch of rows with one adapter, another, and none, by every way that must give the same bits."""
    choices = ["strong", None, "narrow"]
    params = [SamplingParams(max_tokens=2, seed=index, ignore_eos=True) for index in range(3)]
    batch = [prompts()[4], prompts()[4], prompts()[0]]

    def load(llm: LLM) -> None:
        with llm.policy_update() as update:
            update.load_adapter("strong", adapter_tensors(llm, 4, ("q_proj", "o_proj", "up_proj")), CONFIG)
            update.load_adapter("narrow", adapter_tensors(llm, 4, ("v_proj", "down_proj")), CONFIG)

    def run(llm: LLM) -> list[dict[str, Any]]:
        return plain(llm.generate(batch, params, lora_request=choices, use_tqdm=False))

    options: dict[str, Any] = ENGINE | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_seqs": 3}
    reference = LLM(folder, kernels="reference", **options)
    eager = LLM(folder, **(options | {"kernels": "triton", "enforce_eager": True, "max_num_batched_tokens": 2}))
    with cuda_like():
        llm = LLM(folder, **(options | {"kernels": "triton", "kv_cache_memory": None, "max_num_batched_tokens": 8}))
    for engine in (reference, eager, llm):
        load(engine)
    found = {"reference": run(reference), "eager": run(eager), "captured": run(llm)}
    found["alone"] = plain(llm.generate(batch[2:], params[2:], lora_request=choices[2], use_tqdm=False))
    found["without"] = plain(LLM(folder, kernels="triton", **ENGINE).generate(batch[1:2], params[1:2], use_tqdm=False))
    llm.sleep(2)
    llm.wake_up()
    llm.reload_weights()
    load(llm)
    llm.verify()
    found["after level 2"] = run(llm)
    return found


FORMATS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int8 weights": {"quantization": "int8"},
}


def in_other_formats(folder: Path) -> dict[str, Any]:
    """Samples of the reference and of Triton's kernels, these by three ways that must give the same bits."""
    batch = prompts()[1:3]
    params = [SamplingParams(max_tokens=2, seed=index, ignore_eos=True) for index in range(2)]
    found: dict[str, Any] = {}
    for name, options in FORMATS.items():
        engines = {
            "reference": LLM(folder, kernels="reference", **(ENGINE | options)),
            "captured": LLM(folder, kernels="triton", **(ENGINE | options)),
            "eager": LLM(folder, kernels="triton", enforce_eager=True, max_num_batched_tokens=13, **(ENGINE | options)),
        }
        found[name] = {way: plain(llm.generate(batch, params, use_tqdm=False)) for way, llm in engines.items()}
        found[name]["alone"] = plain(engines["captured"].generate(batch[:1], params[:1], use_tqdm=False))
    return found


def copies_on_a_device(folder: Path) -> dict[str, Any]:
    """Int8 copies in memory that is given back in sleep and comes back elsewhere."""
    with cuda_like():
        llm = LLM(folder, kernels="triton", quantization="int8", max_num_batched_tokens=16, **ENGINE)
    params = SamplingParams(max_tokens=2, seed=5, ignore_eos=True)

    def run() -> list[dict[str, Any]]:
        return plain(llm.generate(prompts()[4], params, use_tqdm=False))

    found: dict[str, Any] = {"first": run(), "held": llm.memory_ledger()["quantized_weights"].resident}
    found["released"] = llm.sleep(2).released["quantized_weights"]
    found["asleep"] = llm.memory_ledger()["quantized_weights"].resident
    llm.wake_up()
    llm.reload_weights()
    llm.verify()
    found["again"] = run()
    copy = llm.engine.executor.worker.model.int8
    assert copy is not None
    copy.scales.mul_(2)
    found["stale"] = llm.engine.stale_copies()
    return found


def adapter_tensors(llm: LLM, rank: int, layers: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Strong random tensors for the layers with these names."""
    generator = torch.Generator().manual_seed(rank)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in llm.engine.parameters().items():
        module = name.removesuffix(".weight")
        if module.endswith(layers):
            rows, columns = parameter.shape
            tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(rank, columns, generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(rows, rank, generator=generator)
    return tensors


def main() -> None:
    """Arguments: the folders of a model of two layers and of one layer."""
    two_layers, one_layer = (Path(argument) for argument in sys.argv[1:])
    reference = LLM(one_layer, kernels="reference", **ENGINE)
    receipt = reference.receipt
    assert receipt is not None
    found = {
        "bits": tokens_and_bits(two_layers),
        "forced": forced_along(one_layer),
        "preempted": preempted(one_layer),
        "life": life(one_layer),
        "adapters": with_adapters(one_layer),
        "formats": in_other_formats(one_layer),
        "copies": copies_on_a_device(one_layer),
        "reference": {
            "receipt": receipt.parameters_fingerprint,
            "scores": [output.logprobs.tolist() for output in reference.score(prompts()[2:4], use_tqdm=False)],
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
