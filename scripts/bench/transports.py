"""What a policy update costs over each transport: seconds, bytes, memory, beside a plain copy.

    .venv/bin/python scripts/bench/transports.py [MODEL] [--repeats 5]          SmolLM2-135M
    .venv/bin/python scripts/bench/transports.py --synthetic                    random weights, the shape of a 1B Llama

The trainer is a process of its own, with the same weights in bfloat16. Before each update it changes them: "adam"
changes what an Adam step at a learning rate of 1e-6 changes in bfloat16 (a value moves to its neighbour with the
probability step / spacing), "dense" every value. Medians of the repeats; one update before them warms up. Prints one
JSON line a transport, then a table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from rollout import LLM
from rollout.models.loader import iterate_checkpoint
from rollout.models.pretrained import SMOLLM2, resolve_model
from rollout.weights.broadcast import BroadcastReceiver, BroadcastSender
from rollout.weights.in_process import InProcess
from rollout.weights.safetensors_folder import SafetensorsFolderReceiver, SafetensorsFolderSender
from rollout.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from rollout.weights.sparse_delta import SparseDeltaReceiver, SparseDeltaSender
from rollout.weights.transport import Sender, Transport

LEARNING_RATE = 1e-6
CASES = {  # name -> transport and what changes before each update
    "in process, copied": ("copied", "adam"),
    "shared memory": ("shared_memory", "adam"),
    "broadcast (gloo)": ("broadcast", "adam"),
    "safetensors folder": ("folder", "adam"),
    "sparse delta over shared memory, adam": ("sparse", "adam"),
    "sparse delta over shared memory, dense": ("sparse", "dense"),
    "in process, by reference": ("reference", "adam"),
}


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollout-transports-", dir=args.folder) as scratch:
        folder = synthetic_model(Path(scratch)) if args.synthetic else resolve_model(args.model)
        llm = LLM(folder, dtype="bfloat16", kv_cache_memory="16MiB", max_model_len=256, num_threads=1)
        num_bytes = sum(tensor.nbytes for tensor in llm.engine.parameters().values())
        copy = copy_seconds(llm)
        print(json.dumps({"bytes": num_bytes, "copy seconds": round(copy, 4), "copy GB/s": gigabytes(num_bytes, copy)}))
        lines = []
        for name in args.cases:
            lines.append(measure(name, llm, folder, Path(scratch), args.repeats, num_bytes))
            print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--synthetic", action="store_true", help="random weights of 1.24 billion parameters instead")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where files are written (default: the system's temporary folder)")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    return parser.parse_args()


def synthetic_model(scratch: Path) -> Path:
    """A checkpoint with the shapes of Llama 3.2 1B."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(scratch / "config")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    tensors = (
        (name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
        for name, shape in shapes.items()
    )
    SafetensorsFolderSender(scratch / "model", files_from=scratch / "config").send(1, tensors)
    assert AutoConfig.from_pretrained(scratch / "model" / "policy-000000001").hidden_size == config.hidden_size
    return scratch / "model" / "policy-000000001"


def copy_seconds(llm: LLM) -> float:
    """A plain copy of every parameter into memory that was written before; the median of three."""
    parameters = list(llm.engine.parameters().values())
    copies = [parameter.clone() for parameter in parameters]

    def copy() -> None:
        for destination, source in zip(copies, parameters, strict=True):
            destination.copy_(source)

    return statistics.median(seconds_of(copy) for _ in range(3))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(name: str, llm: LLM, folder: Path, scratch: Path, repeats: int, num_bytes: int) -> dict[str, Any]:
    """One transport: the medians of `repeats` updates."""
    transport, change = CASES[name]
    if transport in ("reference", "copied"):
        updates = list(in_process(llm, folder, transport, change, repeats + 1))
    else:
        updates = list(from_trainer(llm, folder, scratch, transport, change, repeats + 1))
    updates = updates[1:]

    def median(key: str) -> float:
        return statistics.median(update[key] for update in updates)

    return {
        "transport": name,
        "update seconds": round(median("update"), 3),
        "load seconds": round(median("load"), 3),
        "verify seconds": round(median("verify"), 3),
        "send seconds": round(median("send"), 3),
        "wire MB": round(median("wire") / 1e6, 1),
        "GB/s": gigabytes(num_bytes, median("load")),
        "sender extra MB": round(median("sender memory") / 1e6),
        "engine extra MB": round(median("engine memory") / 1e6),
    }


