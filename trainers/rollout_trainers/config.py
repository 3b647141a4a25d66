"""What a run needs to know: frozen dataclasses of plain values, checked at construction; errors name the field.

A recipe in YAML has the same sections and names; `recipe.py` reads it into a `RunConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollout.config import parse_bytes
from rollout_trainers.alerts_config import AlertsSection
from rollout_trainers.asynchrony_config import AsynchronySection
from rollout_trainers.checks import check_choice, check_flag, check_integer, check_real, fail
from rollout_trainers.critic_config import CriticSection
from rollout_trainers.distributed_config import DistributedSection
from rollout_trainers.early_stop_config import EarlyStopSection, Mode
from rollout_trainers.evaluation import EVALUATION_PREFIX, check_evaluation_metric
from rollout_trainers.idle_keys import check_idle_keys
from rollout_trainers.loss_config import LossSection
from rollout_trainers.metric_catalog import near_miss
from rollout_trainers.policy_config import PolicySection
from rollout_trainers.teacher_config import TeacherSection

Schedule = Literal["constant", "linear", "cosine"]
WandbMode = Literal["auto", "offline", "online", "disabled"]

MAX_SEED = 2**63 - 1

_KEEP, _SAMPLE_EVERY, _DIAGNOSE_EVERY = 2, 5, 50  # defaults


@dataclass(frozen=True, slots=True)
class EngineSection:
    """The embedded engine that samples, whose weights are trained in place.

    `sleep` gives the KV pool's memory back to the operating system while the trainer has the machine. `memory_budget`
    (bytes, or text such as "8GiB") is for sampler and trainer together: the KV pool gets what the trainer's measured
    needs leave (`rollout.memory_treaty`), in place of a fixed `kv_cache_memory`. `quantization` "int8" and
    `kv_cache_dtype` "int8" or "fp8" sample faster from rounded weights or KV (`docs/quantization.md`): the sampler's
    logprobs then differ from the trainer's, and importance weights correct for that.
    """

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_cache_memory: int | str | None = None
    memory_budget: int | str | None = None
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = "auto"
    quantization: Literal["int8"] | None = None
    enable_prefix_caching: bool = True
    sleep: bool = True

    def __post_init__(self) -> None:
        check_choice("engine", "dtype", self.dtype, ("auto", "bfloat16", "float32"))
        check_choice("engine", "device", self.device, ("auto", "cpu", "cuda"))
        check_choice("engine", "kv_cache_dtype", self.kv_cache_dtype, ("auto", "int8", "fp8", "fp8_e4m3"))
        check_choice("engine", "quantization", self.quantization, (None, "int8"))
        if self.max_model_len is not None:
            check_integer("engine", "max_model_len", self.max_model_len, 2)
        for name, size in (("kv_cache_memory", self.kv_cache_memory), ("memory_budget", self.memory_budget)):
            if size is not None and parse_bytes(size, f"engine.{name}") <= 0:
                fail("engine", name, size, "above 0")
        if self.memory_budget is not None and self.kv_cache_memory is not None:
            fail("engine", "memory_budget", self.memory_budget, "None where kv_cache_memory is given")
        check_integer("engine", "max_num_seqs", self.max_num_seqs, 1)
        check_integer("engine", "max_num_batched_tokens", self.max_num_batched_tokens, 1)


@dataclass(frozen=True, slots=True)
class TaskSection:
    """What is learned: a built-in task by name, with its parameters, and how many examples it has.

    Evaluation examples are never among the training examples. `system_prompt` goes before every user message.
    """

    name: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    train_size: int = 1024
    eval_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("task", "train_size", self.train_size, 1)
        check_integer("task", "eval_size", self.eval_size, 0)
        check_integer("task", "seed", self.seed, 0)


@dataclass(frozen=True, slots=True)
class EnvironmentSection:
    """Limits of episodes, where the task has an environment (`docs/environments.md`).

    `max_turns` of the policy's, each of at most `sampling.max_tokens`. `step_timeout` seconds for each call of an
    environment, `episode_timeout` for a whole episode, sampling included (None: no limit); an episode that is late ends
    with what it has. At most `max_concurrent` episodes run at once (None: all of a step). With `strict_template` an
    episode ends with an error where the chat template would render earlier turns in another way than the policy has
    sampled them; without it the policy goes on seeing what it sampled.
    """

    max_turns: int = 8
    step_timeout: float | None = 60.0
    episode_timeout: float | None = None
    max_concurrent: int | None = None
    strict_template: bool = True

    def __post_init__(self) -> None:
        check_integer("environment", "max_turns", self.max_turns, 1)
        for name in ("step_timeout", "episode_timeout"):
            if getattr(self, name) is not None:
                check_real("environment", name, getattr(self, name), 0.0, open_low=True)
        if self.max_concurrent is not None:
            check_integer("environment", "max_concurrent", self.max_concurrent, 1)
        check_flag("environment", "strict_template", self.strict_template)


@dataclass(frozen=True, slots=True)
class SamplingSection:
    """How rollouts are drawn: from the whole tempered distribution, so that both sides' logprobs are the same."""

    temperature: float = 1.0
    max_tokens: int = 64

    def __post_init__(self) -> None:
        check_real("sampling", "temperature", self.temperature, 0.0, open_low=True)
        check_integer("sampling", "max_tokens", self.max_tokens, 1)


