"""Group relative policy optimisation, on the engine's own weights.

One step, in one process, on one machine that sampler and trainer take turns with:

    rollouts ─► rewards ─► advantages ─► engine sleeps ─► micro-batches ─► optimiser ─► policy update ─► engine wakes
       ▲                                                                                     │
       └─────────────────────────── the next step samples from the new policy ◄──────────────┘

The parameters that the optimiser writes are the tensors that the sampler reads. So nothing is copied at an update: it
verifies what is there, and makes everything that was computed from the old weights unreachable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.memory_phases import MemoryPhases
from rollout.memory_treaty import MemoryTreaty, TreatyPlan
from rollout.platform.platform import platform_for
from rollout_trainers.advantages import GroupStatistics, group_advantages
from rollout_trainers.config import RunConfig
from rollout_trainers.corrections import importance_metrics, importance_weights, measure_mismatch
from rollout_trainers.evaluation import Evaluation, evaluate_rewards
from rollout_trainers.losses import Denominators, clipped_policy_loss, kl_estimate, token_weights
from rollout_trainers.metrics import LearnStatistics, memory_metrics, sample_metrics, speed_metrics
from rollout_trainers.mismatch import Finding, MismatchWatch, examine
from rollout_trainers.optimizer import MasterAdamW, learning_rate
from rollout_trainers.packing import PackedBatch, pack_micro_batches
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.producer import RolloutProducer, derive_seed, select_examples
from rollout_trainers.rewards import score
from rollout_trainers.tracking import Timers
from rollout_trainers.types import Sample, Task


class GRPOTrainer:
    """Trains `policy` on `task` with samples of `producer`'s engine, one `step()` at a time. Steps count from 1.

    With a `treaty` the engine's KV pool is sized by what the steps before have needed.
    """

    def __init__(
        self,
        producer: RolloutProducer,
        policy: SharedPolicy,
        task: Task,
        config: RunConfig,
        treaty: MemoryTreaty | None = None,
    ) -> None:
        self.producer = producer
        self.engine = producer.engine
        self.policy = policy
        self.task = task
        self.config = config
        self.optimizer = MasterAdamW(policy.model.named_parameters(), config.optimizer)
        self.num_tokens = 0  # sampled so far, over all steps
        self.receipt: object = None  # of the last policy update
        self.released_bytes = 0  # by the engine, for the last training phase
        self.treaty = treaty
        self.plan: TreatyPlan | None = None  # of the treaty, as it stands
        if treaty is None:
            self.memory = MemoryPhases(platform_for(config.engine.device), self.engine.memory_ledger)
        else:
            self.memory = treaty.phases
            self.plan = treaty.settle()
        self.watch = MismatchWatch(config.tracking)
        self.finding: Finding | None = None  # of the last step, where its logprobs differed

    def step(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """One step: samples, scores, learns, and gives the engine the new policy. Returns the samples and metrics."""
        timers = Timers()
        self.finding = None
        by_owner = self.treaty is not None or step % 10 == 1 or step == self.config.steps  # it takes a while
        with timers.phase("step"):
            with self.memory.phase("sampling", by_owner), timers.phase("gen"):
                samples = self.rollouts(step)
            engine_gauges = self.engine.get_metrics()
            with timers.phase("reward"):
                score(samples, self.task.rewards)
                groups = self.assign_advantages(samples)
            with self.memory.phase("sleeping", by_owner), timers.phase("sleep"):
                self.suspend_engine()
            with self.memory.phase("training", by_owner), timers.phase("train"):
                statistics = self.learn(step, samples)
            with self.memory.phase("update", by_owner), timers.phase("sync"):
                self.update_engine(step)
            with timers.phase("wake"):
                if self.treaty is not None:
                    self.plan = self.treaty.settle()
                self.resume_engine()
        self.num_tokens += sum(sample.num_tokens for sample in samples)
        metrics = sample_metrics(samples, groups) | statistics.metrics(self.config.algorithm.kl_coefficient > 0)
        metrics |= timers.metrics() | speed_metrics(samples, statistics, timers.seconds)
        metrics |= {f"engine/{name}": value for name, value in engine_gauges.items()}
        metrics |= memory_metrics(self.memory, self.plan)
        metrics |= {"num_tokens": self.num_tokens, "policy_version": step}
        if self.finding is not None:
            metrics |= self.finding.metrics
        return samples, metrics | {"perf/sleep_released_gb": self.released_bytes / 2**30}

    def rollouts(self, step: int) -> list[Sample]:
        """The step's groups, group after group."""
        algorithm = self.config.algorithm
        examples = select_examples(self.task.train, step, algorithm.prompts_per_step, self.config.seed)
        return self.producer.produce(step, examples, algorithm.group_size)

    def assign_advantages(self, samples: Sequence[Sample]) -> GroupStatistics:
        """Fills the samples' advantages; returns the groups' statistics."""
        algorithm = self.config.algorithm
        rewards = np.array([sample.reward for sample in samples])
        advantages, groups = group_advantages(rewards, algorithm.group_size, algorithm.advantage_scale)
        for sample, advantage in zip(samples, advantages, strict=True):
            sample.advantage = float(advantage)
        return groups

    def learn(self, step: int, samples: Sequence[Sample]) -> LearnStatistics:
        """All optimiser steps over one step's samples."""
        algorithm = self.config.algorithm
        statistics = LearnStatistics()
        kept = [sample for sample in samples if not (algorithm.drop_truncated and sample.is_truncated)]
        for epoch in range(algorithm.epochs):
            order = np.arange(len(kept))
            if algorithm.minibatches * algorithm.epochs > 1:
                seed = derive_seed(self.config.seed, "minibatches", step, epoch)
                order = np.random.default_rng(seed).permutation(len(kept))
            if epoch == 0 and algorithm.recompute_logprobs:
                self.recompute_logprobs(kept, statistics)
            for part in np.array_split(order, algorithm.minibatches):
                self.update_policy(step, [kept[index] for index in part], statistics)
        return statistics

    def update_policy(self, step: int, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """One optimiser step. Samples that cannot move the weights count in the denominators, and cost nothing."""
        config, algorithm = self.config, self.config.algorithm
        statistics.learning_rate = rate = learning_rate(step - 1, config.steps, config.optimizer)
        if not samples:
            return
        denominators = Denominators(
            num_tokens=sum(sample.num_tokens for sample in samples),
            num_sequences=len(samples),
            normalizer=algorithm.loss_normalizer or config.sampling.max_tokens,
        )
        moving = [sample for sample in samples if sample.advantage != 0.0 or algorithm.kl_coefficient > 0]
        batches = pack_micro_batches(moving, algorithm.micro_batch_tokens)
        if not batches:
            return
        references: Sequence[torch.Tensor | None] = [None] * len(batches)
        if algorithm.kl_coefficient > 0:
            references = self.policy.reference_logprobs(batches)
        statistics.loss = 0.0
        for batch, reference in zip(batches, references, strict=True):
            loss = self.micro_batch_loss(batch, reference, denominators, statistics)
            loss.backward()
            statistics.loss += float(loss.detach())
        if statistics.num_updates == 0:
            self.examine_mismatch(step, moving, statistics)
        statistics.grad_norm = max(statistics.grad_norm, self.optimizer.step(rate))
        statistics.num_updates += 1

    def micro_batch_loss(
        self,
        batch: PackedBatch,
        reference: torch.Tensor | None,
        denominators: Denominators,
        statistics: LearnStatistics,
    ) -> torch.Tensor:
        """This micro-batch's share of the loss of the whole optimiser step, a scalar with gradient."""
        algorithm = self.config.algorithm
        logprobs, _ = self.policy.logprobs(batch)  # [C]
        if statistics.num_updates == 0 and not algorithm.recompute_logprobs:
            statistics.mismatch.append(measure_mismatch(logprobs, batch.sampler_logprobs))
        losses, clipped = clipped_policy_loss(
            logprobs, batch.old_logprobs, batch.advantages, algorithm.clip_low, algorithm.clip_high
        )
        if algorithm.recompute_logprobs:
            losses = losses * importance_weights(batch.old_logprobs, batch.sampler_logprobs, algorithm.importance_cap)
        if reference is not None:
            losses = losses + algorithm.kl_coefficient * kl_estimate(logprobs, reference, algorithm.kl_estimator)
            statistics.kl_sum += float(kl_estimate(logprobs.detach(), reference, "k3").double().sum())
        statistics.clipped_low += clipped.low
        statistics.clipped_high += clipped.high
        statistics.num_tokens += batch.num_completion_tokens
        statistics.num_input_tokens += batch.num_input_tokens
        return (losses * token_weights(batch.lengths, denominators, algorithm.aggregation)).sum()

    def recompute_logprobs(self, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """Takes the old logprobs from a forward pass of the trainer, and measures how far the sampler's are off."""
        weights = []
        for batch in pack_micro_batches(samples, self.config.algorithm.micro_batch_tokens):
            logprobs = self.policy.frozen_logprobs(batch)
            statistics.mismatch.append(measure_mismatch(logprobs, batch.sampler_logprobs))
            weights.append(importance_weights(logprobs, batch.sampler_logprobs, self.config.algorithm.importance_cap))
            parts = logprobs.split(batch.lengths.tolist())
            for index, part in zip(batch.sample_indices, parts, strict=True):
                samples[index].old_logprobs = part.numpy().copy()
        statistics.importance = importance_metrics(torch.cat(weights)) if weights else {}

    def examine_mismatch(self, step: int, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """Asks the engine why the logprobs differ, while its weights are still those that sampled.

        The engine wakes for it, so that in such a step its KV pool and the gradients need memory together.
        """
        mismatch = statistics.merged_mismatch()
        if not self.watch.is_due(step, mismatch):
            return
        released = self.released_bytes
        self.resume_engine()
        temperature, budget = self.config.sampling.temperature, self.config.algorithm.micro_batch_tokens
        self.finding = examine(self.engine, self.policy, samples, temperature, budget, step, mismatch)
        self.watch.learn(self.finding)
        self.suspend_engine()
        self.released_bytes = released

    def suspend_engine(self) -> None:
        """Gives the KV pool's memory to the training phase, where the recipe wants that."""
        if self.config.engine.sleep:
            self.released_bytes = self.engine.sleep(level=1).total_released

    def update_engine(self, version: int) -> None:
        """Makes the weights as they now are the engine's policy `version`, verified."""
        with self.engine.policy_update(version=version) as update:
            update.load(self.policy.model.named_parameters())
        self.receipt = update.receipt

    def resume_engine(self) -> None:
        if self.config.engine.sleep:
            self.engine.wake_up()

    def evaluate(self) -> tuple[list[Sample], Evaluation]:
        """One completion of each held-out prompt by the policy as it is. The engine must be awake."""
        section = self.config.evaluation
        max_tokens = section.max_tokens or self.config.sampling.max_tokens
        samples = self.producer.evaluate(self.task.evaluation, section.temperature, max_tokens)
        score(samples, self.task.rewards)
        rewards = [sample.reward for sample in samples]
        lengths = [sample.num_tokens for sample in samples]
        return samples, evaluate_rewards(rewards, lengths, section.success_threshold)
