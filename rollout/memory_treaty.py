"""One budget of memory for trainer and engine: the KV pool gets what the trainer's measured needs leave.

    treaty = MemoryTreaty(llm, "8GiB")
    for step in ...:
        with treaty.sampling():
            outputs = llm.generate(prompts, params)
        llm.sleep(level=1)
        with treaty.training():
            train(outputs)
        with llm.policy_update() as update: ...
        print(treaty.settle())     # the pool shrinks or grows to what the training has shown
        llm.wake_up()

Sampler and trainer take turns, so that two sums must stay within the budget: while training, the trainer's peak and
what the engine holds meanwhile; while sampling, what the trainer keeps, the weights, a step of the engine, and the KV.
Weights that sleep when the sums are made will be awake while sampling, and count so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.byte_sizes import parse_bytes
from rollout.errors import EngineAsleepError, MemoryBudgetError
from rollout.memory_phases import MemoryPhases, PhaseMemory
from rollout.platform.platform import platform_for
from rollout.worker.ledger import LedgerReport, format_bytes
from rollout.worker.sizing import KVPoolSize
from rollout.worker.worker import Worker

if TYPE_CHECKING:
    from rollout.llm import LLM

_GROWTH = 1.05  # a pool that could be larger by less stays as it is: decode steps need not be recorded anew
_POOL = ("kv_cache", "features")
_STEP = ("workspace", "drafter_workspace", "graphs", "drafter_graphs")  # counted with the step that needs them
# hold all that they reserve while sampling, asleep now or not
_WHOLE = ("weights", "quantized_weights", "adapters", "drafter", "drafter_kv_cache")


@dataclass(frozen=True, slots=True)
class TreatyPlan:
    """Who gets which bytes of the budget. "Trainer" is all that is not the engine's, the interpreter included."""

    budget: int
    margin: int  # left to nobody
    trainer_peak: int  # while training; before the first training what the trainer holds now
    trainer_rest: int  # while sampling
    engine_rest: int  # weights and what goes with them while sampling: what sleeps now counts as if awake
    engine_in_training: int  # the same as it was held while training; before the first training as it is held now
    engine_step: int  # activations and workspace while sampling
    kv_cache: int
    kv_cache_in_training: int  # 0 where the engine sleeps meanwhile

    @property
    def while_training(self) -> int:
        return self.trainer_peak + self.engine_in_training + self.kv_cache_in_training

    @property
    def while_sampling(self) -> int:
        return self.trainer_rest + self.engine_rest + self.engine_step + self.kv_cache

    def __str__(self) -> str:
        show = format_bytes
        return (
            f"budget {show(self.budget)}: while sampling {show(self.while_sampling)} (KV {show(self.kv_cache)}, "
            f"weights {show(self.engine_rest)}, step {show(self.engine_step)}, trainer {show(self.trainer_rest)}); "
            f"while training {show(self.while_training)} (trainer {show(self.trainer_peak)}, weights "
            f"{show(self.engine_in_training)}, KV {show(self.kv_cache_in_training)}); margin {show(self.margin)}"
        )


