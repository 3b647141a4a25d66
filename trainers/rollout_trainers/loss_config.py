"""What is learned from samples: the choices of a policy-gradient objective by name, and presets that fill them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rollout_trainers.checks import check_choice, check_flag, check_integer, check_real, fail

AlgorithmName = Literal[
    "grpo_token", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce", "ppo"
]
RatioLevel = Literal["token", "sequence", "geometric_mean", "gspo_token"]
Surrogate = Literal["clipped", "cispo", "log_probability"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "critic", "none"]
AdvantageScale = Literal["group_std", "batch_std", "none"]
KLPlacement = Literal["loss", "reward", "reward_to_go"]
KLEstimator = Literal["k1", "k2", "k3", "ratio_k3"]
Correction = Literal["none", "tis", "sequence_tis", "mis", "icepop", "geometric_mask"]
ImportanceLevel = Literal["none", "token", "sequence"]
MaskLevel = Literal["none", "token", "sequence", "geometric_mean"]


class _Preset:
    """The default of a choice that a preset fills; no object of a section keeps it."""

    def __repr__(self) -> str:
        return "<the preset's>"


_PRESET: Any = _Preset()

_GRPO_TOKEN: dict[str, Any] = {
    "ratio": "token",
    "surrogate": "clipped",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "aggregation": "token_mean",
    "loss_normalizer": None,
    "baseline": "group_mean",
    "advantage_scale": "group_std",
    "whiten": False,
    "discount": 1.0,
    "gae_lambda": 0.95,
    "dynamic_sampling": False,
    "max_sampling_rounds": 4,
    "overlong_buffer": 0.0,
    "overlong_penalty": 1.0,
    "drop_truncated": False,
    "kl_coefficient": 0.0,
    "kl_placement": "loss",
    "kl_target": None,
    "kl_gain": 0.1,
    "entropy_coefficient": 0.0,
    "correction": "tis",
}
_DAPO = {"clip_high": 0.28, "dynamic_sampling": True, "overlong_buffer": 0.2}
_GSPO = {"ratio": "geometric_mean", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"}
_RLOO = {
    "ratio": "sequence",
    "aggregation": "sequence_mean",
    "baseline": "leave_one_out",
    "advantage_scale": "none",
    "kl_placement": "reward",
}
_REINFORCE_PP = {"baseline": "none", "advantage_scale": "none", "whiten": True, "kl_placement": "reward_to_go"}
_REINFORCE = {
    "surrogate": "log_probability",
    "aggregation": "constant",
    "baseline": "batch_mean",
    "advantage_scale": "none",
    "kl_placement": "reward",
}
_PPO = {"baseline": "critic", "advantage_scale": "none", "whiten": True, "kl_placement": "reward_to_go"}

# What each algorithm's choices are where they differ from those of "grpo_token".
PRESETS: Mapping[AlgorithmName, Mapping[str, Any]] = {
    "grpo_token": {},
    "grpo": {"aggregation": "sequence_mean"},
    "dr_grpo": {"aggregation": "constant", "advantage_scale": "none"},
    "dapo": _DAPO,
    "gspo": _GSPO,
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": _RLOO,
    "reinforce_pp": _REINFORCE_PP,
    "reinforce": _REINFORCE,
    "ppo": _PPO,
}

_NO_CORRECTION = {
    "importance_level": "none",
    "importance_cap": None,
    "mask_level": "none",
    "mask_low": 0.0,
    "mask_high": None,
}
CORRECTIONS: Mapping[Correction, Mapping[str, Any]] = {
    "none": {},
    "tis": {"importance_level": "token", "importance_cap": 2.0},
    "sequence_tis": {"importance_level": "sequence", "importance_cap": 2.0},
    "mis": {"importance_level": "sequence", "mask_level": "sequence", "mask_high": 2.0},
    "icepop": {"importance_level": "token", "mask_level": "token", "mask_low": 0.5, "mask_high": 5.0},
    "geometric_mask": {
        "importance_level": "token",
        "importance_cap": 2.0,
        "mask_level": "geometric_mean",
        "mask_low": 0.99,
        "mask_high": 1.01,
    },
}
_KINDS: Mapping[str, Any] = {
    "algorithm": AlgorithmName,
    "ratio": RatioLevel,
    "surrogate": Surrogate,
    "aggregation": Aggregation,
    "baseline": Baseline,
    "advantage_scale": AdvantageScale,
    "kl_placement": KLPlacement,
    "kl_estimator": KLEstimator,
    "correction": Correction,
    "importance_level": ImportanceLevel,
    "mask_level": MaskLevel,
}


@dataclass(frozen=True, slots=True)
class LossSection:
    """The objective. `algorithm` fills every choice that is not given; `docs/algorithms.md` has them in tables.

    - "grpo_token", the default: "grpo" whose tokens all count the same, in long completions and in short ones.
    - "grpo": group mean and standard deviation, clipped token ratios, a mean over each sequence (Shao et al. 2024,
      DeepSeekMath, arXiv 2402.03300).
    - "dr_grpo": neither the standard deviation nor the sequence's length divides (Liu et al. 2025, Understanding
      R1-Zero-like training, arXiv 2503.20783).
    - "dapo": a higher upper clip, token mean, dynamic sampling, soft punishment of overlong completions (Yu et al.
      2025, arXiv 2503.14476).
    - "gspo": one ratio a sequence, the geometric mean of its tokens' (Zheng et al. 2025, arXiv 2507.18071).
    - "cispo": the ratio is clipped and detached, a weight; no token loses its gradient (MiniMax 2025, MiniMax-M1,
      arXiv 2506.13585).
    - "rloo": a sequence is one action; the mean reward of the *other* samples of its group is the baseline (Kool et
      al. 2019; Ahmadian et al. 2024, Back to basics, arXiv 2402.14740).
    - "reinforce_pp": no groups; advantages are whitened over all tokens of the step, KL in the rewards to go (Hu 2025,
      REINFORCE++, arXiv 2501.03262). With `baseline="group_mean"` it is that paper's variant with a baseline.
    - "reinforce": the policy gradient, with the mean reward of the step as baseline (Williams 1992). The sum over a
      sequence is divided by a constant length, which changes the scale of the gradient and not its direction.
    - "ppo": a critic says what was to be expected at each token; clipped token ratios, generalised advantages, whitened
      (Schulman et al. 2017, Proximal policy optimization algorithms, arXiv 1707.06347; for language models Ziegler et
      al. 2019, arXiv 1909.08593, and Ouyang et al. 2022, arXiv 2203.02155). The critic is the section `critic`'s.

    `ratio` is the probability of what was sampled under the new policy over that under the old one: of a "token", of
    the "sequence", the "geometric_mean" over its tokens, or "gspo_token" (the value of the geometric mean, the gradient
    of each token; for advantages that differ within a sequence). `surrogate` says what is done with it: "clipped" is
    the minimum of the ratio and the ratio within [1 - clip_low, 1 + clip_high], times the advantage (PPO; Schulman et
    al. 2017), and `dual_clip` bounds it to that many negative advantages (Ye et al. 2020, arXiv 1912.09729); "cispo"
    weighs the log-probability with the ratio held within the same range; "log_probability" needs no ratio, and so one
    optimiser step for each step's samples. `aggregation` is that of `losses.token_weights`; `loss_normalizer` is the
    length that "constant" divides by (None: that of `sampling.max_tokens`).

    Advantages (`advantages.py`) are rewards less a `baseline`, over `advantage_scale`; `whiten` then makes all tokens
    of the step have mean 0 and standard deviation 1. With the baseline "critic" they are generalised advantages
    (`gae.py`), which count what comes k tokens later `(discount * gae_lambda)^k`. `dynamic_sampling` replaces groups
    whose rewards are all equal by those of further prompts, in at most `max_sampling_rounds` rounds, the first
    included. `overlong_buffer` is the share of `sampling.max_tokens` at its end over which a completion's reward falls
    linearly, to `overlong_penalty` less at the limit. `drop_truncated` leaves truncated samples out ("overlong
    filtering").

    `kl_coefficient` holds the policy near the one that the run began with. No preset turns it on, as it costs a copy of
    the weights. In the "loss" the estimator is differentiated; in the "reward" the KL of a whole sequence is taken
    from its reward, before the baseline; in the "reward_to_go" each token's advantage loses the KL from there on (with
    a critic: each token's reward loses its own). With a `kl_target`, in nats a sequence, `kl_coefficient` is only what
    the controller of `kl_control.py` begins with; it moves by at most a fifth of `kl_gain` a step.
    `entropy_coefficient` times the entropy of the policy, with its gradient, is added to the objective.

    `correction` is for samplers whose logprobs are not the trainer's, and takes part where
    `algorithm.recompute_logprobs` is on (`corrections.py`): it names an `importance_level` with `importance_cap`, and a
    `mask_level` with its range [`mask_low`, `mask_high`], of which each can be given by itself. None is no bound.
    """

    algorithm: AlgorithmName = "grpo_token"
    ratio: RatioLevel = _PRESET
    surrogate: Surrogate = _PRESET
    clip_low: float = _PRESET
    clip_high: float = _PRESET
    dual_clip: float | None = _PRESET
    aggregation: Aggregation = _PRESET
    loss_normalizer: int | None = _PRESET
    baseline: Baseline = _PRESET
    advantage_scale: AdvantageScale = _PRESET
    whiten: bool = _PRESET
    discount: float = _PRESET
    gae_lambda: float = _PRESET
    dynamic_sampling: bool = _PRESET
    max_sampling_rounds: int = _PRESET
    overlong_buffer: float = _PRESET
    overlong_penalty: float = _PRESET
    drop_truncated: bool = _PRESET
    kl_coefficient: float = _PRESET
    kl_placement: KLPlacement = _PRESET
    kl_target: float | None = _PRESET
    kl_gain: float = _PRESET
    kl_estimator: KLEstimator = _PRESET  # "ratio_k3" in the loss, "k1" in the reward
    entropy_coefficient: float = _PRESET
    correction: Correction = _PRESET
    importance_level: ImportanceLevel = _PRESET
    importance_cap: float | None = _PRESET
    mask_level: MaskLevel = _PRESET
    mask_low: float = _PRESET
    mask_high: float | None = _PRESET

    def __post_init__(self) -> None:
        check_choice("loss", "algorithm", self.algorithm, get_args(AlgorithmName))
        changed = self._fill({**_GRPO_TOKEN, **PRESETS[self.algorithm]})
        changed |= self._fill({"kl_estimator": "ratio_k3" if self.kl_placement == "loss" else "k1"})
        check_choice("loss", "correction", self.correction, get_args(Correction))
        self._fill({**_NO_CORRECTION, **CORRECTIONS[self.correction]})
        self._check_values()
        self._check_surrogate(changed)
        self._check_rewards(changed)
        self._check_critic(changed)
        self._check_kl(changed)
        self._check_correction()

    @property
    def uses_kl(self) -> bool:
        """Whether logprobs under the reference are needed."""
        return self.kl_coefficient > 0

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.baseline == "critic"

    @property
    def uses_groups(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its prompt."""
        return self.baseline in ("group_mean", "leave_one_out")

    @property
    def moves_without_advantage(self) -> bool:
        """Whether something is learned from samples whose advantages are all zero."""
        return self.uses_critic or self.entropy_coefficient != 0 or (self.uses_kl and self.kl_placement == "loss")

    def _fill(self, values: Mapping[str, Any]) -> set[str]:
        """Gives the choices that were left to it their `values`. Returns the names of those that differ from them."""
        for name, value in values.items():
            if getattr(self, name) is _PRESET:
                object.__setattr__(self, name, value)
        return {name for name, value in values.items() if getattr(self, name) != value}

    def _check_values(self) -> None:
        for name, kind in _KINDS.items():
            check_choice("loss", name, getattr(self, name), get_args(kind))
        for name in ("whiten", "dynamic_sampling", "drop_truncated"):
            check_flag("loss", name, getattr(self, name))
        for name in ("clip_low", "clip_high", "overlong_buffer", "kl_coefficient", "mask_low"):
            check_real("loss", name, getattr(self, name), 0.0)
        check_real("loss", "entropy_coefficient", self.entropy_coefficient, 0.0)
        check_real("loss", "overlong_penalty", self.overlong_penalty, 0.0, open_low=True)
        check_integer("loss", "max_sampling_rounds", self.max_sampling_rounds, 1)
        if self.loss_normalizer is not None:
            check_integer("loss", "loss_normalizer", self.loss_normalizer, 1)

    def _check_surrogate(self, changed: set[str]) -> None:
        if self.dual_clip is not None:
            check_real("loss", "dual_clip", self.dual_clip, 1.0, open_low=True)
            if self.surrogate != "clipped":
                fail("loss", "dual_clip", self.dual_clip, "None where surrogate is not 'clipped'")
        if self.surrogate == "clipped" and self.clip_low >= 1:
            fail("loss", "clip_low", self.clip_low, "below 1: no ratio is below 1 - clip_low otherwise")
        if self.clip_low > 1:
            fail("loss", "clip_low", self.clip_low, "at most 1, which holds no ratio from below")
        unused = changed & {"ratio", "clip_low", "clip_high"}
        if self.surrogate == "log_probability" and unused:
            name = min(unused)
            fail("loss", name, getattr(self, name), "left out: surrogate 'log_probability' has no ratio to clip")
        if self.ratio == "gspo_token" and self.surrogate == "cispo":
            valid = "'geometric_mean' where surrogate is 'cispo', which takes no gradient of the ratio"
            fail("loss", "ratio", self.ratio, valid)
        if self.loss_normalizer is not None and self.aggregation != "constant":
            fail("loss", "loss_normalizer", self.loss_normalizer, "None where aggregation is not 'constant'")

    def _check_rewards(self, changed: set[str]) -> None:
        if self.advantage_scale == "group_std" and not self.uses_groups:
            valid = f"'batch_std' or 'none' with baseline {self.baseline!r}, which does not compare within groups"
            fail("loss", "advantage_scale", self.advantage_scale, valid)
        if self.whiten and self.advantage_scale != "none":
            fail("loss", "advantage_scale", self.advantage_scale, "'none' with whiten, which divides by itself")
        if self.dynamic_sampling and not self.uses_groups:
            valid = f"false with baseline {self.baseline!r}, where groups of equal rewards do teach something"
            fail("loss", "dynamic_sampling", True, valid)
        if not self.dynamic_sampling and "max_sampling_rounds" in changed:
            fail("loss", "max_sampling_rounds", self.max_sampling_rounds, "left out without dynamic_sampling")
        if self.overlong_buffer > 1:
            fail("loss", "overlong_buffer", self.overlong_buffer, "a share, at most 1")
        if self.overlong_buffer == 0 and "overlong_penalty" in changed:
            fail("loss", "overlong_penalty", self.overlong_penalty, "left out where overlong_buffer is 0")

    def _check_critic(self, changed: set[str]) -> None:
        for name in ("discount", "gae_lambda"):
            check_real("loss", name, getattr(self, name), 0.0)
            if getattr(self, name) > 1:
                fail("loss", name, getattr(self, name), "at most 1")
            if name in changed and not self.uses_critic:
                fail("loss", name, getattr(self, name), f"left out with baseline {self.baseline!r}: only a critic's")
        if not self.uses_critic:
            return
        if self.advantage_scale != "none":
            valid = "'none' with baseline 'critic', whose advantages differ from token to token: `whiten` scales those"
            fail("loss", "advantage_scale", self.advantage_scale, valid)
        if self.ratio in ("sequence", "geometric_mean"):
            valid = "'token' or 'gspo_token' with baseline 'critic', whose advantages differ from token to token"
            fail("loss", "ratio", self.ratio, valid)

    def _check_kl(self, changed: set[str]) -> None:
        check_real("loss", "kl_gain", self.kl_gain, 0.0, open_low=True)
        if self.kl_target is not None:
            check_real("loss", "kl_target", self.kl_target, 0.0, open_low=True)
            if not self.uses_kl:
                fail("loss", "kl_target", self.kl_target, "None where kl_coefficient is 0, which no factor moves")
        elif "kl_gain" in changed:
            fail("loss", "kl_gain", self.kl_gain, "left out without a kl_target")
        if not self.uses_kl:
            for name in ("kl_placement", "kl_estimator"):
                if name in changed:
                    fail("loss", name, getattr(self, name), "left out where kl_coefficient is 0: there is no KL term")
            return
        if self.kl_placement == "loss" and self.kl_estimator == "k1":
            fail(
                "loss",
                "kl_estimator",
                self.kl_estimator,
                "'k2', 'k3' or 'ratio_k3' where kl_coefficient is above 0: the expected gradient of 'k1' is zero, so "
                "the reference would have no effect",
            )
        if self.kl_placement != "loss" and self.kl_estimator != "k1":
            fail(
                "loss",
                "kl_estimator",
                self.kl_estimator,
                f"'k1' where kl_placement is {self.kl_placement!r}: a reward is not differentiated, and only the "
                "derivative of 'k1' that is then left out is zero in expectation",
            )
        if self.kl_placement == "reward_to_go" and self.ratio in ("sequence", "geometric_mean"):
            fail(
                "loss",
                "ratio",
                self.ratio,
                "'token' or 'gspo_token' where kl_placement is 'reward_to_go', whose advantages differ from token to "
                "token",
            )

    def _check_correction(self) -> None:
        if self.importance_cap is not None:
            check_real("loss", "importance_cap", self.importance_cap, 1.0)
            if self.importance_level == "none":
                fail("loss", "importance_cap", self.importance_cap, "None where importance_level is 'none'")
        if self.mask_high is not None:
            check_real("loss", "mask_high", self.mask_high, 1.0)
        if self.mask_low > 1:
            fail("loss", "mask_low", self.mask_low, "at most 1, the ratio of two policies that are the same")
        bounded = self.mask_low > 0 or self.mask_high is not None
        if bounded and self.mask_level == "none":
            name, unbounded = ("mask_low", 0) if self.mask_low > 0 else ("mask_high", None)
            fail("loss", name, getattr(self, name), f"{unbounded} where mask_level is 'none', which masks nothing")
        if self.mask_level != "none" and not bounded:
            fail("loss", "mask_level", self.mask_level, "'none' where neither mask_low nor mask_high bounds it")
