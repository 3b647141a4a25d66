"""A nursery: one process that has imported everything, and forks a run of the trainers again and again, each of which
the kernel kills (or hinders) at some moment.

    python -m tests.support.killed_runs MODEL FOLDER SEED

FOLDER/unbroken is trained without a break, FOLDER/broken with many. A JSON report goes to the standard output.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.types import Example

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
HELD_OUT = [Example(text, {"answer": text}) for text in ("xyz", "another", "more", "words")]
_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"}


def noisy_reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of low token ids, and a draw from each of the generators that a reward function may use."""
    shares = [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]
    return [share + 0.01 * (random.random() + float(np.random.random()) + float(torch.rand(()))) for share in shares]


def train(model: Path, output: Path) -> None:
    """A run with everything that has a state: schedule, adaptive KL, evaluations, best checkpoint, early stop."""
    values: dict[str, Any] = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 5,
        "resume": True,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 3, "prompts_per_step": 2, "micro_batch_tokens": 100, "minibatches": 2},
        "loss": {"kl_coefficient": 0.05, "kl_target": 0.1},
        "optimizer": {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 2},
        "evaluation": {"every": 1},
        "early_stop": {"metric": "eval/reward", "threshold": 10.0, "patience": 5},
        "checkpoint": {"every": 2, "keep": 1, "best_metric": "eval/reward", "load_best": True},
        "tracking": {"wandb": "disabled"},
    }
    run(config_from_values(values), reward_functions=[noisy_reward], train=TRAIN, evaluation=HELD_OUT)


def kill_at_event(number: int, folder: Path) -> None:
    """From now on the process is killed before its file operation of this number in `folder`, from 1 on."""
    left = [number]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _FILE_EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def limit_file_size(size: int, kill: bool) -> None:
    """The kernel lets no file grow beyond `size` bytes: it kills the process in the middle of the write that would, or
    the write fails as it does on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kill else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def forked(action: Callable[[], None], log: Path, seconds: float | None = None) -> tuple[int, str]:
    """Runs `action` in a child, which is killed after `seconds`. Returns the signal that has ended it (0: none) and the
    last line of its error."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 2)
                action()
            status = 0
        except BaseException:  # noqa: BLE001  # a child that goes on would run the parent's code
            log.write_text(log.read_text() + traceback.format_exc())
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return ended, log.read_text().strip().splitlines()[-1] if status and not ended else ""


def main(model: Path, folder: Path, seed: int) -> None:
    assert threading.active_count() == 1
    unbroken, broken, log = folder / "unbroken", folder / "broken", folder / "log"
    count = folder / "count"

    def count_events() -> None:
        events = []
        sys.addaudithook(
            lambda event, arguments: (
                events.append(event) if event in _FILE_EVENTS and str(arguments[0]).startswith(str(unbroken)) else None
            )
        )
        train(model, unbroken)
        count.write_text(str(len(events)))

    report: dict[str, Any] = {"unbroken": forked(count_events, log), "kills": []}
    total = int(count.read_text())
    draw = random.Random(seed)

    def killed_at(number: int) -> None:
        kill_at_event(number, broken)
        train(model, broken)

    def limited(size: int, kill: bool) -> None:
        limit_file_size(size, kill)
        train(model, broken)

    report["events"] = total
    report["kills"] += [["event", *forked(lambda: killed_at(draw.randrange(1, total // 3)), log)] for _ in range(2)]
    report["kills"].append(["half a file", *forked(lambda: limited(50_000, True), log)])
    for _ in range(3):
        report["kills"].append(["event", *forked(lambda: killed_at(draw.randrange(1, total // 2)), log)])
        report["kills"].append(["moment", *forked(lambda: train(model, broken), log, draw.uniform(0.1, 1.0))])
    report["full disk"] = forked(lambda: limited(50_000, False), log)
    report["last"] = forked(lambda: train(model, broken), log)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
