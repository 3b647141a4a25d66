"""By reference: trainer and engine hold one copy of the weights, shown by addresses and by resident memory."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout import LLM
from rollout.weights.in_process import InProcess
from tests.support.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """36 MB of weights: far above what else moves in a process."""
    folder = make_tiny_llama(
        tmp_path_factory.mktemp("model"), vocab_size=4096, hidden_size=512, intermediate_size=1024, num_layers=2
    )
    with LLM(folder, kv_cache_memory="2MiB") as engine:
        yield engine


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_trainer_trains_the_very_memory_that_the_engine_reads_and_updates_take_none(llm: LLM):
    model = llm.shared_model()
    engine = llm.engine.parameters()
    trainer = dict(model.named_parameters())
    assert trainer.keys() == engine.keys()
    for name, parameter in trainer.items():
        assert parameter.data_ptr() == engine[name].data_ptr(), name
        assert parameter.untyped_storage().data_ptr() == engine[name].untyped_storage().data_ptr()
    addresses = {name: tensor.data_ptr() for name, tensor in engine.items()}
    llm.verify()
    before = resident()
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        with llm.policy_update() as update:
            update.load(InProcess(model))
        assert (update.receipt.bytes_copied, update.receipt.bytes_shared) == (0, update.receipt.num_bytes)
    assert resident() - before < update.receipt.num_bytes // 10
    assert {name: tensor.data_ptr() for name, tensor in llm.engine.parameters().items()} == addresses


def test_a_trainer_with_weights_of_its_own_costs_them_once_and_the_update_nothing_more(llm: LLM, tmp_path: Path):
    folder = make_tiny_llama(tmp_path, vocab_size=4096, hidden_size=512, intermediate_size=1024, num_layers=2, seed=1)
    weights = load_file(folder / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    before = resident()
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.float32)  # of its own, not what the heap had left
    pieces = memory.split([tensor.numel() for tensor in weights.values()])
    policy = {
        name: piece.view(tensor.shape).copy_(tensor)
        for (name, tensor), piece in zip(weights.items(), pieces, strict=True)
    }
    assert resident() - before > 0.9 * num_bytes  # the measure sees a copy where there is one
    before = resident()
    with llm.policy_update() as update:
        update.load(InProcess(policy))
    assert update.receipt.bytes_copied == num_bytes
    assert resident() - before < num_bytes // 10
