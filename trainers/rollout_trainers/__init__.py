"""Trainers around `rollout`: GRPO on the engine's own weights, with plain functions as rewards.

from rollout_trainers import Example, RunConfig
from rollout_trainers.run import run
"""

from rollout_trainers.config import RunConfig
from rollout_trainers.recipe import load_recipe
from rollout_trainers.types import Example, RewardFunction, Sample, Task

__all__ = ["Example", "RewardFunction", "RunConfig", "Sample", "Task", "load_recipe"]
