"""When the engine samples: in turns with the trainer, or while it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from rollout_trainers.checks import check_choice, check_integer, check_real, fail

AsynchronyMode = Literal["synchronous", "one_step_off", "in_flight"]
HeldCache = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class AsynchronySection:
    """How far the engine samples ahead of the trainer (`docs/asynchrony.md`).

    `mode` "synchronous": sampler and trainer take turns, and each step learns from the policy's own samples.
    "one_step_off": while the trainer learns from one batch the engine samples the next one, under the policy that both
    began with; the policy changes between batches. "in_flight": the engine never stops; the policy changes between two
    of its steps, and samples go on under the new one.

    No sample is learned from whose oldest token is more than `max_staleness` policy versions behind (None: 1, and what
    is kept may wait for one step more; 0 where nothing is sampled ahead): groups wait with their beginning, and a step
    for those that would get too old, so that none is thrown away.

    `over_sampling`: groups that are begun beyond those which the next step needs, as a share of
    `algorithm.prompts_per_step`. A step learns from the first whole groups that end, and the others are kept for the
    next one. None: 0; in flight, as many as `max_staleness` allows. A step's sampling ends after `step_tokens` tokens
    or `step_seconds` (None: when it has all its groups), and the step then learns from the groups that have ended, at
    least one; unfinished samples go on in the next step.

    `held_cache` is what becomes of the KV of samples that go on under a new policy: "keep" goes on with it (and costs
    nothing), "recompute" computes it anew, so that every token is of one policy alone. None: "keep" in flight,
    "recompute" otherwise.
    """

    mode: AsynchronyMode = "synchronous"
    max_staleness: int | None = None
    over_sampling: float | None = None
    step_tokens: int | None = None
    step_seconds: float | None = None
    held_cache: HeldCache | None = None

    def __post_init__(self) -> None:
        check_choice("asynchrony", "mode", self.mode, get_args(AsynchronyMode))
        check_choice("asynchrony", "held_cache", self.held_cache, (None, *get_args(HeldCache)))
        if self.max_staleness is not None:
            check_integer("asynchrony", "max_staleness", self.max_staleness, 0)
        if self.over_sampling is not None:
            check_real("asynchrony", "over_sampling", self.over_sampling, 0.0)
        if self.step_tokens is not None:
            check_integer("asynchrony", "step_tokens", self.step_tokens, 1)
        if self.step_seconds is not None:
            check_real("asynchrony", "step_seconds", self.step_seconds, 0.0, open_low=True)
        self._check_staleness()
        self._check_what_is_kept()

    @property
    def samples_ahead(self) -> bool:
        """Whether the engine samples while the trainer learns."""
        return self.mode != "synchronous"

    @property
    def has_budget(self) -> bool:
        """Whether a step's sampling may end before all its groups have."""
        return self.step_tokens is not None or self.step_seconds is not None

    @property
    def keeps_groups(self) -> bool:
        """Whether groups may stay in the engine from one step to the next."""
        return self.mode == "in_flight" or bool(self.over_sampling) or self.has_budget

    @property
    def is_active(self) -> bool:
        """Whether anything is other than in plain synchronous training."""
        return self.samples_ahead or self.keeps_groups

    @property
    def staleness_bound(self) -> int:
        """In policy versions."""
        if self.max_staleness is not None:
            return self.max_staleness
        if self.mode == "in_flight":
            return 1
        return int(self.samples_ahead) + int(self.keeps_groups)

    @property
    def held_cache_mode(self) -> HeldCache:
        if self.held_cache is not None:
            return self.held_cache
        return "keep" if self.mode == "in_flight" else "recompute"

    def num_spare(self, groups_per_step: int) -> int | None:
        """Groups beyond those that the next step needs (None: as many as the bound allows)."""
        if self.over_sampling is None:
            return None if self.mode == "in_flight" else 0
        return math.ceil(self.over_sampling * groups_per_step)

    def refuse(self, valid: str) -> NoReturn:
        """Raises the `ValueError` that says what else there may be: of the choice that makes sampling other than plain
        synchronous."""
        chosen = [name for name in ("over_sampling", "step_tokens", "step_seconds") if getattr(self, name)]
        name = "mode" if self.samples_ahead else chosen[0]
        fail("asynchrony", name, getattr(self, name), valid)

    def _check_staleness(self) -> None:
        least = int(self.samples_ahead) + int(self.keeps_groups and self.mode != "in_flight")
        most = None if self.keeps_groups else least  # nothing waits longer than it must
        bound = self.max_staleness
        if bound is not None and (bound < least or (most is not None and bound > most)):
            valid = f"{least}" if most is not None else f"at least {least}"
            why = "with" if self.keeps_groups else "without"
            fail("asynchrony", "max_staleness", bound, f"{valid} in mode {self.mode!r} {why} groups kept between steps")
        spare = self.staleness_bound - int(self.mode == "one_step_off")
        if self.over_sampling is not None and self.over_sampling > spare:
            fail(
                *("asynchrony", "over_sampling", self.over_sampling),
                f"at most {spare} with a max_staleness of {self.staleness_bound}: more groups would get too old",
            )

    def _check_what_is_kept(self) -> None:
        for name in ("step_tokens", "step_seconds"):
            if self.mode == "in_flight" and getattr(self, name) is not None:
                fail("asynchrony", name, getattr(self, name), "left out in flight, where sampling never ends")
        if self.held_cache is not None and not self.keeps_groups:
            fail(
                *("asynchrony", "held_cache", self.held_cache),
                "left out where no sample goes on under another policy: without over_sampling, a budget, or in_flight",
            )
