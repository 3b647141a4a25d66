"""Group relative policy optimisation and its relatives, on the engine's own weights. Which one runs is the `loss`
section's business: the trainer goes through the same steps for all of them.

One step, in one process, on one machine that sampler and trainer take turns with:

    rollouts ─► rewards ─► engine sleeps ─► advantages ─► micro-batches ─► optimiser ─► policy update ─► engine wakes
       ▲                                                                                     │
       └─────────────────────────── the next step samples from the new policy ◄──────────────┘

The parameters that the optimiser writes are the tensors that the sampler reads. So nothing is copied at an update: it
verifies what is there, and makes everything that was computed from the old weights unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.memory_phases import MemoryPhases
from rollout.memory_treaty import MemoryTreaty, TreatyPlan
from rollout.models.pretrained import resolve_model
from rollout.platform.platform import platform_for
from rollout.weights.receipt import Receipt
from rollout_trainers.asynchronous import GroupStream
from rollout_trainers.checkpoint import MODEL_FOLDER, load_trainer_state, save_trainer_state
from rollout_trainers.config import RunConfig
from rollout_trainers.corrections import Mismatch, correction_metrics, importance_weights, measure_mismatch
from rollout_trainers.credit import assign_advantages, punish_overlong
from rollout_trainers.data_parallel import check_same_policy, gathered_samples, make_optimizer
from rollout_trainers.dynamic_sampling import SampledGroups, sample_until_informative
from rollout_trainers.evaluation import Evaluation, evaluate_rewards
from rollout_trainers.histograms import Histogram, step_histograms
from rollout_trainers.kl_control import KLControl, sequence_kl
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import Denominators
from rollout_trainers.metrics import (
    LearnStatistics,
    episode_metrics,
    memory_metrics,
    merge_statistics,
    sample_metrics,
    speed_metrics,
)
from rollout_trainers.mismatch import Finding, MismatchWatch, examine
from rollout_trainers.objective import MicroBatchLoss, micro_batch_loss
from rollout_trainers.optimizer import MasterAdamW, Optimizer, learning_rate
from rollout_trainers.packing import PackedBatch, pack_micro_batches
from rollout_trainers.padding import padded_micro_batches
from rollout_trainers.policy import Policy
from rollout_trainers.producer import Producer, derive_seed, select_examples, select_further_examples
from rollout_trainers.ranks import Ranks
from rollout_trainers.rewards import TrainerState, score
from rollout_trainers.tracking import Timers
from rollout_trainers.types import Example, Sample, Task


class GRPOTrainer:
    """Trains `policy` on `task` with samples of `producer`'s engine, one `step()` at a time. Steps count from 1.

    With a `treaty` the engine's KV pool is sized by what the steps before have needed. With several `ranks` each has a
    trainer, an engine and its share of a step's groups; they learn as one process would, that has all of them.
    With a `stream` the step's groups come from there, and the engine may sample while the policy learns.
    """

    def __init__(
        self,
        producer: Producer,
        policy: Policy,
        task: Task,
        config: RunConfig,
        treaty: MemoryTreaty | None = None,
        ranks: Ranks | None = None,
        optimizer: Optimizer | None = None,
        stream: GroupStream | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.stream = stream
        self.version = 0  # of the policy as it is between steps
        self.producer = producer
        self.engine = producer.engine
        self.policy = policy
        self.task = task
        self.config = config
        self.optimizer = optimizer or make_optimizer(policy.named_parameters(), config.optimizer, self.ranks)
        self.kl_control = KLControl.of(config.loss)
        self.num_tokens = 0  # sampled so far, over all steps
        self.receipt: Receipt | None = None  # of the last policy update
        self.released_bytes = 0  # by the engine, for the last training phase
        self.treaty = treaty
        self.plan: TreatyPlan | None = None  # of the treaty, as it stands
        self.platform = platform_for(config.engine.device)
        if treaty is None:
            self.memory = MemoryPhases(self.platform, self.engine.memory_ledger)
        else:
            self.memory = treaty.phases
            self.plan = treaty.settle()
        self.watch = MismatchWatch(config.tracking)
        self.finding: Finding | None = None  # of the last step, where its logprobs differed
        self.reward_metrics: dict[str, list[float]] = {}  # what rewards have logged in the last step
        self.histograms: dict[str, Histogram] = {}  # of the last step

    @property
    def loss(self) -> LossSection:
        """The recipe's, with the KL's coefficient as it stands."""
        return replace(self.config.loss, kl_coefficient=self.kl_control.coefficient)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """By their names in checkpoints."""
        return {"optimizer": self.optimizer}

    @property
    def methods(self) -> dict[str, Callable[..., object]]:
        """What rank 0 calls on all ranks, by name (`Ranks.follow`)."""
        return {
            "step": self.step,
            "evaluate": self.evaluate,
            "save": self.save,
            "save_policy": self.save_policy,
            "restore": self.restore,
        }

    def save(self, folder: Path) -> None:
        """Writes the policy, and what the training needs to go on, into the folder of a checkpoint: of each rank."""
        with self.ranks.calling("save", folder):
            self._save_policy(folder / MODEL_FOLDER)
            with self.ranks.together():
                save_trainer_state(folder, self.optimizers, self.state_dict(), self.ranks.rank)

    def save_policy(self, folder: Path) -> None:
        """Writes the policy as a Hugging Face folder."""
        with self.ranks.calling("save_policy", folder):
            self._save_policy(folder)

    def _save_policy(self, folder: Path) -> None:
        if self.ranks.is_main or self.policy.is_collective:
            self.policy.save(folder, resolve_model(self.config.model))

    def restore(self, folder: Path, step: int) -> None:
        """Goes on from a checkpoint, which is of `step`: its weights are the engine's policy of that version."""
        with self.ranks.calling("restore", folder, step):
            self.load_state_dict(load_trainer_state(folder, self.optimizers, self.ranks.rank, self.ranks.size))
            self.update_engine(step)

    def state_dict(self) -> dict[str, Any]:
        """What the steps so far have changed, beside weights and optimisers; plain values."""
        return {
            "num_tokens": self.num_tokens,
            "kl_coefficient": self.kl_control.coefficient,
            "watch": self.watch.state_dict(),
            "stream": None if self.stream is None else self.stream.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_tokens = state["num_tokens"]
        self.kl_control.coefficient = state["kl_coefficient"]
        self.watch.load_state_dict(state["watch"])
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"])

    def step(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """One step: samples, scores, learns, and gives the engine the new policy. Returns the samples of all ranks and
        the metrics, which are the same on all ranks."""
        with self.ranks.calling("step", step):
            self.kl_control.coefficient = self.ranks.from_main(self.kl_control.coefficient)  # it may be restored
            return self._step(step)

    def _step(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        timers = Timers()
        self.finding, self.reward_metrics = None, {}
        by_owner = self.treaty is not None or step % 10 == 1 or step == self.config.steps  # it takes a while
        with timers.phase("step"):
            with self.memory.phase("sampling", by_owner):
                sampled = self.sample(step, timers)
            engine_gauges = self.engine.get_metrics()
            with self.memory.phase("sleeping", by_owner), timers.phase("sleep"):
                self.suspend_engine()
            with self.memory.phase("training", by_owner), timers.phase("train"):
                self.take_memory()
                statistics = self.learn(step, sampled.kept)
                self.give_memory_back()
            with self.memory.phase("update", by_owner), timers.phase("sync"):
                self.update_engine(step)
            with timers.phase("wake"):
                if self.treaty is not None:
                    self.plan = self.treaty.settle()
                self.resume_engine()
        samples, group_size = gathered_samples(self.ranks, sampled.samples), self.config.algorithm.group_size
        statistics = merge_statistics(self.ranks.gather(statistics))
        self.num_tokens += sum(sample.num_tokens for sample in samples)
        metrics = sample_metrics(samples, group_size, self.loss) | statistics.metrics(self.loss)
        if self.loss.dynamic_sampling:
            metrics |= replace(sampled, samples=samples).metrics(group_size)
        metrics |= episode_metrics(samples) | self._logged_by_rewards()
        metrics |= timers.metrics() | speed_metrics(samples, statistics, timers.seconds)
        if self.stream is not None:
            metrics |= self.stream.metrics(samples, step)
        metrics |= {f"engine/{name}": value for name, value in engine_gauges.items()}
        metrics |= memory_metrics(self.memory, self.plan)
        metrics |= {"num_tokens": self.num_tokens, "policy_version": step}
        if self.finding is not None:
            metrics |= self.finding.metrics
        self.histograms = step_histograms(samples, statistics.ratios)
        metrics |= {"perf/sleep_released_gb": self.released_bytes / 2**30}
        assert self.receipt is not None
        metrics |= {"perf/update_copied_gb": self.receipt.bytes_copied / 2**30}
        return samples, self.ranks.from_main(metrics)  # with rank 0's times and memory

    def _logged_by_rewards(self) -> dict[str, float]:
        values: dict[str, list[float]] = {}
        for logged in self.ranks.gather(self.reward_metrics):
            for name, each in logged.items():
                values.setdefault(name, []).extend(each)
        return {name: float(np.mean(each)) for name, each in values.items()}

    def sample(self, step: int, timers: Timers) -> SampledGroups:
        """The step's groups, with their rewards; with dynamic sampling, until enough of them teach something."""
        algorithm, loss = self.config.algorithm, self.loss

        def sample_round(place: int, count: int) -> list[Sample]:
            with self.ranks.together():
                with timers.phase("gen"):
                    samples = self.rollouts(step) if place == 0 else self.further_rollouts(step, place, count)
                with timers.phase("reward"):
                    for name, values in self.score(samples, step - 1).items():
                        self.reward_metrics.setdefault(name, []).extend(values)
                    punish_overlong(samples, self.producer.max_completion_tokens, loss)
            return samples

        if not loss.dynamic_sampling:
            samples = sample_round(0, algorithm.prompts_per_step)
            return SampledGroups(samples, samples, num_rounds=1)
        return sample_until_informative(
            sample_round, algorithm.prompts_per_step, algorithm.group_size, loss.max_sampling_rounds, self.ranks
        )

    def score(self, samples: Sequence[Sample], num_steps: int) -> dict[str, list[float]]:
        """Rewards the samples, after `num_steps` steps. Returns what the reward functions have logged."""
        if not samples:
            return {}
        config = self.config
        epoch = num_steps * config.algorithm.prompts_per_step / max(1, len(self.task.train))
        return score(samples, self.task.rewards, TrainerState(num_steps, config.steps, epoch))

    def rollouts(self, step: int) -> list[Sample]:
        """This rank's share of the step's groups, group after group."""
        algorithm = self.config.algorithm
        if self.stream is not None:
            return self._take(self.stream, step, algorithm.prompts_per_step, 0)
        examples = select_examples(self.task.train, step, algorithm.prompts_per_step, self.config.seed)
        return self._produce(step, examples, 0)

    def further_rollouts(self, step: int, place: int, count: int) -> list[Sample]:
        """This rank's share of `count` groups of further prompts, where the step has `place` groups already."""
        if self.stream is not None:
            return self._take(self.stream, step, count, place)
        algorithm, train = self.config.algorithm, self.task.train
        per_step, seed = algorithm.prompts_per_step, self.config.seed
        examples = select_further_examples(train, step, per_step, place - per_step, count, seed)
        return self._produce(step, examples, place)

    def _take(self, stream: GroupStream, step: int, count: int, first_place: int) -> list[Sample]:
        own = self.ranks.part(count)
        return stream.take(step, len(own), first_place + own.start) if own else []

    def _produce(self, step: int, examples: Sequence[Example], first_place: int) -> list[Sample]:
        own = self.ranks.part(len(examples))
        if not own:
            return []
        group_size = self.config.algorithm.group_size
        return self.producer.produce(step, examples[own.start : own.stop], group_size, first_place + own.start)

    def learn(self, step: int, samples: Sequence[Sample]) -> LearnStatistics:
        """All optimiser steps over one step's samples: what they compare with is frozen before the first."""
        algorithm, loss = self.config.algorithm, self.loss
        statistics = LearnStatistics()
        kept = [sample for sample in samples if not (loss.drop_truncated and sample.is_truncated)]
        needs_all = loss.uses_kl and loss.kl_placement != "loss"  # the others' rewards are in a sample's baseline
        self.freeze_logprobs(samples if needs_all else kept, statistics)
        self.assign_advantages(samples)
        everyones, own = self.ranks.gather_all(range(len(kept)))
        for epoch in range(algorithm.epochs):
            order = np.arange(len(everyones))
            if algorithm.minibatches * algorithm.epochs > 1:
                seed = derive_seed(self.config.seed, "minibatches", step, epoch)
                order = np.random.default_rng(seed).permutation(len(everyones))
            for part in np.array_split(order, algorithm.minibatches):
                indices = part[(part >= own.start) & (part < own.stop)] - own.start
                self.update_policy(step, [kept[index] for index in indices], statistics)
        if loss.uses_kl:
            self.control_kl(samples, statistics)
        return statistics

    def assign_advantages(self, samples: Sequence[Sample]) -> None:
        """How much better each sample is than what was to be expected, by the samples beside it."""
        assign_advantages(samples, self.config.algorithm.group_size, self.loss, self.ranks)

    def control_kl(self, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """Sets the KL's coefficient for the next step by the distance that this one has begun with."""
        kl = sequence_kl(samples, self.ranks)
        statistics.further["objective/kl_coef"] = self.kl_control.coefficient
        if kl is not None:
            statistics.further["objective/kl"] = kl
            self.kl_control.observe(kl)

    def freeze_logprobs(self, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """Logprobs that stay as they are through the step's updates: the old ones, with the weights that correct for
        a sampler that is not the trainer, and the reference's."""
        batches = self.micro_batches(samples)
        if self.config.algorithm.recompute_logprobs:
            self.recompute_logprobs(samples, batches, statistics)
        if self.loss.uses_kl:
            references = self.policy.reference_logprobs(batches)
            for sample, part in by_sample(samples, batches, references):
                sample.reference_logprobs = part

    def recompute_logprobs(
        self, samples: Sequence[Sample], batches: Sequence[PackedBatch], statistics: LearnStatistics
    ) -> None:
        """Takes the old logprobs from a forward pass of the trainer, measures how far the sampler's are off, and
        weighs the samples accordingly."""
        loss = self.loss
        logprobs = [self.policy.frozen_logprobs(batch) for batch in batches]
        statistics.mismatch += [self.mismatch(ours, batch) for ours, batch in zip(logprobs, batches, strict=True)]
        weighed = []
        for sample, part in by_sample(samples, batches, logprobs):
            importance = importance_weights(part, sample.sampled_logprobs, loss)
            sample.old_logprobs, sample.importance = part, importance.weights
            weighed.append((part, sample.sampled_logprobs, importance))
        everyones, _ = self.ranks.gather_all(weighed)
        statistics.correction = correction_metrics(everyones, loss.importance_cap)

    def micro_batches(self, samples: Sequence[Sample]) -> list[PackedBatch]:
        """All samples with a completion token, in parts that the policy takes one at a time. Where its passes are
        collective there are as many on every rank, some of which may teach nothing."""
        in_parts = padded_micro_batches if self.policy.is_padded else pack_micro_batches
        batches = in_parts(samples, self.config.algorithm.micro_batch_tokens)
        if self.policy.is_collective:
            batches += [PackedBatch.filler()] * (self.ranks.most(len(batches)) - len(batches))
        return [batch.to(self.policy.device) for batch in batches]

    def update_policy(self, step: int, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """One optimiser step. Samples that cannot move the weights count in the denominators, and cost nothing."""
        config, loss = self.config, self.loss
        statistics.learning_rate = learning_rate(step - 1, config.steps, config.optimizer)
        moving = [sample for sample in samples if sample.has_advantage or loss.moves_without_advantage]
        batches = self.micro_batches(moving)
        num_own_tokens = sum(sample.num_tokens for sample in samples)
        num_tokens, num_sequences, num_batches = self.ranks.sum(num_own_tokens, len(samples), len(batches))
        if num_batches == 0:
            return
        denominators = Denominators(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            normalizer=loss.loss_normalizer or self.producer.max_completion_tokens,
        )
        statistics.begin_update()
        for index, batch in enumerate(batches, 1):
            self.accumulate_gradient(batch, denominators, statistics, is_last=index == len(batches))
        if statistics.num_updates == 0:
            self.examine_mismatch(step, moving, statistics)
        self.step_optimizers(step, statistics)
        statistics.num_updates += 1

    def step_optimizers(self, step: int, statistics: LearnStatistics) -> None:
        """Moves the weights by the gradient that has been summed."""
        statistics.grad_norm = max(statistics.grad_norm, self.optimizer.step(statistics.learning_rate))

    def accumulate_gradient(
        self, batch: PackedBatch, denominators: Denominators, statistics: LearnStatistics, is_last: bool
    ) -> None:
        """Adds a micro-batch's share of the gradient of the whole optimiser step. `is_last`: of this rank's."""
        micro = self.policy_loss(self.policy.logprobs(batch), batch, denominators, statistics)
        self.optimizer.backward(micro.loss, is_last)

    def policy_loss(
        self,
        outputs: tuple[torch.Tensor, torch.Tensor],
        batch: PackedBatch,
        denominators: Denominators,
        statistics: LearnStatistics,
    ) -> MicroBatchLoss:
        """A micro-batch's share of the policy's loss, from the logprobs and entropies [C] that the policy gave."""
        logprobs, entropy = outputs
        if statistics.num_updates == 0 and not self.config.algorithm.recompute_logprobs:
            statistics.mismatch.append(self.mismatch(logprobs, batch))
        micro = micro_batch_loss(logprobs, entropy, batch, denominators, self.loss)
        statistics.add(batch, micro)
        return micro

    def mismatch(self, logprobs: torch.Tensor, batch: PackedBatch) -> Mismatch:
        """How far `logprobs` [C] under the policy as it is are from the sampler's, over the sequences that it has
        sampled: those of older policies differ because the policy has moved."""
        if self.stream is None:
            return measure_mismatch(logprobs, batch.sampler_logprobs)
        own = (batch.oldest_versions == self.version).repeat_interleave(batch.lengths)  # [C]
        return measure_mismatch(logprobs[own], batch.sampler_logprobs[own])

    def examine_mismatch(self, step: int, samples: Sequence[Sample], statistics: LearnStatistics) -> None:
        """Asks the engine why the logprobs differ, while its weights are still those that sampled.

        The engine wakes for it, so that in such a step its KV pool and the gradients need memory together. Of several
        ranks the first asks about its own samples, where the policy can answer without the others. Of samples that an
        adapter has a part in the engine cannot say why.
        """
        if not self.ranks.is_main or self.policy.is_collective or self.config.policy.sent_adapter is not None:
            return
        mismatch = statistics.merged_mismatch()
        if not self.watch.is_due(step, mismatch):
            return
        released = self.released_bytes
        own = [sample for sample in samples if sample.oldest_version == self.version]
        self.resume_engine()
        temperature, budget = self.config.sampling.temperature, self.config.algorithm.micro_batch_tokens
        self.finding = examine(self.engine, self.policy, own, temperature, budget, step, mismatch)
        self.watch.learn(self.finding)
        self.suspend_engine()
        self.released_bytes = released

    def suspend_engine(self) -> None:
        """Gives the KV pool's memory to the training phase, where the recipe wants that."""
        if self.config.engine.sleep:
            released = self.engine.sleep(level=1) if self.stream is None else self.stream.sleep()
            self.released_bytes = released.total_released

    def take_memory(self) -> None:
        """Brings what `give_memory_back` has moved away."""
        if self.config.policy.offload:
            for optimizer in self._movable_optimizers():
                optimizer.fetch()

    def _movable_optimizers(self) -> list[MasterAdamW]:
        """All, where the policy is not spread over ranks; then `policy.offload` is refused."""
        return [optimizer for optimizer in self.optimizers.values() if isinstance(optimizer, MasterAdamW)]

    def give_memory_back(self) -> None:
        """Leaves to the sampler what only learning needs: gradients are gone by now, and where the recipe wants it the
        optimisers' states go to the host. What the allocator holds unused goes back as well."""
        if self.config.policy.offload:
            for optimizer in self._movable_optimizers():
                optimizer.offload()
        if self.config.engine.sleep:
            self.platform.trim()

    def update_engine(self, version: int) -> None:
        """Makes the weights as they now are the engine's policy `version`, verified; on all ranks the same."""
        if self.stream is not None:
            with self.ranks.together():  # where the sampler of one has failed
                receipt = self.stream.update(version, self.policy.load_into)
        else:
            with self.engine.policy_update(version=version) as update:
                self.policy.load_into(update)
            receipt = update.receipt
        self.receipt, self.version = receipt, version
        check_same_policy(self.ranks, receipt)

    def resume_engine(self) -> None:
        if self.config.engine.sleep:
            self.engine.wake_up()

    def close(self) -> None:
        """Ends what runs beside the trainer. May be called twice."""
        if self.stream is not None:
            self.stream.close()

    def evaluate(self, num_steps: int = 0, held_out: str = "") -> tuple[list[Sample], Evaluation]:
        """One completion of each prompt of a set in `Task.held_out` by the policy as it is, after `num_steps` steps.
        The engine must be awake."""
        with self.ranks.calling("evaluate", num_steps, held_out):
            return self._evaluate(num_steps, self.task.held_out[held_out])

    def _evaluate(self, num_steps: int, held_out: Sequence[Example]) -> tuple[list[Sample], Evaluation]:
        section = self.config.evaluation
        max_tokens = section.max_tokens or self.config.sampling.max_tokens
        own = self.ranks.part(len(held_out))
        samples: list[Sample] = []
        with self.ranks.together():
            if own:
                examples = held_out[own.start : own.stop]
                samples = self.producer.evaluate(examples, section.temperature, max_tokens, own.start)
            self.score(samples, num_steps)
        samples = gathered_samples(self.ranks, samples)
        rewards = [sample.reward for sample in samples]
        lengths = [sample.num_tokens for sample in samples]
        return samples, evaluate_rewards(rewards, lengths, section.success_threshold)


def by_sample(
    samples: Sequence[Sample], batches: Sequence[PackedBatch], values: Sequence[torch.Tensor]
) -> Iterator[tuple[Sample, np.ndarray]]:
    """Each sample that is in a batch, with a copy of its part of the batch's values [C]."""
    for batch, part in zip(batches, values, strict=True):
        for index, own in zip(batch.sample_indices, part.split(batch.lengths.tolist()), strict=True):
            yield samples[index], own.cpu().numpy().copy()
