"""The stand-in for vLLM, there before TRL's trainers are imported and gone after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rollout.compat
from tests.support.trl import ENGINE


@pytest.fixture
def stand_in() -> Iterator[None]:
    rollout.compat.install(**ENGINE)
    yield
    rollout.compat.uninstall()
