"""A broadcast from a trainer of two ranks to an engine of two processes, which are in different default groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.distributed import run_ranks


@pytest.mark.slow
def test_two_trainer_ranks_push_to_two_engine_processes_and_hear_of_a_failure(tmp_path: Path):  # case WS-10
    run_ranks("tests.support.broadcast_ranks:main", tmp_path, num_ranks=4)
