"""The teacher of on-policy distillation: which model it is, and how what it says becomes advantages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from rollout_trainers.checks import check_choice, check_flag, check_real, fail
from rollout_trainers.loss_config import LossSection

TeacherBaseline = Literal["none", "batch_mean"]

# What the section `loss` says of rewards alone.
_OF_REWARDS = ("baseline", "advantage_scale", "whiten", "overlong_buffer", "overlong_penalty")


@dataclass(frozen=True, slots=True)
class TeacherSection:
    """On-policy distillation: a teacher says of each token that the policy has sampled how likely it would have made it
    itself, and what it finds likelier than the policy does becomes likelier (Agarwal et al. 2024, On-policy
    distillation of language models, arXiv 2306.13649; Lu and Thinking Machines Lab 2025, On-policy distillation).

    `model` is the teacher's folder (None: there is none): a causal language model with the policy's tokens, at the
    sampling temperature, as the policy. A token's reward is log teacher - log policy, of which the mean is minus the
    KL of the policy to the teacher. Its advantage is `weight` times the rewards from it to the end of its sample, of
    which those k tokens later count `discount` ** k: 0 is what both papers do, each token for itself; with 1 the
    expected gradient is that of the KL between whole sequences. A `baseline` of "batch_mean" takes the step's mean off.

    `reward_weight` times the advantage of the task's rewards, as the section `loss` has it, is added to it; with 0 the
    rewards are logged, and decide about held-out accuracy, and are not learned from. There need be none, then.

    `dtype` is "auto" (the checkpoint's), "bfloat16" or "float32". With `sleep` the teacher's weights are in memory only
    while it reads, before a step's first update, and are read from the folder each time.
    """

    model: str | None = None
    weight: float = 1.0
    discount: float = 0.0
    baseline: TeacherBaseline = "none"
    reward_weight: float = 0.0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    sleep: bool = True

    def __post_init__(self) -> None:
        check_real("teacher", "weight", self.weight, 0.0, open_low=True)
        for name in ("discount", "reward_weight"):
            check_real("teacher", name, getattr(self, name), 0.0)
        if self.discount > 1:
            fail("teacher", "discount", self.discount, "at most 1")
        check_choice("teacher", "baseline", self.baseline, get_args(TeacherBaseline))
        check_choice("teacher", "dtype", self.dtype, ("auto", "bfloat16", "float32"))
        check_flag("teacher", "sleep", self.sleep)
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if self.model is None and changed:
            fail("teacher", "model", None, f"a folder where {changed[0]} is given")

    @property
    def uses_rewards(self) -> bool:
        """Whether the policy learns from the task's rewards."""
        return self.model is None or self.reward_weight > 0

    def check_loss(self, loss: LossSection) -> None:
        """Raises `ValueError` for choices of the loss that make no sense with this teacher, or would have no effect."""
        if self.model is None:
            return
        with_teacher = "with teacher.model, whose advantages differ from token to token"
        if loss.ratio in ("sequence", "geometric_mean"):
            fail("loss", "ratio", loss.ratio, f"'token' or 'gspo_token' {with_teacher}")
        if loss.uses_critic:
            fail("loss", "baseline", loss.baseline, f"other than 'critic' {with_teacher}")
        if loss.dynamic_sampling:
            fail("loss", "dynamic_sampling", True, "false with teacher.model: groups of equal rewards teach something")
        if self.uses_rewards:
            return
        preset = LossSection(algorithm=loss.algorithm)
        for name in _OF_REWARDS:
            if getattr(loss, name) != getattr(preset, name):
                fail(
                    "loss", name, getattr(loss, name), "left out where teacher.reward_weight is 0: rewards don't count"
                )
        if loss.uses_kl and loss.kl_placement != "loss":
            valid = "'loss' where teacher.reward_weight is 0: no reward is there to take the KL from"
            fail("loss", "kl_placement", loss.kl_placement, valid)
