"""Ranks that train together: what each case of `tests/trainers/test_data_parallel.py` runs on both of them.

A case leaves in its folder what rank 0 writes in a run, and `result.rank<n>.json`.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rollout.errors import RolloutError
from rollout.models.causal_lm import CausalLM
from rollout_trainers.config import RunConfig
from rollout_trainers.environments import Action, StepResult
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.metrics import LearnStatistics, merge_statistics
from rollout_trainers.packing import PackedBatch
from rollout_trainers.ranks import Ranks
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import RunResult, run
from rollout_trainers.types import Example, Task
from tests.support.environments import Echo
from tests.support.samples import make_sample

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end", "far")]
HELD_OUT = [Example(text, {"answer": text}) for text in ("xyz", "another", "more", "words", "last")]
STATIC = ("steps=2", "evaluation.every=1")

# Overrides by case; what they have in common is in `configuration`. The prompts of a step don't divide by two.
CASES: dict[str, tuple[str, ...]] = {
    "token_mean": ("loss.aggregation=token_mean",),
    "sequence_mean": ("loss.aggregation=sequence_mean", "algorithm.minibatches=2"),
    "constant": ("loss.algorithm=dr_grpo", "algorithm.epochs=2"),
    "whitened": ("loss.algorithm=reinforce_pp", "loss.kl_coefficient=0.1", "algorithm.recompute_logprobs=true"),
    "dynamic": ("loss.algorithm=dapo", "loss.max_sampling_rounds=3"),
    "ppo": ("loss.algorithm=ppo", "loss.kl_coefficient=0.1", "critic.kind=value_head", "algorithm.minibatches=2"),
    "ahead": ("asynchrony.mode=one_step_off", "engine.sleep=false", "steps=3"),
}


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """What the tiny model is to learn: token ids below 60."""
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


def rounded_share(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Whether most token ids are below 60: many groups have equal rewards."""
    return [float(sum(token < 60 for token in ids) > 0.7 * len(ids)) for ids in completion_ids]


def configuration(model: Path, output: Path, *overrides: str) -> RunConfig:
    values = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 2,
        "engine": {"max_model_len": 64, "kv_cache_memory": "1 MiB", "device": "cpu"},
        "sampling": {"max_tokens": 12},
        "algorithm": {"group_size": 4, "prompts_per_step": 5, "micro_batch_tokens": 60},
        "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": 0.5},
        "evaluation": {"temperature": 1.0, "success_threshold": 0.6},
        "tracking": {"wandb": "disabled"},
    }
    return config_from_values(values, overrides)


def train(model: Path, output: Path, *overrides: str, reward: Any = share_of_low_ids) -> RunResult:
    config = configuration(model, output, *overrides)
    return run(config, reward_functions=[reward], train=TRAIN, evaluation=HELD_OUT)


def train_case(case: str, model: Path, output: Path, *overrides: str) -> RunResult:
    reward = rounded_share if case == "dynamic" else share_of_low_ids
    return train(model, output, *CASES[case], *overrides, reward=reward)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = folder / "model"
    for case in CASES:
        result = train_case(case, model, folder / case, "distributed.kind=ddp", "evaluation.every=1")
        write(folder / case, {"trained": result.trained and result.trained.successes, "seconds": result.seconds})
    resumes(model, folder)
    in_flight(folder / "turns", folder)
    failures(model, folder)


def in_flight(model: Path, folder: Path) -> None:
    """Episodes that each rank samples ahead, with a break; then some that fail on one rank."""
    options = ("distributed.kind=ddp", "asynchrony.mode=in_flight", "asynchrony.max_staleness=2", "engine.sleep=false")
    options = (*options, "steps=5", "checkpoint.every=2", "environment.max_turns=2", "algorithm.group_size=2")
    config = configuration(model, folder / "in_flight", *options)
    seen: list[tuple[int, int]] = []
    stops = True

    def reward(prompts: Any, trainer_state: Any, **columns: Any) -> list[float]:
        seen.append((trainer_state.global_step, len(prompts)))
        if stops and trainer_state.global_step == 3 and dist.get_rank() == 1:
            raise RuntimeError("the judge has left")
        return [0.0] * len(prompts)

    error = outcome(lambda: run(config, reward_functions=[reward], train=TRAIN, environment=Echo))
    stops = False
    resumed = configuration(model, folder / "in_flight", *options, "resume=true")
    run(resumed, reward_functions=[reward], train=TRAIN, environment=Echo)
    broken = configuration(model, folder / "no_route", *options)
    no_route = outcome(lambda: run(broken, train=TRAIN, environment=NoRoute))
    threads = [each.name for each in threading.enumerate() if each.name in ("rollout-sampler", "rollout-event-loop")]
    write(folder / "in_flight", {"error": error, "seen": seen, "no route": no_route, "threads": threads})


class NoRoute(Echo):
    """Has no route to its world, on rank 1."""

    async def step(self, action: Action) -> StepResult:
        if dist.get_rank() == 1:
            raise OSError("no route")
        return await super().step(action)


def write(folder: Path, values: dict[str, Any]) -> None:
    (folder / f"result.rank{dist.get_rank()}.json").write_text(json.dumps(values))