class MemoryTreaty:
    """Keeps an engine in this process and the trainer around it within `budget` bytes of the engine's device.

    On a CPU the budget is of the process's resident memory, on CUDA of what the driver counts on the device. The peaks
    are those of the phases "training" and "sampling" of `phases`, by default its own; the largest that was seen counts.
    `margin` stays free, for what no measurement sees. The pool is sized by `settle()` alone, at first on what a step of
    the engine takes (one is run here, on a small pool of its own: the engine may sleep) and what the process holds.

    Raises `ValueError` for a budget that the margin takes wholly, and `EngineAsleepError` where the step cannot run,
    since sleep(2) gave back int8 copies, or weights on a device other than the CPU.
    """

    def __init__(
        self, llm: LLM, budget: int | str, *, margin: int | str = "32MiB", phases: MemoryPhases | None = None
    ) -> None:
        self.budget = parse_bytes(budget, "budget")
        self.margin = parse_bytes(margin, "margin")
        if self.budget < 1:
            raise ValueError(f"budget={budget!r} is not valid: it must be above 0")
        if self.margin < 0:
            raise ValueError(f"margin={margin!r} is not valid: it must be at least 0")
        if self.budget <= self.margin:
            raise ValueError(f"budget={budget!r} is not valid: it must be above margin={margin!r}, which stays free")
        _check_step_can_run(llm)
        self.phases = phases or MemoryPhases.of(llm)
        self._llm = llm
        self._platform = platform_for(llm.config.device)
        self._trainer_peak = 0
        self._step = max(llm.collective_rpc("measure_step"))
        self._block_bytes = self._pool().block_bytes
        self._settled = 0  # bytes in use besides KV and a step, with the weights awake, when the pool was last sized

    def training(self) -> AbstractContextManager[None]:
        """Measures the trainer's phase."""
        return self.phases.phase("training")

    def sampling(self) -> AbstractContextManager[None]:
        """Measures the engine's phase."""
        return self.phases.phase("sampling")

    def settle(self) -> TreatyPlan:
        """Sizes the KV pool by what is known now. Call it while nothing is in flight, best while the pool sleeps.

        Raises `MemoryBudgetError`, with the numbers and the old pool in place, where the budget is too small.
        """
        self._platform.trim()
        report = self._llm.memory_ledger()
        plan = self._plan(report)
        current = self._pool().num_blocks * self._block_bytes
        if plan.kv_cache < current or plan.kv_cache > _GROWTH * current:
            self._llm.resize_kv_cache(plan.kv_cache)
        self._settled = plan.trainer_rest + plan.engine_rest
        return plan

    def _plan(self, report: LedgerReport) -> TreatyPlan:
        trainer_rest = report.unaccounted
        held_now = report.accounted - _held(report, _POOL + _STEP)
        engine_rest = held_now - _held(report, _WHOLE) + _reserved(report, _WHOLE)
        training, sampling = self.phases.measured.get("training"), self.phases.measured.get("sampling")
        if training is not None:
            self._trainer_peak = max(self._trainer_peak, training.peak - training.engine)
        if sampling is not None and self._settled:
            self._step = max(self._step, sampling.peak - self._settled - _of(sampling, _POOL))
        trainer_peak = max(self._trainer_peak, trainer_rest)
        engine_in_training = held_now if training is None else training.engine - _of(training, _POOL + _STEP)
        free = self.budget - self.margin
        kv = free - engine_rest - trainer_rest - self._step
        held = _sleeps_not(training)
        if held:
            kv = min(kv, free - engine_in_training - trainer_peak)
        kv = max(min(kv, self._most()) // self._block_bytes, 0) * self._block_bytes
        plan = TreatyPlan(
            budget=self.budget,
            margin=self.margin,
            trainer_peak=trainer_peak,
            trainer_rest=trainer_rest,
            engine_rest=engine_rest,
            engine_in_training=engine_in_training,
            engine_step=self._step,
            kv_cache=kv,
            kv_cache_in_training=kv if held else 0,
        )
        self._check(plan)
        return plan

    def _check(self, plan: TreatyPlan) -> None:
        show = format_bytes
        missing = plan.trainer_peak + plan.engine_in_training + plan.margin - plan.budget
        if missing > 0:
            raise MemoryBudgetError(
                f"the budget of {show(plan.budget)} is too small for training: the trainer takes "
                f"{show(plan.trainer_peak)} at its peak, the engine holds {show(plan.engine_in_training)} besides KV, "
                f"and {show(plan.margin)} stay free: {show(missing)} are missing"
            )
        least = self._blocks(self._llm.engine.max_model_len) * self._block_bytes
        if plan.kv_cache < least:
            raise MemoryBudgetError(
                f"the budget of {show(plan.budget)} leaves {show(plan.kv_cache)} for KV, and one sequence of "
                f"max_model_len={self._llm.engine.max_model_len} tokens needs {show(least)} ({plan})"
            )

    def _most(self) -> int:
        """Bytes of KV that `max_num_seqs` sequences of the greatest length need: more would never be used by them."""
        return self._llm.config.max_num_seqs * self._blocks(self._llm.engine.max_model_len) * self._block_bytes

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._llm.config.block_size)

    def _pool(self) -> KVPoolSize:
        return self._llm.collective_rpc(_pool_of)[0]


def _pool_of(worker: Worker) -> KVPoolSize:
    return worker.pool


def _held(report: LedgerReport, owners: tuple[str, ...]) -> int:
    return sum(entry.resident for entry in report.entries if entry.owner in owners and not entry.on_host)


def _reserved(report: LedgerReport, owners: tuple[str, ...]) -> int:
    return sum(entry.reserved for entry in report.entries if entry.owner in owners and not entry.on_host)


def _of(phase: PhaseMemory, owners: tuple[str, ...]) -> int:
    return sum(phase.owners.get(owner, 0) for owner in owners)


def _check_step_can_run(llm: LLM) -> None:
    gone = "weights" in llm.sleeping_tags and platform_for(llm.config.device).device.type != "cpu"
    if gone or (llm.config.quantization is not None and not llm.engine.holds_policy):
        raise EngineAsleepError(
            "the treaty measures a step of the engine, which needs weights that were given back, or not loaded: wake "
            "the weights and run a policy_update, or reload_weights(), first"
        )


def _sleeps_not(training: PhaseMemory | None) -> bool:
    """Whether the KV pool was held while the trainer worked."""
    return training is not None and training.owners.get("kv_cache", 0) > 0
