"""Sharded tensors of FSDP2: refused as shards, taken when gathered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollout.errors import TensorKindError
from rollout.weights.transaction import PolicyUpdate
from tests.support.recording_engine import NAMES, RecordingEngine, assert_holds, new_policy, snapshot


class _Trainer(nn.Module):
    """One linear layer under the name of the engine's q_proj, sharded over a mesh of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16, bias=False)
        fully_shard(self, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[_Trainer]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield _Trainer()
    dist.destroy_process_group()


def test_a_sharded_parameter_is_refused_and_its_full_tensor_is_taken(trainer: _Trainer):  # case WS-10
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)
    ((_, shard),) = trainer.named_parameters()
    assert isinstance(shard, DTensor)
    with (
        pytest.raises(TensorKindError, match=r"q_proj\.weight' is a DTensor.*policy_tensors"),
        PolicyUpdate(engine) as up,
    ):
        up.load({**policy, NAMES[1]: shard})
    assert_holds(engine, old)
    with PolicyUpdate(engine) as update:
        update.load({**policy, NAMES[1]: shard.full_tensor()})
    assert_holds(engine, {**policy, NAMES[1]: shard.full_tensor().detach()})


def test_inference_tensors_and_inference_mode_are_no_obstacle():
    engine = RecordingEngine()
    with torch.inference_mode():
        policy = new_policy(engine)
        with PolicyUpdate(engine) as update:
            update.load(policy)
    assert_holds(engine, policy)
    with PolicyUpdate(engine) as update:
        update.load({name: tensor.clone() for name, tensor in policy.items()})
    assert engine.policy_version == 2
