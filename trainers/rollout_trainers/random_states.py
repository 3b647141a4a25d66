"""The random-number generators of a process, which reward functions and new adapters may use.

Rollouts and the order of the data do not depend on them: these are functions of the run's seed and the step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Starts Python's, NumPy's and torch's generators (those of CUDA devices, too) anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Where the generators stand, in plain values and tensors."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    plain = {**numpy_state, "state": {"key": torch.from_numpy(inner["key"].astype(np.int64)), "pos": inner["pos"]}}
    states = {"python": random.getstate(), "numpy": plain, "torch": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Goes on from `random_states`."""
    inner = states["numpy"]["state"]
    np.random.set_state(
        {**states["numpy"], "state": {"key": inner["key"].numpy().astype(np.uint32), "pos": inner["pos"]}}
    )
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"].clone())
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    for device, state in zip(devices, states["cuda"], strict=False):  # a machine may have more of them, or fewer
        torch.cuda.set_rng_state(state.clone(), device)
