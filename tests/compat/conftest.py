"""The stand-in for vLLM, there before TRL's trainers are imported and gone after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import rollout.compat
from tests.support.trl import ENGINE


@pytest.fixture
def stand_in() -> Iterator[None]:
    rollout.compat.install(**ENGINE)
    yield
    rollout.compat.uninstall()


@pytest.fixture(autouse=True)
def nothing_of_a_process_group_is_left() -> Iterator[None]:
    """TRL's trainers make one in colocate mode, of this process alone, and never end it; with what they leave in the
    environment the next trainer would make another, at accelerate's fixed port."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)
