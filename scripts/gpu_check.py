#!/usr/bin/env python
"""Everything that only a GPU machine can say, in at most ten minutes: one table, and one JSON file.

    python scripts/gpu_check.py --json check.json          # a CUDA device; a random model of about 1B parameters
    python scripts/gpu_check.py --small --json check.json  # the same code, tiny, on a CPU in Triton's interpreter

Kernels against float64, the engine against itself (contract 1) and against transformers, kernel times against measured
copy bandwidth and matrix rate, sleep and wake in seconds and bytes. A section that fails is named and the rest goes on;
the exit status is then 1. Nothing is downloaded: the model's weights are made on the spot.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--small" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is imported

import torch

import rollout_kernels as rk
from rollout import LLM, SamplingParams

Row = dict[str, Any]  # one line of a section's table


@dataclass(frozen=True, slots=True)
class Size:
    """What is checked, and how much of it."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype
    rows: tuple[int, ...]  # of matrix products and samplers
    sequences: int  # in attention
    keys: int  # of a sequence in attention
    batches: tuple[int, ...]  # sequences in flight in the engine
    compared: tuple[int, ...]  # of these, with transformers too
    prompt: int  # tokens
    output: int
    repeats: int  # of a timing
    stream_bytes: int  # of the bandwidth measurement
    square: int  # of the matrix-rate measurement


# The shape of Llama-3.2-1B.
FULL = Size(
    hidden=2048,
    layers=16,
    intermediate=8192,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab=128256,
    dtype=torch.bfloat16,
    rows=(1, 16, 256, 2048),
    sequences=32,
    keys=2048,
    batches=(1, 32, 256),
    compared=(1, 32),
    prompt=128,
    output=256,
    repeats=20,
    stream_bytes=1 << 30,
    square=8192,
)
SMALL = Size(
    hidden=64, layers=1, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=160, dtype=torch.float32,
    rows=(1, 3), sequences=2, keys=20, batches=(1, 3), compared=(1,), prompt=6, output=3, repeats=1,
    stream_bytes=1 << 16, square=32,
)  # fmt: skip


