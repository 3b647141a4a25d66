"""Rewards: plain functions `reward(prompts, completions, **columns) -> list[float | None]`, and scoring with them."""

from rollout_trainers.rewards.answers import completion_text, exact_answer_reward, final_number_reward
from rollout_trainers.rewards.mathematics import math_verify_reward
from rollout_trainers.rewards.scoring import TrainerState, check_columns, names_environments, reward_names, score

__all__ = [
    "TrainerState",
    "check_columns",
    "completion_text",
    "exact_answer_reward",
    "final_number_reward",
    "math_verify_reward",
    "names_environments",
    "reward_names",
    "score",
]
