"""Trainers around `rollout`: GRPO on the engine's own weights, with plain functions as rewards.

from rollout_trainers import Example, RunConfig
from rollout_trainers.run import run

`completion_mask` and `kl_estimate` are for trainers of your own that pad their batches.
"""

from rollout_trainers.config import RunConfig
from rollout_trainers.losses import kl_estimate
from rollout_trainers.packing import completion_mask
from rollout_trainers.recipe import load_recipe
from rollout_trainers.types import Example, RewardFunction, Sample, Task

__all__ = ["Example", "RewardFunction", "RunConfig", "Sample", "Task", "completion_mask", "kl_estimate", "load_recipe"]
