"""The transport in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollout.weights.in_process import InProcess
from rollout.weights.transaction import PolicyUpdate
from tests.support.recording_engine import RecordingEngine, module_of, new_policy


@pytest.mark.parametrize("give", [module_of, dict, lambda policy: policy.items(), lambda policy: iter(policy.items())])
def test_a_module_a_mapping_and_pairs_all_load(give: Callable[[dict[str, torch.Tensor]], object]):
    engine = RecordingEngine()
    policy = new_policy(engine)
    with PolicyUpdate(engine) as update:
        loaded = update.load(InProcess(give(policy)))  # pyright: ignore[reportArgumentType]
    assert sorted(loaded) == sorted(policy)
    for name, tensor in engine.tensors.items():
        assert torch.equal(tensor, policy[name])


def test_a_module_over_the_engines_memory_moves_no_bytes():
    engine = RecordingEngine()
    with PolicyUpdate(engine) as update:
        update.load(InProcess(module_of(engine.tensors)))
    assert update.receipt.bytes_copied == 0
    assert update.receipt.bytes_shared == update.receipt.num_bytes
