"""Proximal policy optimisation with a critic, on the engine's own weights (Schulman et al. 2017; for language models
Ziegler et al. 2019, Ouyang et al. 2022).

    rollouts ─► rewards ─► engine sleeps ─► values ─► advantages ─► minibatches ─► policy and critic ─► policy update
       ▲                                                                                                     │
       └───────────────── the next step samples from the new policy, and the engine wakes ◄──────────────────┘

Each token is an action. The task's reward comes with the last one, and every token pays for its KL to the reference.
The critic says before each token what is to be expected; an advantage is how much better it went, as far as `gae.py`
looks ahead. In the first `critic.warmup_steps` steps the policy stays as it is, and only the critic learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rollout.memory_treaty import MemoryTreaty
from rollout_trainers.asynchronous import GroupStream
from rollout_trainers.config import OptimizerSection, RunConfig
from rollout_trainers.critic import Critic
from rollout_trainers.critic_metrics import CriticStatistics, merge_critic_statistics
from rollout_trainers.data_parallel import gathered_samples, make_optimizer
from rollout_trainers.grpo import GRPOTrainer, by_sample
from rollout_trainers.losses import Denominators
from rollout_trainers.metrics import LearnStatistics
from rollout_trainers.objective import critic_loss
from rollout_trainers.optimizer import Optimizer, learning_rate
from rollout_trainers.packing import PackedBatch
from rollout_trainers.policy import Policy
from rollout_trainers.producer import Producer
from rollout_trainers.ranks import Ranks
from rollout_trainers.types import Sample, Task

_LEARNING_RATES = {"value_head": 1e-3, "separate": 1e-5}


class PPOTrainer(GRPOTrainer):
    """Trains `policy` and `critic` on `task`, one `step()` at a time."""

    def __init__(
        self,
        producer: Producer,
        policy: Policy,
        critic: Critic,
        task: Task,
        config: RunConfig,
        treaty: MemoryTreaty | None = None,
        ranks: Ranks | None = None,
        stream: GroupStream | None = None,
    ) -> None:
        self.critic = critic
        self.critic_section = critic_optimizer(config)
        self.critic_optimizer = make_optimizer(critic.named_parameters(), self.critic_section, ranks or Ranks())
        self.critic_statistics = CriticStatistics()
        self.policy_learns = True
        # last: it shares out the memory that is left
        super().__init__(producer, policy, task, config, treaty, ranks, stream=stream)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return {**super().optimizers, "critic": self.critic_optimizer}

    def learn(self, step: int, samples: Sequence[Sample]) -> LearnStatistics:
        """All optimiser steps over one step's samples, of the policy and the critic."""
        self.policy_learns = step > self.config.critic.warmup_steps
        self.critic_statistics = CriticStatistics()
        statistics = super().learn(step, samples)
        if not self.policy_learns:
            statistics.learning_rate = 0.0
        merged = merge_critic_statistics(self.ranks.gather(self.critic_statistics))
        statistics.further |= merged.metrics(gathered_samples(self.ranks, samples))
        return statistics

    def assign_advantages(self, samples: Sequence[Sample]) -> None:
        """How much better each token is than what the critic has expected."""
        self.freeze_values(samples)
        super().assign_advantages(samples)

    @torch.no_grad()
    def freeze_values(self, samples: Sequence[Sample]) -> None:
        """What the critic expects before the step's updates: these values stay."""
        batches = self.micro_batches(samples)
        for sample in samples:
            sample.values = np.zeros(0, np.float32)  # of those without tokens, which are in no batch
        values = [self.critic.values(batch, self._hidden_for_critic(batch)) for batch in batches]
        for sample, part in by_sample(samples, batches, values):
            sample.values = part

    def _hidden_for_critic(self, batch: PackedBatch) -> torch.Tensor | None:
        return self.policy.hidden(batch) if self.critic.reads_policy else None

    def update_policy(self, step: int, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """One optimiser step of both."""
        self.critic_statistics.begin_update()
        super().update_policy(step, samples, statistics)

    def accumulate_gradient(
        self, batch: PackedBatch, denominators: Denominators, statistics: LearnStatistics, is_last: bool
    ) -> None:
        """Adds a micro-batch's share of both gradients. With a value head it is one pass through the policy."""
        with torch.set_grad_enabled(self.policy_learns):
            hidden = self.policy.hidden(batch)
            outputs = self.policy.token_logprobs(hidden, batch)
            loss = self.policy_loss(outputs, batch, denominators, statistics).loss
        if self.policy_learns and not self.critic.reads_policy:  # first: the activations of one are there at a time
            self.optimizer.backward(loss, is_last)
        values = self.critic.values(batch, hidden)
        critic = critic_loss(values, batch, denominators, self.loss, self.config.critic.value_clip)
        if self.policy_learns and self.critic.reads_policy:
            (loss + critic.loss).backward()
        else:
            critic.loss.backward()
        self.critic_statistics.add(values.detach().cpu().numpy(), critic)

    def step_optimizers(self, step: int, statistics: LearnStatistics) -> None:
        """Moves the policy, unless the critic is still warming up, and the critic."""
        if self.policy_learns:
            super().step_optimizers(step, statistics)
        critic = self.critic_statistics
        critic.learning_rate = learning_rate(step - 1, self.config.steps, self.critic_section)
        critic.grad_norm = max(critic.grad_norm, self.critic_optimizer.step(critic.learning_rate))


def critic_optimizer(config: RunConfig) -> OptimizerSection:
    """The policy's section with what the critic has for itself."""
    critic = config.critic
    rate = _LEARNING_RATES[critic.kind] if critic.learning_rate is None else critic.learning_rate
    return replace(
        config.optimizer,
        learning_rate=rate,
        warmup_steps=critic.learning_rate_warmup,
        weight_decay=critic.weight_decay,
        max_grad_norm=critic.max_grad_norm,
    )