@dataclass(frozen=True, slots=True)
class AlgorithmSection:
    """How a step samples and goes through its samples; what it learns from them is the `loss` section's.

    A step samples `prompts_per_step` groups of `group_size`. It makes `minibatches * epochs` optimiser steps over
    them, shuffled anew in each epoch; each goes through micro-batches of at most `micro_batch_tokens` packed tokens,
    which changes neither the loss nor the gradient. The old logprobs stay those of the step's start. They are the
    sampler's, but for `recompute_logprobs`, which runs an extra forward pass before the first update and takes them
    from it; `loss.correction` then accounts for the difference.

    `sampling/logp_difference/*` compares the logprobs of sampler and trainer before the first update of a step. It
    costs nothing, since it reads the forward pass of that update: over the samples of the first minibatch that can move
    the weights (those with an advantage other than zero; with a KL or entropy term in the loss, all). `num_tokens` says
    how many tokens they had; where it is 0, as in a step whose groups each had equal rewards, nothing else is logged.
    `recompute_logprobs` compares every sample that is learned from.
    """

    group_size: int = 8
    prompts_per_step: int = 8
    minibatches: int = 1
    epochs: int = 1
    recompute_logprobs: bool = False
    micro_batch_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("group_size", "prompts_per_step", "minibatches", "epochs", "micro_batch_tokens"):
            check_integer("algorithm", name, getattr(self, name), 1)
        if self.minibatches > self.group_size * self.prompts_per_step:
            fail("algorithm", "minibatches", self.minibatches, "at most group_size * prompts_per_step")


