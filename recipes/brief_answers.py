"""A recipe whose rewards are code: right answers, and the fewer words around them the better.

rollout train recipes/brief_answers.py steps=20
"""

from __future__ import annotations

import sys
from typing import Any

from rollout_trainers.recipe import config_from_values
from rollout_trainers.rewards import completion_text, final_number_reward
from rollout_trainers.run import run

VALUES: dict[str, Any] = {
    "name": "brief_answers",
    "model": "smollm2-135m-instruct",
    "output_dir": "runs/brief_answers",
    "steps": 40,
    "task": {
        "name": "reasoning_gym",
        "parameters": {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "train_size": 100,
        "eval_size": 100,
    },
    "sampling": {"max_tokens": 24},
    "optimizer": {"learning_rate": 3e-5, "warmup_steps": 3},
    "engine": {"max_model_len": 512, "kv_cache_memory": "256 MiB"},
}


def brevity_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """From 0.5 for one word down to 0 for eleven or more."""
    return [max(0.0, 0.5 - 0.05 * (len(completion_text(text).split()) - 1)) for text in completions]


if __name__ == "__main__":
    run(config_from_values(VALUES, sys.argv[1:]), reward_functions=[final_number_reward, brevity_reward])
