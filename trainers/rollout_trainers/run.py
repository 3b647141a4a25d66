"""A whole run: engine, task, training loop, evaluation, checkpoints and report, from a `RunConfig` or a recipe."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from rollout import LLM
from rollout.config import parse_bytes
from rollout.memory_treaty import MemoryTreaty
from rollout.models.loader import build_model, read_config
from rollout.models.pretrained import resolve_model
from rollout_trainers.asynchronous import GroupStream
from rollout_trainers.checks import fail
from rollout_trainers.config import RewardModelSection, RunConfig
from rollout_trainers.critic import Critic, ValueHead, load_critic
from rollout_trainers.distillation import DistillationTrainer
from rollout_trainers.environments import EnvironmentFactory, EpisodeGroups, EpisodeProducer
from rollout_trainers.evaluation import EVALUATION_PREFIX, evaluated_set
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.idle_keys import check_keys_of_task, check_task_is_read
from rollout_trainers.launch import joined
from rollout_trainers.make_policy import make_policy
from rollout_trainers.policy import Policy
from rollout_trainers.ppo import PPOTrainer
from rollout_trainers.producer import Producer, RolloutProducer, derive_seed
from rollout_trainers.random_states import seed_generators
from rollout_trainers.ranks import Ranks
from rollout_trainers.recipe import load_recipe
from rollout_trainers.resume import open_run, run_settings
from rollout_trainers.rewards import check_columns, names_environments
from rollout_trainers.rewards.reward_model import RewardModel
from rollout_trainers.session import RunResult, Session
from rollout_trainers.sharded import shard_policy
from rollout_trainers.tasks import make_task
from rollout_trainers.teacher import check_teacher, load_teacher
from rollout_trainers.tracking import ProgressLine
from rollout_trainers.transformers_policy import TransformersPolicy
from rollout_trainers.types import Example, RewardFunction, Task


def train_from_recipe(path: str, overrides: Sequence[str] = ()) -> int:
    """Runs a recipe and returns exit status 0: YAML of plain values, or a .py file, which gets the overrides as argv.

    Raises `ValueError` for a mistake in the recipe, before the model is loaded.
    """
    if Path(path).suffix == ".py":
        _run_script(path, overrides)
        return 0
    config = load_recipe(path, overrides)
    run(config, task=make_task(config.task))
    return 0


def _run_script(path: str, overrides: Sequence[str]) -> None:
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such recipe")
    previous = sys.argv
    sys.argv = [path, *overrides]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = previous


def run(
    config: RunConfig,
    *,
    task: Task | None = None,
    reward_functions: Sequence[RewardFunction] = (),
    train: Sequence[Example] = (),
    evaluation: Sequence[Example] = (),
    environment: EnvironmentFactory | None = None,
) -> RunResult:
    """Trains as `config` says, and reports. The task is `task`, or made of `train`, `evaluation` and
    `reward_functions`, or the built-in one that the configuration names (then `reward_functions`, if any, replace its
    own). With an `environment`, which is called to make one for each episode, the policy takes turns with it.

    Where `config.distributed` wants several processes, each of them calls this with the same arguments, and all return
    the same.

    Raises `ValueError` for what the configuration or the rewards have wrong, and for a folder that holds another run's
    checkpoints or in which another run is going on; `RankFailedError` where another process of the run has failed.
    """
    started = time.perf_counter()
    progress = ProgressLine(config.steps)
    checkpoint = None
    with joined(config) as ranks, ExitStack() as stack:
        with ranks.together():
            task = _resolve_task(config, task, reward_functions, train, evaluation, environment)
            task = _with_reward_model(task, config.reward_model)
            check_teacher(config)
            _check_evaluated(config, task)
            check_keys_of_task(config, task.environment is not None, bool(task.held_out))
            for name, examples in {"training": task.train, **task.held_out}.items():
                check_columns(task.rewards, examples, name or "evaluation")
            _check_length(config)
            if ranks.is_main:
                checkpoint = stack.enter_context(open_run(config, run_settings(config, task)))
                progress.say(f"{config.name}: loading {config.model}")
            own = (ranks.rank,) if ranks.rank else ()
            seed_generators(derive_seed(config.seed, "generators", *own))
            engine = _make_engine(config)
        trainer = _make_trainer(config, engine, task, ranks)
        if not ranks.is_main:
            with closing(trainer):
                return ranks.follow(trainer.methods)
        return ranks.lead(lambda: _session(config, trainer, progress, checkpoint, started))


def _session(
    config: RunConfig, trainer: GRPOTrainer, progress: ProgressLine, checkpoint: Path | None, started: float
) -> RunResult:
    with closing(trainer):
        session = Session(config, trainer, progress, checkpoint)
        try:
            session.train()
            return session.finish(started)
        except BaseException:
            session.break_off()  # of W&B's runs one process has one at a time
            raise


def _check_evaluated(config: RunConfig, task: Task) -> None:
    """Raises `ValueError` for a metric of evaluations that there will not be."""
    watched = {"early_stop.metric": config.early_stop.metric, "checkpoint.best_metric": config.checkpoint.best_metric}
    for field, metric in watched.items():
        if metric is None or not metric.startswith(EVALUATION_PREFIX):
            continue
        held_out = evaluated_set(metric)
        if held_out not in task.held_out:
            which = f" called {held_out!r}" if held_out else ""
            raise ValueError(
                f"{field}={metric!r} is not valid: the task {task.name!r} has no examples for evaluation{which}"
            )


def _check_length(config: RunConfig) -> None:
    """Raises `ValueError` for sequences that are longer than the model was made for, which its configuration says."""
    wanted = config.engine.max_model_len
    if wanted is None:
        return
    longest = build_model(read_config(resolve_model(config.model)), torch.float32).shape.max_position_embeddings
    if wanted > longest:
        fail("engine", "max_model_len", wanted, f"at most {longest}, for which the model was made")


def _resolve_task(
    config: RunConfig,
    task: Task | None,
    reward_functions: Sequence[RewardFunction],
    train: Sequence[Example],
    evaluation: Sequence[Example],
    environment: EnvironmentFactory | None,
) -> Task:
    if task is not None:
        return task if environment is None else replace(task, environment=environment)
    if train:
        check_task_is_read(config)
        _check_rewards(config, reward_functions, evaluation, environment)
        return Task(config.task.name or config.name, train, evaluation, tuple(reward_functions), environment)
    named = make_task(config.task)
    return replace(
        named, rewards=tuple(reward_functions) or named.rewards, environment=environment or named.environment
    )


def _check_rewards(
    config: RunConfig,
    reward_functions: Sequence[RewardFunction],
    evaluation: Sequence[Example],
    environment: EnvironmentFactory | None,
) -> None:
    """Raises `ValueError` where nothing says how good the samples of examples are."""
    if reward_functions or environment is not None or config.reward_model.model is not None:
        return
    if config.teacher.uses_rewards:
        raise ValueError(
            "reward_functions is empty: give at least one with the training examples, or a reward_model or teacher"
        )
    if evaluation:
        raise ValueError("reward_functions is empty: a teacher trains without, but the evaluation examples need one")


def _make_producer(config: RunConfig, engine: LLM, task: Task) -> Producer:
    temperature, max_tokens = config.sampling.temperature, config.sampling.max_tokens
    adapter = config.policy.sent_adapter
    if task.environment is None:
        return RolloutProducer(engine, temperature, max_tokens, config.seed, adapter)
    section = config.environment
    return EpisodeProducer(engine, task.environment, section, temperature, max_tokens, config.seed, adapter)


def _make_stream(config: RunConfig, engine: LLM, task: Task, ranks: Ranks) -> GroupStream:
    source = None
    if task.environment is not None:
        source = EpisodeGroups(engine, task.train, task.environment, config, not names_environments(task.rewards))
    return GroupStream(engine, task.train, config, source, ranks)


def _make_engine(config: RunConfig) -> LLM:
    engine = config.engine
    pool = engine.kv_cache_memory
    if engine.memory_budget is not None:  # until the treaty sizes it, before the first sample
        pool = parse_bytes(engine.memory_budget, "engine.memory_budget") // 16
    adapters = {}
    if config.policy.sent_adapter is not None:
        adapters = {"enable_lora": True, "max_lora_rank": config.policy.lora.highest_rank}
    return LLM(
        config.model,
        dtype=engine.dtype,
        device=engine.device,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_memory=pool,
        kv_cache_dtype=engine.kv_cache_dtype,
        quantization=engine.quantization,
        enable_prefix_caching=engine.enable_prefix_caching,
        seed=config.seed,
        **adapters,
    )


def _with_reward_model(task: Task, section: RewardModelSection) -> Task:
    if section.model is None:
        return task
    folder = resolve_model(section.model)
    model = RewardModel(folder, weight=section.weight, dtype=section.dtype, batch_tokens=section.batch_tokens)
    return replace(task, rewards=(*task.rewards, model))


def _make_trainer(config: RunConfig, engine: LLM, task: Task, ranks: Ranks) -> GRPOTrainer:
    """PPO's where there is a critic, distillation's where there is a teacher."""
    producer = _make_producer(config, engine, task)
    stream = _make_stream(config, engine, task, ranks) if config.asynchrony.is_active else None
    policy = make_policy(config, engine)
    critic = _make_critic(config, policy) if config.loss.uses_critic else None
    teacher = load_teacher(config)
    treaty = None
    if config.engine.memory_budget is not None:
        treaty = MemoryTreaty(engine, config.engine.memory_budget)
    if critic is not None:
        return PPOTrainer(producer, policy, critic, task, config, treaty, ranks, stream=stream)
    optimizer = None
    if isinstance(policy, TransformersPolicy) and config.distributed.is_sharded:
        optimizer = shard_policy(policy, config, ranks)
    if teacher is not None:
        return DistillationTrainer(producer, policy, teacher, task, config, treaty, ranks, optimizer, stream)
    return GRPOTrainer(producer, policy, task, config, treaty, ranks, optimizer, stream)


def _make_critic(config: RunConfig, policy: Policy) -> Critic:
    section, seed = config.critic, derive_seed(config.seed, "critic")
    if section.kind == "value_head":
        return ValueHead(policy.hidden_size, section.policy_gradient, seed, policy.device)
    folder = resolve_model(section.model or config.model)
    checkpointing = config.policy.gradient_checkpointing
    return load_critic(folder, policy.vocab_size, config.engine.dtype, seed, policy.device, checkpointing)
