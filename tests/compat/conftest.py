"""The stand-in for vLLM, there before TRL's trainers are imported and gone after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rollout.compat

SMALL = {"kv_cache_memory": "1MiB", "block_size": 4, "max_num_batched_tokens": 64}


@pytest.fixture
def stand_in() -> Iterator[None]:
    rollout.compat.install(**SMALL)
    yield
    rollout.compat.uninstall()