@dataclass(frozen=True, slots=True)
class OptimizerSection:
    """AdamW with float32 master weights, and the learning rate's course over the steps."""

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "final_fraction"):
            check_real("optimizer", name, getattr(self, name), 0.0)
        for name in ("epsilon", "max_grad_norm"):
            check_real("optimizer", name, getattr(self, name), 0.0, open_low=True)
        for name in ("beta1", "beta2"):
            check_real("optimizer", name, getattr(self, name), 0.0)
            if getattr(self, name) >= 1:
                fail("optimizer", name, getattr(self, name), "below 1")
        if self.final_fraction > 1:
            fail("optimizer", "final_fraction", self.final_fraction, "at most 1")
        check_choice("optimizer", "schedule", self.schedule, ("constant", "linear", "cosine"))
        check_integer("optimizer", "warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, slots=True)
class RewardModelSection:
    """A sequence classifier of transformers with one number, whose number times `weight` is a reward beside the task's
    own. `model` is its folder (None: there is none); it runs in batches of at most `batch_tokens` tokens."""

    model: str | None = None
    weight: float = 1.0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        check_real("reward_model", "weight", self.weight, -math.inf)
        check_choice("reward_model", "dtype", self.dtype, ("auto", "bfloat16", "float32"))
        check_integer("reward_model", "batch_tokens", self.batch_tokens, 1)
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if self.model is None and changed:
            fail("reward_model", "model", None, f"a folder where {changed[0]} is given")


@dataclass(frozen=True, slots=True)
class EvaluationSection:
    """Held-out evaluation, and when: before the first step (`at_start`) and after the last (`at_end`); in between after
    every `every` steps (0: not), after the steps `at_steps`, and after the first step that ends at least
    `every_seconds` after the last evaluation (None: not)."""

    temperature: float = 0.0
    max_tokens: int | None = None
    every: int = 0
    success_threshold: float = 1.0
    at_start: bool = True
    at_end: bool = True
    at_steps: tuple[int, ...] = ()
    every_seconds: float | None = None

    def __post_init__(self) -> None:
        check_real("evaluation", "temperature", self.temperature, 0.0)
        check_real("evaluation", "success_threshold", self.success_threshold, -math.inf)
        check_integer("evaluation", "every", self.every, 0)
        if self.max_tokens is not None:
            check_integer("evaluation", "max_tokens", self.max_tokens, 1)
        check_flag("evaluation", "at_start", self.at_start)
        check_flag("evaluation", "at_end", self.at_end)
        if not isinstance(self.at_steps, tuple):
            fail("evaluation", "at_steps", self.at_steps, "a list of steps")
        for step in self.at_steps:
            check_integer("evaluation", "at_steps", step, 1)
        if self.every_seconds is not None:
            check_real("evaluation", "every_seconds", self.every_seconds, 0.0, open_low=True)

    @property
    def is_repeated(self) -> bool:
        """Whether there are evaluations between the first step and the last."""
        return self.every > 0 or bool(self.at_steps) or self.every_seconds is not None

    def is_due(self, step: int, seconds: float) -> bool:
        """Whether to evaluate after `step`, `seconds` after the last evaluation, where the run goes on."""
        by_steps = step in self.at_steps or (self.every > 0 and step % self.every == 0)
        return by_steps or (self.every_seconds is not None and seconds >= self.every_seconds)


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    """Checkpoints every `every` steps and after the last (0: none) of which the newest `keep` stay; the trained model
    is always saved.

    With a `best_metric`, one of an evaluation's such as `eval/accuracy`, the step where it is best (largest; with the
    `best_mode` "min" smallest) has a checkpoint at once, which stays beside the newest. With `load_best` its model is
    the trained model of the run, in place of the last step's.
    """

    every: int = 0
    keep: int = _KEEP
    best_metric: str | None = None
    best_mode: Mode = "max"
    load_best: bool = False

    def __post_init__(self) -> None:
        check_integer("checkpoint", "every", self.every, 0)
        check_integer("checkpoint", "keep", self.keep, 1)
        check_choice("checkpoint", "best_mode", self.best_mode, ("max", "min"))
        check_flag("checkpoint", "load_best", self.load_best)
        if self.best_metric is not None:
            check_evaluation_metric("checkpoint", "best_metric", self.best_metric)
        elif self.load_best or self.best_mode != "max":
            name = "load_best" if self.load_best else "best_mode"
            fail("checkpoint", name, getattr(self, name), "left out without best_metric")
        if self.every == 0 and self.best_metric is None and self.keep != _KEEP:
            fail("checkpoint", "keep", self.keep, "left out where every is 0, without a best_metric: none are made")


@dataclass(frozen=True, slots=True)
class TrackingSection:
    """Where metrics go besides the JSON-lines file. `auto` is online where a W&B key is set, and offline elsewhere.

    Where `sampling/logp_difference/max` passes `diagnose_above` nats (None: never), the engine says why
    (`LLM.diagnose`), at most once in `diagnose_every` steps. `entity` to `notes` are W&B's own (None: its defaults).
    """

    wandb: WandbMode = "auto"
    project: str = "rollout"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    sample_every: int = _SAMPLE_EVERY
    samples: int = 16
    diagnose_above: float | None = 1e-3
    diagnose_every: int = _DIAGNOSE_EVERY

    def __post_init__(self) -> None:
        check_choice("tracking", "wandb", self.wandb, ("auto", "offline", "online", "disabled"))
        if not isinstance(self.tags, tuple) or not all(
            isinstance(tag, str) and 1 <= len(tag) <= 64 for tag in self.tags
        ):
            fail("tracking", "tags", self.tags, "a list of texts of 1 to 64 characters, W&B's limit")
        check_integer("tracking", "sample_every", self.sample_every, 1)
        check_integer("tracking", "samples", self.samples, 0)
        if self.diagnose_above is not None:
            check_real("tracking", "diagnose_above", self.diagnose_above, 0.0)
        check_integer("tracking", "diagnose_every", self.diagnose_every, 1)
        if self.diagnose_above is None and self.diagnose_every != _DIAGNOSE_EVERY:
            fail("tracking", "diagnose_every", self.diagnose_every, "left out where diagnose_above is null: never")
        if self.samples == 0 and self.sample_every != _SAMPLE_EVERY:
            fail("tracking", "sample_every", self.sample_every, "left out where samples is 0, which shows none")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A whole run. `model` is a folder in Hugging Face format, or a name that the engine knows; `output_dir` takes
    everything that the run writes.

    `resume` continues from the newest checkpoint in `output_dir` (from the model where there is none yet), exactly as
    if there had been no break; what training depends on must then be as it was, except that `steps` may be raised.
    Without `resume`, a folder that holds checkpoints is refused.
    """

    model: str
    name: str = "grpo"
    output_dir: str = "runs/grpo"
    steps: int = 100
    seed: int = 0
    resume: bool = False
    engine: EngineSection = field(default_factory=EngineSection)
    policy: PolicySection = field(default_factory=PolicySection)
    task: TaskSection = field(default_factory=TaskSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    asynchrony: AsynchronySection = field(default_factory=AsynchronySection)
    loss: LossSection = field(default_factory=LossSection)
    critic: CriticSection = field(default_factory=CriticSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    distributed: DistributedSection = field(default_factory=DistributedSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    early_stop: EarlyStopSection = field(default_factory=EarlyStopSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    alerts: AlertsSection = field(default_factory=AlertsSection)

    def __post_init__(self) -> None:
        for name in ("model", "name", "output_dir"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                fail("run", name, getattr(self, name), "text that is not empty")
        check_integer("run", "steps", self.steps, 0)
        check_integer("run", "seed", self.seed, 0)
        if self.seed > MAX_SEED:
            fail("run", "seed", self.seed, f"at most {MAX_SEED}")
        is_rounded = self.engine.quantization is not None or self.engine.kv_cache_dtype != "auto"
        if is_rounded and not self.algorithm.recompute_logprobs:
            fail(
                *("algorithm", "recompute_logprobs", False),
                "true with an engine in int8 or fp8: its logprobs differ from the trainer's, which weights correct",
            )
        self._check_lengths()
        self._check_policy()
        self._check_distributed()
        self._check_loss()
        self._check_critic()
        self._check_asynchrony()
        self._check_evaluation()
        if self.optimizer.schedule == "constant" and self.optimizer.final_fraction != 0:
            fail("optimizer", "final_fraction", self.optimizer.final_fraction, "left out with schedule 'constant'")
        check_idle_keys(self)

    def _check_lengths(self) -> None:
        """A completion has less room than the context, which its prompt is in, too."""
        room = self.engine.max_model_len
        for section, max_tokens in (
            ("sampling", self.sampling.max_tokens),
            ("evaluation", self.evaluation.max_tokens),
        ):
            if room is not None and max_tokens is not None and max_tokens >= room:
                fail(
                    section, "max_tokens", max_tokens, f"below engine.max_model_len ({room}): the prompt is in it, too"
                )

    def _check_policy(self) -> None:
        policy = self.policy
        if not policy.is_exact and not self.algorithm.recompute_logprobs:
            fail(
                *("algorithm", "recompute_logprobs", False),
                f"true with policy.kind {policy.kind!r}, whose logprobs are the sampler's only to rounding: importance "
                "weights correct the difference",
            )
        if policy.offload and self.engine.device == "cpu":
            fail("policy", "offload", True, "false with engine.device 'cpu', whose memory is the host's")
        if policy.offload and not self.engine.sleep:
            fail("policy", "offload", True, "false without engine.sleep: the trainer would make room that nobody takes")

    def _check_distributed(self) -> None:
        kind, policy = self.distributed.kind, self.policy
        if not self.distributed.is_sharded:
            return
        if policy.kind != "transformers":
            fail("policy", "kind", policy.kind, f"'transformers' with distributed.kind {kind!r}")
        if policy.offload:
            fail("policy", "offload", True, f"false with distributed.kind {kind!r}, whose library holds the optimiser")
        if self.loss.uses_critic:
            fail("loss", "baseline", self.loss.baseline, f"none of a critic with distributed.kind {kind!r}: use 'ddp'")

    def _check_evaluation(self) -> None:
        for step in self.evaluation.at_steps:
            if step > self.steps:
                fail("evaluation", "at_steps", list(self.evaluation.at_steps), f"steps of the run's {self.steps}")
        best = self.checkpoint.best_metric
        if best is not None and not (self.evaluation.is_repeated or self.evaluation.at_end):
            valid = f"above 0 (or at_end true) where checkpoint.best_metric is {best!r}: no step would be evaluated"
            fail("evaluation", "every", self.evaluation.every, valid)
        metric = self.early_stop.metric
        if metric is None:
            return
        if not metric.startswith(EVALUATION_PREFIX):
            near = near_miss(metric)
            if near is not None:
                fail("early_stop", "metric", metric, f"the name of a metric (did you mean {near!r}?)")
            return
        check_evaluation_metric("early_stop", "metric", metric)
        if not self.evaluation.is_repeated:
            fail("evaluation", "every", self.evaluation.every, f"above 0 where early_stop.metric is {metric!r}")

    def _check_asynchrony(self) -> None:
        asynchrony, engine = self.asynchrony, self.engine
        if not asynchrony.is_active:
            return
        kind = self.distributed.kind
        if self.distributed.is_sharded:
            asynchrony.refuse(f"left out with distributed.kind {kind!r}, whose ranks sample in turns: use 'ddp'")
        if kind == "ddp" and asynchrony.has_budget:
            name = "step_tokens" if asynchrony.step_tokens is not None else "step_seconds"
            valid = f"left out with distributed.kind {kind!r}, whose ranks take as many groups in every step"
            fail("asynchrony", name, getattr(asynchrony, name), valid)
        if engine.memory_budget is not None:
            why = "samples stay in the KV pool, which then cannot change"
            fail("engine", "memory_budget", engine.memory_budget, f"left out with asynchrony: {why}")
        if engine.sleep and asynchrony.samples_ahead:
            why = "the engine samples while the trainer learns"
            fail("engine", "sleep", True, f"false with asynchrony.mode {asynchrony.mode!r}: {why}")
        if engine.sleep and asynchrony.held_cache_mode == "keep":
            fail("asynchrony", "held_cache", "keep", "'recompute' with engine.sleep, which gives the KV pool back")
        is_corrected = self.algorithm.recompute_logprobs and self.loss.importance_level != "none"
        if self.loss.surrogate == "log_probability" and not is_corrected:
            fail(
                *("loss", "surrogate", self.loss.surrogate),
                "'clipped' or 'cispo' with asynchrony, or algorithm.recompute_logprobs true with a loss.correction: "
                "without a ratio the gradient would be that of older policies",
            )

    def _check_critic(self) -> None:
        for chosen in fields(self.critic):
            value = getattr(self.critic, chosen.name)
            if value != chosen.default and not self.loss.uses_critic:
                fail(
                    "critic", chosen.name, value, f"left out with loss.baseline {self.loss.baseline!r}, which has none"
                )
        if self.critic.warmup_steps > self.steps:
            fail("critic", "warmup_steps", self.critic.warmup_steps, f"at most steps ({self.steps})")

    def _check_loss(self) -> None:
        """What the loss asks of how a step samples and updates."""
        algorithm, loss = self.algorithm, self.loss
        self.teacher.check_loss(loss)
        if loss.uses_groups and self.teacher.uses_rewards:
            check_integer("algorithm", "group_size", algorithm.group_size, 2)
        if algorithm.group_size * algorithm.prompts_per_step < 2:
            fail("algorithm", "prompts_per_step", algorithm.prompts_per_step, "at least 2 with a group_size of 1")
        updates = algorithm.minibatches * algorithm.epochs
        if loss.surrogate == "log_probability" and updates > 1:
            fail(
                *("loss", "surrogate", loss.surrogate),
                f"'clipped' or 'cispo' with {updates} optimiser steps on each step's samples: without a ratio all but "
                "the first would follow the gradient of a policy that did not sample",
            )
        plain = LossSection()
        names = ("importance_level", "importance_cap", "mask_level", "mask_low", "mask_high")
        changed = [name for name in names if getattr(loss, name) != getattr(plain, name)]
        active = loss.importance_level != "none" or loss.mask_level != "none"
        if changed and active and not algorithm.recompute_logprobs:
            name = "correction" if loss.correction != plain.correction else changed[0]
            fail(
                *("loss", name, getattr(loss, name)),
                "left out without algorithm.recompute_logprobs: the old logprobs are then the sampler's own, and there "
                "is nothing to correct",
            )
