"""A process that ends right after a collective, while gloo's threads still hold tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rollout.weights.gloo_threads import wait_for_gloo_threads
from tests.support.distributed import ROOT

# Threads of C++ get Python's lock only when the main thread waits: without the hook every second of these aborts.
PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
from rollout.weights.trainer_tensors import policy_tensors

sys.setswitchinterval(100)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
policy_tensors(nn.Linear(2, 2))
group = dist.group.WORLD
for tensor in [torch.ones(1 << 16) for _ in range(200)]:
    dist.all_gather([torch.empty_like(tensor)], tensor)
"""


@pytest.mark.parametrize("attempt", range(4))
def test_a_process_that_has_gathered_weights_ends_without_an_abort(attempt: int, tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        env={"PYTHONPATH": ":".join(str(ROOT / name) for name in (".", "kernels")), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


def test_waiting_ends_at_once_when_the_threads_wait_for_work(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(8))
        assert wait_for_gloo_threads(patience=60)
    finally:
        dist.destroy_process_group()
