"""The critic of PPO: which network it is, and how it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rollout_trainers.checks import check_choice, check_integer, check_real, fail

CriticKind = Literal["value_head", "separate"]

_POLICY_GRADIENT = 0.1


@dataclass(frozen=True, slots=True)
class CriticSection:
    """What says how much reward is to be expected. It takes part where `loss.baseline` is "critic", as in PPO.

    `kind` "value_head" is one linear map of the policy's own last hidden states: it costs no forward pass. The gradient
    of its loss reaches the policy's weights times `policy_gradient` (0: it only reads them). "separate" is a network of
    its own, with the weights of `model` (None: the policy's model) at the beginning: a causal language model, or a
    sequence classifier with one number, such as the reward model (Ouyang et al. 2022), whose head it then begins with.

    `learning_rate` (None: 1e-3 for a value head, 1e-5 for a separate critic) rises over `learning_rate_warmup` steps,
    and then has the course of the section `optimizer`, which also gives AdamW's other numbers. In the first
    `warmup_steps` steps of the run only the critic learns. `value_clip` holds a new value within that distance of the
    old one wherever leaving it would be rewarded (None: not at all).
    """

    kind: CriticKind = "value_head"
    model: str | None = None
    learning_rate: float | None = None
    learning_rate_warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    value_clip: float | None = 0.2
    policy_gradient: float = _POLICY_GRADIENT

    def __post_init__(self) -> None:
        check_choice("critic", "kind", self.kind, get_args(CriticKind))
        if self.model is not None and self.kind != "separate":
            fail("critic", "model", self.model, "left out where kind is not 'separate'")
        if self.kind == "separate" and self.policy_gradient != _POLICY_GRADIENT:
            fail("critic", "policy_gradient", self.policy_gradient, "left out where kind is 'separate'")
        if self.learning_rate is not None:
            check_real("critic", "learning_rate", self.learning_rate, 0.0)
        for name in ("weight_decay", "policy_gradient"):
            check_real("critic", name, getattr(self, name), 0.0)
        check_real("critic", "max_grad_norm", self.max_grad_norm, 0.0, open_low=True)
        for name in ("learning_rate_warmup", "warmup_steps"):
            check_integer("critic", name, getattr(self, name), 0)
        if self.value_clip is not None:
            check_real("critic", "value_clip", self.value_clip, 0.0, open_low=True)
