"""On-policy distillation: the policy samples, and a teacher says of each token how likely it would have made it.

    rollouts ─► rewards ─► engine sleeps ─► teacher reads ─► advantages ─► micro-batches ─► optimiser ─► policy update
       ▲                                                                                                     │
       └──────────────── the next step samples from the new policy, and the engine wakes ◄───────────────────┘

What is minimised is the KL of the policy to the teacher, on the policy's own samples: it learns how to go on from where
it gets to itself, and does not have to follow where the teacher alone would go (`teacher_config.TeacherSection`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.memory_treaty import MemoryTreaty
from rollout_trainers.asynchronous import GroupStream
from rollout_trainers.config import RunConfig
from rollout_trainers.data_parallel import gathered_samples
from rollout_trainers.grpo import GRPOTrainer, by_sample
from rollout_trainers.metrics import LearnStatistics
from rollout_trainers.optimizer import Optimizer
from rollout_trainers.packing import pack_micro_batches
from rollout_trainers.policy import Policy
from rollout_trainers.producer import Producer
from rollout_trainers.ranks import Ranks
from rollout_trainers.teacher import Teacher
from rollout_trainers.teacher_config import TeacherSection
from rollout_trainers.types import Sample, Task


class DistillationTrainer(GRPOTrainer):
    """Trains `policy` to do as `teacher` does, and on `task` as far as its rewards count, one `step()` at a time."""

    def __init__(
        self,
        producer: Producer,
        policy: Policy,
        teacher: Teacher,
        task: Task,
        config: RunConfig,
        treaty: MemoryTreaty | None = None,
        ranks: Ranks | None = None,
        optimizer: Optimizer | None = None,
        stream: GroupStream | None = None,
    ) -> None:
        self.teacher = teacher
        # Last, since it shares out the memory that is left.
        super().__init__(producer, policy, task, config, treaty, ranks, optimizer, stream)

    def learn(self, step: int, samples: Sequence[Sample]) -> LearnStatistics:
        """All optimiser steps over one step's samples."""
        statistics = super().learn(step, samples)
        statistics.further |= teacher_metrics(gathered_samples(self.ranks, samples))
        return statistics

    def freeze_logprobs(self, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """The teacher's logprobs, too: it reads before the first update and does not change."""
        super().freeze_logprobs(samples, statistics)
        batches = pack_micro_batches(samples, self.config.algorithm.micro_batch_tokens)
        for sample, part in by_sample(samples, batches, self.teacher.logprobs(batches)):
            sample.teacher_logprobs = part

    def assign_advantages(self, samples: Sequence[Sample]) -> None:
        """What the teacher says of each token and, as far as they count, the samples' rewards."""
        section = self.config.teacher
        if section.uses_rewards:
            super().assign_advantages(samples)
        add_teacher_advantages(samples, section, self.ranks)


def add_teacher_advantages(samples: Sequence[Sample], section: TeacherSection, ranks: Ranks | None = None) -> None:
    """Adds to `reward_weight` times the advantages that the samples have what the teacher says, see `TeacherSection`.

    Samples without `teacher_logprobs`, which are not learned from, have no part in the baseline, which is over the
    samples of all `ranks`.
    """
    read = [sample for sample in samples if sample.teacher_logprobs is not None]
    rewards = [discounted_to_go(teacher_rewards(sample), section.discount) for sample in read]
    baseline = 0.0
    if section.baseline == "batch_mean":
        everyones, _ = (ranks or Ranks()).gather_all(rewards)
        joined = np.concatenate([np.zeros(0), *everyones])
        baseline = float(joined.mean()) if joined.size else 0.0
    for sample, own in zip(read, rewards, strict=True):
        advantages = section.weight * (own - baseline)
        if section.uses_rewards:
            task = sample.advantage if sample.token_advantages is None else sample.token_advantages
            advantages += section.reward_weight * task
        sample.token_advantages = advantages.astype(np.float32)
        sample.advantage = float(advantages.mean()) if advantages.size else 0.0


def teacher_rewards(sample: Sample) -> np.ndarray:
    """Float64 [c]: log teacher - log policy of each token, under the policy that the step has begun with. Its mean over
    what the policy samples is minus the KL of the policy to the teacher."""
    if sample.teacher_logprobs is None:
        raise ValueError("a sample has no teacher_logprobs: what the teacher says of it is not known")
    return sample.teacher_logprobs.astype(np.float64) - sample.frozen_logprobs


def discounted_to_go(values: np.ndarray, discount: float) -> np.ndarray:
    """Float64 [c]: at each place the sum of `values` [c] from there to the end, the one k places later times
    `discount` ** k."""
    result = values.astype(np.float64)
    if discount:
        for place in range(len(result) - 2, -1, -1):
            result[place] += discount * result[place + 1]
    return result


def teacher_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """How far the policy that sampled is from its teacher: `teacher/kl`, in nats a token, and `teacher/sequence_kl`, in
    nats a sample, estimate the KL of the policy to the teacher (k1: the mean of log policy - log teacher).
    `teacher/logprob` is the mean of the teacher's logprobs."""
    theirs = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    rewards = [teacher_rewards(sample) for sample in samples if sample.teacher_logprobs is not None]
    if not sum(part.size for part in rewards):
        return {}
    return {
        "teacher/kl": -float(np.concatenate(rewards).mean()),
        "teacher/sequence_kl": -float(np.mean([part.sum() for part in rewards])),
        "teacher/logprob": float(np.concatenate(theirs).mean()),
    }
