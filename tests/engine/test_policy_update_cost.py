"""What a policy update of SmolLM2-135M costs: bytes copied, memory at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout import LLM
from rollout.platform.cpu import peak_memory, reset_peak_memory
from rollout.worker.ledger import process_resident_bytes

MIB = 1 << 20
NUM_BYTES = 269_030_016  # 134,515,008 parameters in bfloat16


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, kv_cache_memory="16MiB", max_model_len=256)


def test_a_trainer_that_shares_the_memory_moves_no_byte_and_takes_no_memory(llm: LLM) -> None:
    model = llm.shared_model()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    before = process_resident_bytes()
    reset_peak_memory()
    with llm.policy_update() as update:
        update.load(model.named_parameters())
    assert peak_memory() - before < 8 * MIB
    receipt = update.receipt
    assert (receipt.bytes_copied, receipt.bytes_shared, receipt.num_bytes) == (0, NUM_BYTES, NUM_BYTES)
    assert receipt.num_tensors == 273  # 272 parameters and the tied head
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert receipt.seconds < 5  # 0.04 s on two idle cores; the limit only catches a change of order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_trainer_with_its_own_memory_never_makes_a_second_copy_of_the_model(llm: LLM, dtype: torch.dtype) -> None:
    largest = max(tensor.nbytes for tensor in llm.engine.parameters().values())
    width = dtype.itemsize // 2

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in llm.shared_model().named_parameters():
            yield name, parameter.detach().to(dtype, copy=True)

    before = process_resident_bytes()
    reset_peak_memory()
    with llm.policy_update() as update:
        update.load(gathered())
    assert peak_memory() - before < (width + 1) * largest + 16 * MIB < NUM_BYTES  # one tensor and its cast
    assert update.receipt.bytes_copied == NUM_BYTES
    llm.verify()