class Check:
    """The device, the sizes, what was measured, and what failed."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.sections: dict[str, list[Row]] = {}
        self.failures: list[str] = []
        self.copy_bandwidth = float("nan")  # bytes a second, reads and writes together
        self.matrix_rate = float("nan")  # operations a second

    def run(self, name: str, section: Callable[[Check, list[Row]], None]) -> None:
        """Runs a section; what it found before an error stays."""
        rows: list[Row] = []
        self.sections[name] = rows
        started = time.perf_counter()
        try:
            section(self, rows)
        except Exception as error:  # noqa: BLE001  # whatever went wrong is this section's result
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"\n== {name} ({time.perf_counter() - started:.1f} s)\n{table(rows)}", flush=True)

    def expect(self, holds: bool, what: str) -> bool:
        """Records a failure, and goes on."""
        if not holds:
            self.failures.append(what)
        return holds

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype or self.size.dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of `work` on the device, caches as the last run left them."""
        work()
        self.synchronize()
        if self.device.type != "cuda":
            times = [_timed(work) for _ in range(self.size.repeats)]
            return sorted(times)[len(times) // 2]
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(20)]
        for start, end in marks:
            start.record()
            work()
            end.record()
        self.synchronize()
        return sorted(start.elapsed_time(end) for start, end in marks)[len(marks) // 2] / 1e3


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def machine(check: Check, rows: list[Row]) -> None:
    """What runs here."""
    versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    facts: Row = {"device": str(check.device), **versions}
    if check.device.type == "cuda":
        properties = torch.cuda.get_device_properties(check.device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "processors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    else:
        facts["name"] = "CPU, kernels in Triton's interpreter: times say nothing"
    rows += [{"fact": name, "value": value} for name, value in facts.items()]


def ceilings(check: Check, rows: list[Row]) -> None:
    """What the device can do at most, measured: a copy of device memory, and torch's own matrix product."""
    size = check.size
    source = torch.ones(size.stream_bytes, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    check.copy_bandwidth = 2 * size.stream_bytes / check.seconds(lambda: target.copy_(source))
    a, b = check.random(size.square, size.square), check.random(size.square, size.square)
    check.matrix_rate = 2 * size.square**3 / check.seconds(lambda: a @ b)
    rows.append({"ceiling": "copy, GB/s", "value": round(check.copy_bandwidth / 1e9, 3)})
    rows.append({"ceiling": f"{size.dtype} product, TFLOP/s", "value": round(check.matrix_rate / 1e12, 5)})


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest expected magnitude."""
    expected = expected.detach().cpu().double()
    difference = (got.detach().cpu().double() - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1e-30))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The values in float64 on the host, where the reference computes as an oracle."""
    return tensor.detach().cpu().double()


def kernels(check: Check, rows: list[Row]) -> None:
    """Every operation against float64, and a row alone against the row in its batch, bit for bit."""
    size, dtype = check.size, check.size.dtype
    rounding = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-17
    count = 33 if check.device.type == "cuda" else 3

    def record(name: str, got: torch.Tensor, expected: torch.Tensor, alone: torch.Tensor, bound: float) -> None:
        error, same = _error(got, expected), torch.equal(alone, got[:1])
        passed = check.expect(error <= bound, f"kernels: {name}: error {error:.1e} is above {bound:.1e}")
        passed &= check.expect(same, f"kernels: {name}: a row alone has other bits than in a batch")
        rows.append({"operation": name, "error": error, "bound": bound, "alone = batch": same, "passed": passed})

    x, weight = check.random(count, size.hidden), check.random(3 * size.head_dim, size.hidden, scale=0.05)
    record("linear", rk.linear(x, weight), rk.linear(_wide(x), _wide(weight)), rk.linear(x[:1], weight), rounding)
    scale = check.random(size.hidden)
    normed, alone = rk.rms_norm(x, scale, 1e-5)[0], rk.rms_norm(x[:1], scale, 1e-5)[0]
    record("rms_norm", normed, rk.rms_norm(_wide(x), _wide(scale), 1e-5)[0], alone, rounding)
    gated = check.random(count, 2 * size.intermediate)
    record("silu_and_mul", rk.silu_and_mul(gated), rk.silu_and_mul(_wide(gated)), rk.silu_and_mul(gated[:1]), rounding)
    ids = torch.randint(0, 3 * size.head_dim, (count,), device=check.device)
    found = rk.embedding(ids, weight)
    record("embedding", found, rk.embedding(ids.cpu(), _wide(weight)), rk.embedding(ids[:1], weight), 0.0)
    _check_rotary(check, record, count, rounding)
    _check_attention(check, record, rounding)
    _check_quantised_caches(check, record, rounding)
    _check_attention_gradients(check, record, 8 * rounding)
    _check_linear_int8(check, record, x, weight)
    logits = check.random(count, size.vocab, dtype=torch.float32, scale=3.0)
    targets = torch.randint(0, size.vocab, (count,), device=check.device)
    found, alone = rk.token_logprobs(logits, targets), rk.token_logprobs(logits[:1], targets[:1])
    record("token_logprobs", found, rk.token_logprobs(_wide(logits), targets.cpu()), alone, 1e-6)
    _check_sample(check, rows, "sample", _draw, logits)
    _check_sample(check, rows, "sample from other rows", _draw_from_other_rows, logits)
    _check_top_logprobs(check, rows, logits)
    printed = rk.fingerprint(weight) == rk.fingerprint(weight.cpu())
    check.expect(printed, "kernels: fingerprint: another value than on the CPU")
    rows.append({"operation": "fingerprint", "error": 0.0, "bound": 0.0, "alone = batch": True, "passed": printed})


Record = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor, float], None]


def _check_rotary(check: Check, record: Record, count: int, rounding: float) -> None:
    size = check.size
    angles = torch.rand(64, size.head_dim // 2, device=check.device) * 6
    table_ = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 64, (count,), device=check.device)
    q, k = check.random(count, size.heads, size.head_dim), check.random(count, size.kv_heads, size.head_dim)
    expected, _ = rk.rotary_embedding(_wide(q), _wide(k), positions.cpu(), _wide(table_))
    alone, _ = rk.rotary_embedding(q[:1].clone(), k[:1].clone(), positions[:1], table_)
    found, _ = rk.rotary_embedding(q.clone(), k.clone(), positions, table_)
    record("rotary_embedding", found, expected, alone, rounding)


def _check_attention(check: Check, record: Record, rounding: float) -> None:
    """Whole prompts against float64; then each prompt's last query as a decode step, which must give the same bits."""
    size = check.size
    lengths = [1, 16, 17, size.keys // 2][: size.sequences + 2]
    start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tokens = int(start[-1])
    q = check.random(tokens, size.heads, size.head_dim)
    k, v = (check.random(tokens, size.kv_heads, size.head_dim) for _ in range(2))
    cache, tables = _paged(check, lengths, k, v)
    options = (16, size.head_dim**-0.5)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=check.device)
    found = rk.paged_attention(q, cache, tables, start.to(check.device), seq_lens, *options)
    last = start[1:].to(check.device).long() - 1
    ones = torch.arange(len(lengths) + 1, dtype=torch.int32, device=check.device)
    decoded = rk.paged_attention(q[last], cache, tables, ones, seq_lens, *options)
    assert isinstance(found, torch.Tensor) and isinstance(decoded, torch.Tensor)
    expected = rk.varlen_attention(_wide(q), _wide(k), _wide(v), start, options[1])
    alone = rk.paged_attention(q[:1], cache, tables[:1], ones[:2], seq_lens[:1], *options)
    assert isinstance(alone, torch.Tensor)
    record("paged_attention", found, expected, alone, 2 * rounding)
    check.expect(torch.equal(decoded, found[last]), "kernels: paged_attention: decode has other bits than prefill")


def _check_quantised_caches(check: Check, record: Record, rounding: float) -> None:
    """A decode over caches in 8 bits, against float64 over what torch rounds keys and values to."""
    size, options = check.size, (16, check.size.head_dim**-0.5)
    ones = torch.arange(3, dtype=torch.int32, device=check.device)
    seq_lens = torch.tensor([5, 40], dtype=torch.int32, device=check.device)
    q = check.random(2, size.heads, size.head_dim)
    k, v = (check.random(45, size.kv_heads, size.head_dim) for _ in range(2))
    for name, dtype, largest in (("int8", torch.int8, 127.0), ("float8", torch.float8_e4m3fn, 448.0)):
        cache, tables = _paged(check, [5, 40], k, v, dtype)
        found = rk.paged_attention(q, cache, tables, ones, seq_lens, *options)
        alone = rk.paged_attention(q[:1], cache, tables[:1], ones[:2], seq_lens[:1], *options)
        assert isinstance(found, torch.Tensor) and isinstance(alone, torch.Tensor)
        rounded = []
        for x in (k.cpu().float(), v.cpu().float()):
            scale = x.abs().amax(-1, keepdim=True) / largest
            whole = (x / scale).round() if dtype is torch.int8 else x / scale
            rounded.append(whole.to(dtype).double() * scale.double())
        queries = _wide(q).repeat_interleave(torch.tensor([5, 40]), 0)
        expected = rk.varlen_attention(queries, *rounded, torch.tensor([0, 5, 45], dtype=torch.int32), options[1])
        record(f"paged_attention, {name} cache", found, expected[[4, 44]], alone, 2 * rounding)


def _check_attention_gradients(check: Check, record: Record, bound: float) -> None:
    """Under a window and a soft cap; the first sequence alone has the same bits."""
    size, start = check.size, torch.tensor([0, 9, 9 + min(check.size.keys, 150)], dtype=torch.int32)
    inputs = [check.random(int(start[-1]), heads, size.head_dim) for heads in (size.heads, *[size.kv_heads] * 2)]

    def gradients(tensors: list[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = rk.varlen_attention(leaves[0], leaves[1], leaves[2], start, size.head_dim**-0.5, 7, 4.0)
        return torch.cat([grad.flatten(1) for grad in torch.autograd.grad(out.double().square().sum(), leaves)], 1)

    found, expected = gradients(inputs, start.to(check.device)), gradients([_wide(x) for x in inputs], start)
    alone = gradients([x[:9] for x in inputs], start[:2].to(check.device))
    record("attention gradients", found, expected, alone[:1], bound)


def _check_linear_int8(check: Check, record: Record, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Against the reference on the host, whose packed weight must have the same bits."""
    packed = rk.quantize_weight(weight)
    with rk.use_backend("reference"):
        host = rk.quantize_weight(weight.cpu())
        expected = rk.linear_int8(x.cpu(), host, None, torch.float32)
    same = torch.equal(packed.values.cpu(), host.values) and torch.equal(packed.scales.cpu(), host.scales)
    check.expect(same, "kernels: quantize_weight: other bits than on the CPU")
    found, alone = (rk.linear_int8(rows, packed, None, torch.float32) for rows in (x, x[:1]))
    record("linear_int8", found, expected, alone, 1e-5)


def _paged(
    check: Check, lengths: list[int], k: torch.Tensor, v: torch.Tensor, quantised: torch.dtype | None = None
) -> tuple[rk.KVCache, torch.Tensor]:
    """A cache that holds the sequences in blocks of 16 tokens, which lie in random order, and the block tables."""
    size = check.size
    counts = [-(-length // 16) for length in lengths]
    blocks = torch.randperm(sum(counts)).to(torch.int32)
    layout = rk.backend_on(check.device).kv_layout
    dtype = quantised or size.dtype
    shapes = rk.kv_cache_shapes(sum(counts), 16, size.kv_heads, size.head_dim, dtype, layout)
    parts = [torch.zeros(shape, dtype=dtype, device=check.device) for shape in shapes]
    if quantised is not None:
        scales = rk.kv_scale_shape(sum(counts), 16, size.kv_heads)
        parts += [torch.zeros(scales, device=check.device) for _ in range(2)]
    cache = rk.KVCache(*parts)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots, first = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = blocks[first : first + count]
        places = torch.arange(length)
        slots.append(tables[row][places // 16].long() * 16 + places % 16)
        first += count
    rk.write_kv(k, v, cache, torch.cat(slots).to(check.device))
    return cache, tables.to(check.device)


def _draw(logits: torch.Tensor, **more: Any) -> rk.SampleResult:
    """One draw a row, with every kind of filter."""
    index = torch.arange(logits.shape[0], device=logits.device)
    return rk.sample(
        logits,
        temperature=torch.where(index % 4 == 0, 0.0, 0.9).float(),
        top_k=torch.where(index % 3 == 1, 20, 0).int(),
        top_p=torch.where(index % 3 == 2, 0.9, 1.0).float(),
        min_p=torch.where(index % 5 == 3, 0.02, 0.0).float(),
        seed=index + 5,
        sample_index=index % 2,
        position=index + 100,
        **more,
    )


def _draw_from_other_rows(logits: torch.Tensor) -> rk.SampleResult:
    """Some draws from adjusted rows, some with every other token masked, some forced."""
    index = torch.arange(logits.shape[0], device=logits.device)
    every_other = torch.full((1, -(-logits.shape[1] // 32)), 0x55555555, dtype=torch.int32, device=logits.device)
    return _draw(
        logits,
        adjusted=(logits.roll(1, 1), torch.where(index % 6 == 2, index, -1)),
        allowed=(every_other, torch.where(index % 5 == 1, 0, -1)),
        forced=torch.where(index % 7 == 4, index * 3, -1),
    )


def _check_sample(
    check: Check, rows: list[Row], name: str, draw: Callable[[torch.Tensor], rk.SampleResult], logits: torch.Tensor
) -> None:
    """The tokens and numbers of the reference on the CPU."""
    found, alone = draw(logits), draw(logits[:1])
    with rk.use_backend("reference"):
        expected = draw(logits.cpu())
    same = torch.equal(found.token_ids.cpu(), expected.token_ids)
    # Where the mass before a token is top_p but for rounding, one backend keeps it and another does not.
    same &= int((found.num_kept.cpu() - expected.num_kept).abs().max()) <= 1
    error = max(
        _largest_gap(got.cpu(), wanted)
        for got, wanted in (
            (found.raw_logprobs, expected.raw_logprobs),
            (found.sampled_logprobs, expected.sampled_logprobs),
            (found.kept_mass, expected.kept_mass),
            (found.entropy, expected.entropy),
        )
    )
    bits = torch.equal(alone.raw_logprobs, found.raw_logprobs[:1])
    passed = check.expect(same, f"kernels: {name}: other tokens than the reference")
    passed &= check.expect(error < 1e-4, f"kernels: {name}: logprobs are off by {error:.1e}")
    passed &= check.expect(bits, f"kernels: {name}: a row alone has other bits than in a batch")
    rows.append({"operation": name, "error": error, "bound": 1e-4, "alone = batch": bits, "passed": passed})


def _largest_gap(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute difference; none between equal infinities."""
    return float(torch.where(got == wanted, 0.0, (got - wanted).abs()).max())


def _check_top_logprobs(check: Check, rows: list[Row], logits: torch.Tensor) -> None:
    """The ids and ranks of the reference on the CPU, for few of a row and for so many that it is sorted."""
    token_ids = torch.arange(logits.shape[0], device=logits.device) * 7 - 1
    for num_top in (5, min(100, logits.shape[1])):
        found, alone = (rk.top_logprobs(part, num_top, token_ids[: len(part)]) for part in (logits, logits[:1]))
        with rk.use_backend("reference"):
            expected = rk.top_logprobs(logits.cpu(), num_top, token_ids.cpu())
        name = f"top_logprobs k={num_top}"
        same = torch.equal(found.top_ids.cpu(), expected.top_ids) and torch.equal(found.ranks.cpu(), expected.ranks)
        error = _largest_gap(found.top_logprobs.cpu(), expected.top_logprobs)
        bits = torch.equal(alone.top_logprobs, found.top_logprobs[:1])
        passed = check.expect(same, f"kernels: {name}: other tokens or ranks than the reference")
        passed &= check.expect(error < 1e-4, f"kernels: {name}: logprobs are off by {error:.1e}")
        passed &= check.expect(bits, f"kernels: {name}: a row alone has other bits than in a batch")
        rows.append({"operation": name, "error": error, "bound": 1e-4, "alone = batch": bits, "passed": passed})


def kernel_times(check: Check, rows: list[Row]) -> None:
    """Each kernel's bytes and operations a second, as shares of the measured ceilings."""
    size, itemsize = check.size, check.size.dtype.itemsize

    def record(name: str, work: Callable[[], object], num_bytes: float, operations: float) -> None:
        seconds = check.seconds(work)
        bandwidth, rate = num_bytes / seconds / check.copy_bandwidth, operations / seconds / check.matrix_rate
        rows.append({"kernel": name, "us": seconds * 1e6, "of copy": bandwidth, "of product": rate})

    down = check.random(size.hidden, size.intermediate, scale=0.02)
    head = check.random(size.vocab, size.hidden, scale=0.02)
    for count in size.rows:
        for name, weight in (("down", down), ("logits", head)):
            x = check.random(count, weight.shape[1])
            out_dtype = torch.float32 if name == "logits" else None
            moved = weight.nbytes + x.nbytes + count * weight.shape[0] * (4 if out_dtype else itemsize)
            work = 2.0 * count * weight.numel()
            record(f"linear {name} T={count}", lambda x=x, w=weight, o=out_dtype: rk.linear(x, w, None, o), moved, work)
    lengths = [size.keys] * size.sequences
    tokens = sum(lengths)
    k, v = (check.random(tokens, size.kv_heads, size.head_dim) for _ in range(2))
    cache, tables = _paged(check, lengths, k, v)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=check.device)
    for name, queries in (("decode", 1), ("prefill", size.keys)):
        q = check.random(queries * size.sequences, size.heads, size.head_dim)
        starts = torch.arange(size.sequences + 1, dtype=torch.int32, device=check.device) * queries
        pairs = size.sequences * (queries * (2 * size.keys - queries + 1) / 2)
        arguments = (q, cache, tables, starts, seq_lens, 16, size.head_dim**-0.5)
        record(
            f"attention {name} {size.sequences} x {size.keys}",
            lambda arguments=arguments: rk.paged_attention(*arguments),
            k.nbytes + v.nbytes + 2 * q.nbytes,
            4 * pairs * size.heads * size.head_dim,
        )
    count = size.rows[-1]
    wide, scale = check.random(count, size.hidden, dtype=torch.float32), check.random(size.hidden)
    moved = count * size.hidden * (12 + itemsize)
    record(f"rms_norm T={count}", lambda: rk.rms_norm(wide, scale, 1e-5, wide), moved, 0.0)
    gated = check.random(count, 2 * size.intermediate)
    record(f"silu_and_mul T={count}", lambda: rk.silu_and_mul(gated), 1.5 * gated.nbytes, 0.0)
    logits = check.random(size.rows[-2], size.vocab, dtype=torch.float32, scale=3.0)
    record(f"sample R={size.rows[-2]}", lambda: _draw(logits), logits.nbytes, 0.0)
    record(f"sample from other rows R={len(logits)}", lambda: _draw_from_other_rows(logits), 3 * logits.nbytes, 0.0)
    ids = torch.zeros(len(logits), dtype=torch.int64, device=check.device)
    for num_top in (5, 20):
        name = f"top_logprobs k={num_top} R={len(logits)}"
        record(name, lambda k=num_top: rk.top_logprobs(logits, k, ids), logits.nbytes, 0.0)


def write_model(size: Size, folder: Path, device: torch.device) -> None:
    """A random Llama as a Hugging Face folder."""
    from safetensors.torch import save_file

    heads, kv_heads = size.heads * size.head_dim, size.kv_heads * size.head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096 if size is FULL else 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": None,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "dtype": str(size.dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.03).to(size.dtype).cpu()

    tensors = {
        "model.embed_tokens.weight": normal(size.vocab, size.hidden),
        "model.norm.weight": torch.ones(size.hidden, dtype=size.dtype),
    }
    shapes = {
        "self_attn.q_proj": (heads, size.hidden),
        "self_attn.k_proj": (kv_heads, size.hidden),
        "self_attn.v_proj": (kv_heads, size.hidden),
        "self_attn.o_proj": (size.hidden, heads),
        "mlp.gate_proj": (size.intermediate, size.hidden),
        "mlp.up_proj": (size.intermediate, size.hidden),
        "mlp.down_proj": (size.hidden, size.intermediate),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(size.hidden, dtype=size.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prompts_of(size: Size, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, size.vocab, (count, size.prompt), generator=generator).tolist()


def make_engine(check: Check, folder: Path, **options: Any) -> LLM:
    most = max(check.size.batches)
    settings: dict[str, Any] = {"kernels": "triton", "max_num_seqs": most, "device": check.device.type}
    if check.device.type == "cuda":
        settings["gpu_memory_utilization"] = 0.7
    else:
        settings["kv_cache_memory"] = "2MiB"
    return LLM(folder, **(settings | options))


def params_of(size: Size, count: int, temperature: float = 1.0) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=size.output, temperature=temperature, seed=index, ignore_eos=True)
        for index in range(count)
    ]


def engine_speed(check: Check, rows: list[Row], folder: Path) -> None:
    """Tokens a second of whole batches, prompts included, beside what reading weights and KV once a step allows."""
    size = check.size
    token = 2 * size.layers * size.kv_heads * size.head_dim * size.dtype.itemsize
    with make_engine(check, folder) as llm:
        weights = sum(tensor.nbytes for tensor in llm.engine.parameters().values())
        for count in size.batches:
            prompts, params = prompts_of(size, count), params_of(size, count)
            _samples(llm, prompts, params)  # captures the steps
            llm.reset_prefix_cache()
            check.synchronize()
            started = time.perf_counter()
            _samples(llm, prompts, params)
            speed = count * size.output / (time.perf_counter() - started)
            llm.reset_prefix_cache()
            step = weights + count * (size.prompt + size.output / 2) * token  # a step reads at least these bytes
            ceiling = count / (step / (check.copy_bandwidth / 2))  # a copy moves every byte twice
            row = {"engine": "rollout", "in flight": count, "tokens/s": speed}
            rows.append(row | {"of memory roofline": speed / ceiling})
    _collect(check)
    _transformers_speed(check, rows, folder)


def _transformers_speed(check: Check, rows: list[Row], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    size = check.size
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=size.dtype, attn_implementation="sdpa")
    model.to(check.device)
    for count in size.compared:
        ids = torch.tensor(prompts_of(size, count), device=check.device)
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": size.output,
            "min_new_tokens": size.output,
            "do_sample": True,
            "top_k": 0,
            "pad_token_id": 0,
        }
        model.generate(ids, **options)
        check.synchronize()
        started = time.perf_counter()
        model.generate(ids, **options)
        check.synchronize()
        speed = count * size.output / (time.perf_counter() - started)
        rows.append({"engine": "transformers", "in flight": count, "tokens/s": speed})
    del model
    _collect(check)


def _collect(check: Check) -> None:
    gc.collect()
    if check.device.type == "cuda":
        torch.cuda.empty_cache()


def _samples(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], bytes]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].sampled_logprobs.tobytes()) for o in outputs]


