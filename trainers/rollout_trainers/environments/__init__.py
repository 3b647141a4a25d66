"""Environments that the policy takes turns with, and the samples that come of it (`docs/environments.md`)."""

from rollout_trainers.environments.environment import Action, Environment, Observation, StepResult
from rollout_trainers.environments.episodes import EnvironmentFactory, Episode, run_episodes
from rollout_trainers.environments.groups import EpisodeGroups
from rollout_trainers.environments.producer import EpisodeProducer
from rollout_trainers.environments.tools import ToolCall, ToolEnvironment, parse_tool_calls

__all__ = [
    "Action",
    "Environment",
    "EnvironmentFactory",
    "Episode",
    "EpisodeGroups",
    "EpisodeProducer",
    "Observation",
    "StepResult",
    "ToolCall",
    "ToolEnvironment",
    "parse_tool_calls",
    "run_episodes",
]