def resumes(model: Path, folder: Path) -> None:
    """Three steps without a break, and with one after the second: to be found in the same files."""
    options = ("distributed.kind=ddp", "steps=3", "checkpoint.every=1", "loss.kl_coefficient=0.1", "loss.kl_target=0.1")
    options = (*options, "loss.algorithm=ppo")
    train(model, folder / "unbroken", *options)
    error = outcome(lambda: train(model, folder / "broken", *options, reward=failing_after(3)))
    write(folder / "broken", {"error": error})
    train(model, folder / "broken", *options, "resume=true")


def failing_after(calls: int, rank: int = 1) -> Callable[..., list[float]]:
    """`share_of_low_ids` which on one rank fails after some calls."""
    left = iter(range(calls))

    @functools.wraps(share_of_low_ids)
    def reward(*arguments: Any, **columns: Any) -> list[float]:
        if dist.get_rank() == rank and next(left, None) is None:
            raise RuntimeError("the judge has left")
        return share_of_low_ids(*arguments, **columns)

    return reward


def outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except (RuntimeError, ValueError, OSError, RolloutError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def failures(model: Path, folder: Path) -> None:
    """What goes wrong on one rank ends the run on both. Each leaves the process group usable for the next."""
    found: dict[str, str] = {}
    ddp = "distributed.kind=ddp"
    for rank in (0, 1):
        failing = failing_after(0, rank)
        found[f"rank {rank}"] = outcome(lambda reward=failing: train(model, folder / "failing", ddp, reward=reward))
    (folder / "a file").write_text("where a folder should be")
    found["session"] = outcome(lambda: train(model, folder / "a file" / "run", ddp))
    found["none"] = outcome(lambda: train(model, folder / "alone"))
    found["too few groups"] = outcome(lambda: train(model, folder / "few", ddp, "algorithm.prompts_per_step=1"))
    spoiled = (ddp, "evaluation.at_start=false")
    found["policies differ"] = outcome(lambda: train(model, folder / "differ", *spoiled, reward=SpoilsWeights()))
    (folder / f"failures.rank{dist.get_rank()}.json").write_text(json.dumps(found))


class SpoilsWeights:
    """A reward function that moves the weights of rank 1's engine a little, through the garbage collector's eyes."""

    __name__ = "spoils_weights"

    def __call__(self, completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
        if dist.get_rank() == 1:
            for each in gc.get_objects():
                if isinstance(each, CausalLM):
                    with torch.no_grad():
                        next(each.parameters()).mul_(1.001)
        return share_of_low_ids(None, None, list(completion_ids))


def between_ranks(folder: Path) -> None:
    """What `Ranks` itself does, on three ranks."""
    dist.init_process_group("gloo")
    ranks = Ranks(dist.group.WORLD)
    tensors = [torch.full((2, 3), float(ranks.rank + 1)), torch.tensor([1.0, ranks.rank]), torch.ones(1 << 24)]
    ranks.add_up(tensors)
    shared = torch.full((3,), float(ranks.rank + 7))
    ranks.copy_from_main(shared)
    found: dict[str, Any] = {
        "parts": ranks.gather(list(ranks.part(7))),
        "sum": ranks.sum(ranks.rank, 10),
        "most": ranks.most(-ranks.rank),
        "from main": ranks.from_main({"rank": ranks.rank}),
        "all": ranks.gather_all("ab" * ranks.rank)[0],
        "own": ranks.gather_all("ab" * ranks.rank)[0][ranks.gather_all("ab" * ranks.rank)[1]],
        "added": [tensor[..., 0].flatten().tolist() + tensor[..., -1].flatten().tolist() for tensor in tensors],
        "shared": shared.tolist(),
        "losses": {
            aggregation: loss_and_gradient([[[1, 1, 1, 1]], [[3]], []][ranks.rank], aggregation, 100, ranks)
            for aggregation in ("token_mean", "sequence_mean", "constant")
        },
    }
    dist.barrier()
    if ranks.rank < 2:
        found["died"] = outcome(lambda: ranks.gather("still here"))
    (folder / f"between.rank{ranks.rank}.json").write_text(json.dumps(found))
    if ranks.rank == 2:
        os._exit(0)  # as a process that is killed: it closes nothing in order


class LossesAsTokens:
    """A policy whose loss on a token, at an advantage of 1, is the token's id times its one weight."""

    is_exact = is_padded = is_collective = False
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.model.weight)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.model.named_parameters()

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return -batch.targets * self.model.weight[0], torch.zeros(batch.targets.shape)


def loss_and_gradient(rows: Sequence[list[int]], aggregation: str, budget: int, ranks: Ranks) -> tuple[float, float]:
    """Of one optimiser step over samples whose tokens are their losses: this rank's are `rows`."""
    overrides = (f"loss.aggregation={aggregation}", "loss.surrogate=log_probability", "optimizer.max_grad_norm=100")
    overrides = (*overrides, f"algorithm.micro_batch_tokens={budget}", "tracking.diagnose_above=null")
    config = configuration(Path("none"), Path("none"), *overrides)
    engine = SimpleNamespace(memory_ledger=lambda: None)
    producer: Any = SimpleNamespace(engine=engine, max_completion_tokens=4)
    policy: Any = LossesAsTokens()
    trainer = GRPOTrainer(producer, policy, Task("rows", (), (), ()), config, ranks=ranks)
    statistics = LearnStatistics()
    trainer.update_policy(1, [make_sample([9, 9], row, advantage=1.0) for row in rows], statistics)
    merged = merge_statistics(ranks.gather(statistics))
    return merged.loss, merged.grad_norm