def engine_bits(check: Check, rows: list[Row], folder: Path) -> None:
    """Contract 1 on this device: captured, eager, alone, in small chunks and from the prefix cache, the same bits."""
    size = check.size
    count = min(9, max(size.batches))
    prompts, params = prompts_of(size, count), params_of(size, count)
    with make_engine(check, folder) as llm:
        expected = _samples(llm, prompts, params)
        _same(check, rows, "from the prefix cache", _samples(llm, prompts, params), expected)
        _same(check, rows, "one alone", _samples(llm, prompts[-1:], params[-1:]), expected)
    for name, options in (("eager", {"enforce_eager": True}), ("small chunks", {"max_num_batched_tokens": 48})):
        _collect(check)
        with make_engine(check, folder, **options) as other:
            _same(check, rows, name, _samples(other, prompts, params), expected)
    _collect(check)


def _same(
    check: Check,
    rows: list[Row],
    name: str,
    found: list[tuple[list[int], bytes]],
    expected: list[tuple[list[int], bytes]],
) -> None:
    same = found == expected[-len(found) :]
    check.expect(same, f"engine bits: {name}: other tokens or logprobs")
    rows.append({"way": name, "samples": len(found), "same bits": same})


def sleep_and_wake(check: Check, rows: list[Row], folder: Path) -> None:
    """Seconds and bytes of each level, what the driver saw, and whether the engine goes on with the same bits."""
    prompts, params = prompts_of(check.size, 1), params_of(check.size, 1)
    with make_engine(check, folder) as llm:
        expected = _samples(llm, prompts, params)
        for level in (1, 2):
            started = time.perf_counter()
            report = llm.sleep(level)
            row: Row = {"sleep s": time.perf_counter() - started, "wake s": _timed(llm.wake_up)}
            if level == 2:
                row["reload s"] = _timed(llm.reload_weights)
            started = time.perf_counter()
            found = _samples(llm, prompts, params)
            row["first batch s"] = time.perf_counter() - started
            _same(check, rows, f"after level {level}", found, expected)
            rows[-1] |= row | {"released": report.total_released, "unexplained": report.difference}
            if check.device.type == "cuda":
                text = f"sleep: level {level}: the driver differs from the owners by {report.difference:,} bytes"
                check.expect(abs(report.difference) <= 64 << 20, text)
        rows += [{"way": f"ledger: {entry.owner}", "resident": entry.resident} for entry in llm.memory_ledger().entries]


def table(rows: list[Row]) -> str:
    """The rows under the names of their values."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes, on a CPU in Triton's interpreter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    args = parser.parse_args(argv)
    if not args.small and not torch.cuda.is_available():
        print("there is no CUDA device; --small runs the same code on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if args.small else torch.device("cuda", torch.cuda.current_device())
    check = Check(SMALL if args.small else FULL, device)
    torch.manual_seed(0)
    with rk.use_backend("triton"), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check.run("machine", machine)
        check.run("ceilings", ceilings)
        check.run("kernels", kernels)
        check.run("kernel times", kernel_times)
        check.run("model", lambda check, rows: write_model(check.size, folder, check.device))
        check.run("engine bits", lambda check, rows: engine_bits(check, rows, folder))
        check.run("engine speed", lambda check, rows: engine_speed(check, rows, folder))
        check.run("sleep and wake", lambda check, rows: sleep_and_wake(check, rows, folder))
    if args.json:
        found = {"sections": check.sections, "failures": check.failures}
        args.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    print("\n" + ("\n".join(["FAILED:", *check.failures]) if check.failures else "everything passed"))
    return 1 if check.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
