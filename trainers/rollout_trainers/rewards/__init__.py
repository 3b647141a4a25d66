"""Rewards: plain functions `reward(prompts, completions, **columns) -> list[float]`, and scoring with them."""

from rollout_trainers.rewards.answers import completion_text, exact_answer_reward, final_number_reward
from rollout_trainers.rewards.scoring import reward_names, score

__all__ = ["completion_text", "exact_answer_reward", "final_number_reward", "reward_names", "score"]