def in_process(llm: LLM, folder: Path, transport: str, change: str, count: int) -> Iterator[dict[str, float]]:
    if transport == "reference":
        policy: dict[str, torch.Tensor] = dict(llm.shared_model().named_parameters())
    else:
        policy = load(folder)
    before = start_peak()
    for index in range(count):
        with torch.no_grad():
            changed(policy, change, index)
        yield update_with(llm, lambda: InProcess(policy), before) | {"send": 0.0, "wire": 0.0, "sender memory": 0.0}


def update_with(llm: LLM, receiver: Callable[[], Transport], before: int) -> dict[str, float]:
    """One update: its seconds, and how much more memory than `before` this process held at its peak."""
    start_peak()
    with llm.policy_update() as update:
        update.load(receiver())
    receipt = update.receipt
    phases = receipt.phase_seconds
    memory = peak() - before
    return {"update": receipt.seconds, "load": phases["load"], "verify": phases["verify"], "engine memory": memory}


def from_trainer(
    llm: LLM, folder: Path, scratch: Path, transport: str, change: str, count: int
) -> Iterator[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    trainer = context.Process(target=train, args=(there, folder, scratch, transport, change), daemon=True)
    trainer.start()
    there.close()
    where = here.recv()
    receivers: dict[str, Callable[[], Transport]] = {
        "shared_memory": lambda: SharedMemoryReceiver(where),
        "broadcast": lambda: BroadcastReceiver(where),
        "folder": lambda: SafetensorsFolderReceiver(where),
        "sparse": lambda: SparseDeltaReceiver(SharedMemoryReceiver(where)),
    }
    before = start_peak()
    for _ in range(count):
        here.send(llm.policy_version + 1)
        if transport == "folder":
            sent = here.recv()  # both at once would measure how they share the machine, not what each costs
            yield update_with(llm, receivers[transport], before) | sent
        else:
            assert here.recv() == "ready"
            yield update_with(llm, receivers[transport], before) | here.recv()
    here.send(None)
    trainer.join(60)


def train(connection: Connection, folder: Path, scratch: Path, transport: str, change: str) -> None:
    """The trainer's process: changes its weights and sends them, for every version that it is told."""
    torch.set_num_threads(1)
    policy = load(folder)
    sender, where = open_sender(transport, scratch)
    connection.send(where)
    index, before = 0, start_peak()
    while (version := connection.recv()) is not None:
        changed(policy, change, index)
        index += 1
        if transport != "folder":
            connection.send("ready")
        start_peak()
        report = sender.send(version, policy.items())
        connection.send({"send": report.seconds, "wire": report.num_bytes, "sender memory": peak() - before})
    sender.close()


def open_sender(transport: str, scratch: Path) -> tuple[Sender, str]:
    if transport == "broadcast":
        broadcast = BroadcastSender()
        return broadcast, broadcast.address
    where = scratch / transport
    if transport == "folder":
        return SafetensorsFolderSender(where), str(where)
    ring = SharedMemorySender(where)
    return (SparseDeltaSender(ring) if transport == "sparse" else ring), str(where)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16).clone() for name, tensor in iterate_checkpoint(folder)}


def changed(policy: dict[str, torch.Tensor], change: str, seed: int) -> None:
    """Changes weights in place, as bits: to a neighbour, each with its probability ("adam") or all of them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.values():
        bits = tensor.view(torch.int16).view(-1)
        if change == "dense":
            bits ^= 1
            continue
        for piece in bits.split(1 << 24):
            spacing = piece.view(torch.bfloat16).float().abs().clamp_min(1e-30).log2_().floor_().sub_(7).exp2_()
            moved = torch.rand(len(piece), generator=generator).mul_(spacing) < LEARNING_RATE
            piece ^= moved.to(torch.int16)


def start_peak() -> int:
    """Resident bytes now; `peak` then says the most since."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def gigabytes(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 2)


def table(lines: list[dict[str, Any]]) -> str:
    """As it stands in docs/policy_updates.md."""
    columns = list(lines[0])
    rows = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    rows += [f"| {' | '.join(str(line[column]) for column in columns)} |" for line in lines]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
