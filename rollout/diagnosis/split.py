"""Splits the gap between sampler and trainer: the same tokens on a chain of paths, each one change away from the last.

    sampler ─► engine ─► trainer's code, ─► the same, ─► trainer's ─► all in one ─► the trainer's ─► the numbers
    returned   now       engine's weights   in float32   weights      batch         token ids        that it used
            │         │                                  │            │             │                │
        stale KV,   precision, implementation       wrong weights,  batch         re-         sampling semantics,
        policy lag                                  policy lag      variance    tokenisation  unexplained

Each arrow is a part, measured in nats per token at temperature 1, so that the parts add up token by token.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rollout.diagnosis import engine_side
from rollout.diagnosis.causes import Cause
from rollout.diagnosis.engine_side import WeightsNow
from rollout.diagnosis.records import Case
from rollout.diagnosis.scorers import CallableScorer, ModuleScorer, NamedTensors, Scores
from rollout.diagnosis.semantics import (
    Quantity,
    TrainerView,
    likeliest_quantity,
    sampler_values,
    trainer_values,
)
from rollout.errors import StaleWeightsError
from rollout.sampling_params import SamplingParams
from rollout.weights.names import canonical_names
from rollout.weights.receipt import fingerprint_of

if TYPE_CHECKING:
    from rollout.llm import LLM

_FLOAT32_ROUNDING = 1e-3  # nats: what two float32 implementations of one model may differ by, at most
_LIKE_ROUNDING = 2.0  # times the rounding's mean: what is smaller cannot be told from it
_NOISE = 0.5  # of the whole difference: a trainer that differs from itself by as much is another one at each call
_GUESS = 4.0  # times bfloat16's rounding: what is smaller is taken for it where the trainer's weights are not known


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Logprobs that are NaN or infinite: whose, where the first of them is, and how many tokens have one."""

    whose: str
    sample: int  # position among the samples that were given
    token: int  # position in the completion
    value: float
    num_tokens: int
    num_compared: int


@dataclass(frozen=True, slots=True)
class Passes:
    """What sampler, engine and trainer say of each case: float64 arrays of tokens 1.. of its sequence."""

    alone: list[np.ndarray]  # the trainer, each sequence in a call of its own
    together: Scores  # the trainer, all in one batch
    own_tokens: Scores  # the trainer, its own token ids, all in one batch
    engine: list[np.ndarray] | None  # the engine now; None where it refuses its weights

    def of(self, kept: Sequence[int]) -> Passes:
        """Those of some of the cases."""
        engine = None if self.engine is None else [self.engine[index] for index in kept]
        return Passes(
            [self.alone[index] for index in kept], _of(self.together, kept), _of(self.own_tokens, kept), engine
        )


def _of(scores: Scores, kept: Sequence[int]) -> Scores:
    tempered = None if scores.tempered is None else [scores.tempered[index] for index in kept]
    return Scores([scores.raw[index] for index in kept], tempered)


@dataclass(slots=True)
class Findings:
    """Parts as arrays float64 [tokens of all cases], and what was found on the way."""

    parts: dict[Cause, np.ndarray]
    evidence: dict[str, Any] = field(default_factory=dict)
    quantity: Quantity = Quantity.SAMPLED
    tensors_differ: list[str] | None = None  # the trainer's from the engine's; None: could not be compared
    engine_changed: list[str] = field(default_factory=list)  # the engine's from its receipt
    not_compared: list[str] = field(default_factory=list)  # the engine's, which the trainer's tensors lack
    not_finite: NotFinite | None = None
    other_version: bool = False  # the trainer is of another policy than the engine, so its tensors should differ

    def add(self, cause: Cause, values: np.ndarray) -> None:
        self.parts[cause] = self.parts.get(cause, np.zeros(len(values))) + values

    @property
    def weights_are_wrong(self) -> bool:
        """Some tensor is known to be another one than it should be, whatever that does to the samples."""
        return bool(self.engine_changed or (self.tensors_differ and not self.other_version))

    def size(self, cause: Cause) -> float:
        return float(np.abs(self.parts[cause]).mean()) if cause in self.parts else 0.0


class Splitter:
    """One diagnosis on its way. `trainer_version` is the policy version that the trainer's weights are."""

    def __init__(
        self,
        llm: LLM,
        cases: Sequence[Case],
        scorer: CallableScorer | ModuleScorer,
        parameters: NamedTensors | None,
        trainer_version: int | None,
        tolerance: float,
    ) -> None:
        self.llm = llm
        self.cases = list(cases)
        self.scorer = scorer
        self.parameters = parameters
        self.version = llm.policy_version
        self.trainer_version = self.version if trainer_version is None else trainer_version
        self.tolerance = tolerance
        self.salt = secrets.token_hex(8)  # never used before: no block of an earlier diagnosis is hit either
        self.found = Findings({}, other_version=self.trainer_version != self.version)
        self.sequences = [case.record.sequence for case in cases]
        self.temperatures = [case.record.temperature or 1.0 for case in cases]

    def run(self) -> Findings:
        """All parts. Raises the engine's own error where it sleeps or holds no policy."""
        receipt = self.llm.receipt
        if receipt is None:
            raise ValueError("the engine has no receipt: run a policy_update first")
        workers: list[WeightsNow] = self.llm.collective_rpc(engine_side.weights_now, args=(receipt,))
        self.found.engine_changed = sorted({name for worker in workers for name in worker.changed})
        versions = sorted({int(v) for case in self.cases for v in case.record.versions()})
        self.found.evidence["sample_versions"] = versions
        # A trainer of the very policy that sampled, while the engine is ahead: the engine's weights say nothing of it.
        beside = self.found.other_version and versions == [self.trainer_version]
        if not beside:
            self._compare_weights(workers[0])
        passes = self._cut_at_not_finite(self._passes())
        if not self.cases:
            return self.found
        sampled = self._flat([case.record.raw_logprobs for case in self.cases], whole=False)
        alone = self._flat(passes.alone)
        if beside:
            self._guess(sampled, alone, Cause.WRONG_WEIGHTS)
        elif passes.engine is None:  # it refuses to compute with weights that are not those of its receipt
            self.found.add(Cause.WRONG_WEIGHTS, alone - sampled)
        else:
            engine = self._flat(passes.engine)
            self._sampling_to_now(sampled, engine)
            self._engine_to_trainer(engine, alone, workers[0])
        self._rest(alone, passes)
        self._fold_rounding()
        return self.found

    def _passes(self) -> Passes:
        together = own_tokens = self.scorer.score(self.sequences, self.temperatures)
        if any(case.is_retokenised for case in self.cases):
            own_tokens = self.scorer.score([case.trainer_sequence for case in self.cases], self.temperatures)
        return Passes(self._one_by_one(self.scorer), together, own_tokens, self._engine_now())

    def _cut_at_not_finite(self, passes: Passes) -> Passes:
        """Compares each case only up to its first logprob that is NaN or infinite, and no case that begins with one."""
        sources: dict[str, list[np.ndarray]] = {
            "the sampler's raw_logprobs": self._each([case.record.raw_logprobs for case in self.cases], whole=False),
            "the sampler's sampled_logprobs": self._each(
                [case.record.sampled_logprobs for case in self.cases], whole=False
            ),
            "the logprobs that the engine computes now": [] if passes.engine is None else self._each(passes.engine),
            "the trainer's logprobs": self._each(passes.alone),
            "the trainer's logprobs of all samples in one batch": self._each(passes.together.raw),
            "the trainer's logprobs of its own token ids": self._each(passes.own_tokens.raw),
            "the trainer's numbers (trainer_logprobs)": [
                _used(case) for case in self.cases if case.trainer_logprobs is not None
            ],
        }
        sources = {whose: arrays for whose, arrays in sources.items() if arrays}
        finite = [np.ones(case.num_tokens, bool) for case in self.cases]
        first: tuple[str, int, int, float] | None = None
        for whose, arrays in sources.items():
            for index, array in enumerate(arrays):
                bad = np.flatnonzero(~np.isfinite(array))
                finite[index][bad] = False
                if len(bad) and first is None:
                    first = whose, self.cases[index].index, int(bad[0]), float(array[bad[0]])
        if first is None:
            return passes
        count = sum(int((~each).sum()) for each in finite)
        self.found.not_finite = NotFinite(*first, count, sum(map(len, finite)))
        for case, each in zip(self.cases, finite, strict=True):
            case.num_tokens = len(each) if each.all() else int(np.argmin(each))
        kept = [index for index, case in enumerate(self.cases) if case.num_tokens]
        self.cases = [self.cases[index] for index in kept]
        self.sequences = [self.sequences[index] for index in kept]
        self.temperatures = [self.temperatures[index] for index in kept]
        return passes.of(kept)

    def _flat(self, arrays: Sequence[np.ndarray], whole: bool = True) -> np.ndarray:
        """The compared tokens of all cases, float64. `whole`: arrays are of tokens 1.. of the sequences."""
        return np.concatenate(self._each(arrays, whole))

    def _each(self, arrays: Sequence[np.ndarray], whole: bool = True) -> list[np.ndarray]:
        parts = []
        for case, array in zip(self.cases, arrays, strict=True):
            first = len(case.record.prompt_token_ids) - 1 if whole else 0
            parts.append(np.asarray(array, np.float64)[first : first + case.num_tokens])
        return parts

    def _one_by_one(self, scorer: CallableScorer | ModuleScorer) -> list[np.ndarray]:
        """Each sequence in a call of its own."""
        pairs = zip(self.sequences, self.temperatures, strict=True)
        return [scorer.score([sequence], [temperature]).raw[0] for sequence, temperature in pairs]

    def _alone(self, scorer: CallableScorer | ModuleScorer) -> np.ndarray:
        return self._flat(self._one_by_one(scorer))

    def _engine_now(self) -> list[np.ndarray] | None:
        """A fresh forward pass of the engine on no cached block; None where it refuses its weights."""
        items = [{"prompt_token_ids": sequence, "cache_salt": self.salt} for sequence in self.sequences]
        try:
            return [output.logprobs for output in self.llm.score(items, use_tqdm=False)]
        except StaleWeightsError as error:
            self.found.evidence["engine_refuses"] = str(error)
            return None

    def _compare_weights(self, engine: WeightsNow) -> None:
        named = self.parameters
        if named is None and isinstance(self.scorer, ModuleScorer):
            named = self.scorer.named_tensors()
        if named is None:
            return
        pairs = cast("Iterable[tuple[str, torch.Tensor]]", named.items() if isinstance(named, Mapping) else named)
        known = {engine.dtype: engine.fingerprints}
        differ, compared, unknown, not_finite = [], 0, [], []
        seen: set[str] = set()  # tied names count as their target
        for own, tensor in pairs:  # lazily: gathered tensors may be valid only until the next
            for name in canonical_names([own]).values():
                if name not in engine.fingerprints:
                    unknown.append(name)
                    continue
                compared += 1
                seen.add(engine.tied.get(name, name))
                # In the coarser of the two dtypes, so that rounding alone makes no tensor another one.
                coarser = min(engine.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
                if coarser not in known:
                    known[coarser] = self.llm.collective_rpc(engine_side.fingerprints, args=(coarser,))[0]
                if fingerprint_of(tensor.detach().to(coarser)) != known[coarser][name]:
                    differ.append(name)
                if not torch.isfinite(tensor.detach()).all():
                    not_finite.append(name)
        self.found.tensors_differ = sorted(differ)
        self.found.not_compared = sorted(
            name for name in engine.fingerprints if engine.tied.get(name, name) not in seen
        )
        self.found.evidence |= {"tensors_compared": compared, "tensors_unknown_to_the_engine": unknown}
        self.found.evidence["tensors_not_compared"] = self.found.not_compared
        if not_finite:
            self.found.evidence["tensors_not_finite"] = sorted(not_finite)

    def _sampling_to_now(self, sampled: np.ndarray, engine: np.ndarray) -> None:
        """From what the sampler returned to the engine's fresh pass: the weights moved on, or the KV was not theirs."""
        difference = engine - sampled
        receipt = self.llm.receipt
        assert receipt is not None
        moved_on, replaced = [], []
        for case in self.cases:
            # A token is of an older policy if it was sampled by one, or upon KV of one.
            versions = case.record.versions()
            older = np.minimum.accumulate(versions) < self.version
            moved_on.append(older[: case.num_tokens])
            same_version = case.record.receipt_id in (None, receipt.id) or bool(older.any())
            replaced.append(np.full(case.num_tokens, not same_version or bool(self.found.engine_changed)))
        lagging = np.concatenate(moved_on)
        other_weights = np.concatenate(replaced) & ~lagging
        self.found.add(Cause.POLICY_LAG, np.where(lagging, difference, 0.0))
        self.found.add(Cause.WRONG_WEIGHTS, np.where(other_weights, difference, 0.0))
        stale = np.where(lagging | other_weights, 0.0, difference)
        self.found.add(Cause.STALE_KV, stale)
        if np.abs(stale).max() > self.tolerance:
            self.found.evidence["cached_tokens"] = sum(case.record.num_cached_tokens for case in self.cases)
            self.found.evidence["cache_differs_now"] = self._cache_differs()

    def _cache_differs(self) -> bool:
        """Whether a token drawn on cached blocks has another logprob than one drawn without them."""
        if not self.llm.config.enable_prefix_caching:
            return False
        prompts = [sequence[:-1] for sequence in self.sequences]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        answers = []
        for salt in (None, self.salt):
            items = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
            outputs = self.llm.generate(items, params, use_tqdm=False)
            drawn = [output.outputs[0] for output in outputs]
            answers.append([(sample.token_ids, sample.raw_logprobs.tolist()) for sample in drawn])
        return answers[0] != answers[1]

    def _engine_to_trainer(self, engine: np.ndarray, alone: np.ndarray, weights: WeightsNow) -> None:
        """From the engine to the trainer, each sequence alone: other kernels and dtypes, then other weights."""
        cause = Cause.WRONG_WEIGHTS if self.trainer_version == self.version else Cause.POLICY_LAG
        differ = self.found.tensors_differ
        if differ is None:
            self._guess(engine, alone, cause)
            return
        with_engine_weights = alone
        if differ:
            swapped = None
            if isinstance(self.scorer, ModuleScorer):
                swapped = self.scorer.with_weights(self._engine_weights(differ))
            with_engine_weights = engine if swapped is None else self._alone(swapped)
            self.found.add(cause, alone - with_engine_weights)
        if self.found.not_compared:
            self._guess(engine, with_engine_weights, cause)
        else:
            self._same_weights(engine, with_engine_weights, weights.dtype)

    def _engine_weights(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        return self.llm.collective_rpc(engine_side.weights, args=(names,))[0]

    def _rescore(self, dtype: torch.dtype) -> np.ndarray:
        """The engine's model and weights, computed in another dtype."""
        return self._flat(self.llm.collective_rpc(engine_side.rescore, args=(self.sequences, dtype))[0])

    def _bfloat16_rounding(self) -> float:
        """What computing in bfloat16 instead of float32 does to these tokens: mean |difference| in nats."""
        return float(np.abs(self._rescore(torch.bfloat16) - self._rescore(torch.float32)).mean())

    def _same_weights(self, engine: np.ndarray, trainer: np.ndarray, dtype: torch.dtype) -> None:
        """Splits a difference under the same weights: rounding vanishes in float32, another implementation stays."""
        if np.abs(trainer - engine).max() <= self.tolerance:
            self.found.add(Cause.PRECISION, trainer - engine)
            return
        exact_engine, exact_trainer = engine, trainer
        config = self.llm.config
        if dtype is not torch.float32 or config.quantization is not None or config.kv_cache_dtype != "auto":
            exact_engine = self._rescore(torch.float32)
        in_float32 = None
        if isinstance(self.scorer, ModuleScorer):
            in_float32 = self.scorer.with_weights(self._engine_weights(), torch.float32)
        if in_float32 is not None:
            exact_trainer = self._alone(in_float32)
            if self._noise(in_float32, exact_trainer) > 0:
                exact_trainer = trainer  # another draw in float32 tells nothing of its rounding
        else:
            self._noise(self.scorer, trainer)
            # It computes as it does: how far it is from exact is its rounding, if that is of bfloat16's size.
            allowed = _GUESS * self._bfloat16_rounding()
            exact_trainer = exact_engine if float(np.abs(trainer - exact_engine).mean()) <= allowed else trainer
        left = exact_trainer - exact_engine
        rounding = (trainer - exact_trainer) + (exact_engine - engine)
        self.found.evidence["rounding"] = {
            "engine": float(np.abs(engine - exact_engine).mean()),
            "trainer": float(np.abs(trainer - exact_trainer).mean()),
            "left_in_float32": float(np.abs(left).mean()),
        }
        same_code = np.abs(left).max() <= _FLOAT32_ROUNDING
        self.found.add(Cause.PRECISION, rounding + left if same_code else rounding)
        self.found.add(Cause.IMPLEMENTATION, np.zeros(len(left)) if same_code else left)

    def _noise(self, scorer: CallableScorer | ModuleScorer, once: np.ndarray) -> float:
        """By how many nats a token the scorer differs from itself in a second call: 0 where no token does by more than
        float32 rounding."""
        difference = np.abs(self._alone(scorer) - once)
        if difference.max() <= _FLOAT32_ROUNDING:
            return 0.0
        noise = float(difference.mean())
        self.found.evidence["changes_from_call_to_call"] = noise
        return noise

    def _guess(self, engine: np.ndarray, trainer: np.ndarray, otherwise: Cause) -> None:
        """The trainer's weights are not known: what bfloat16's rounding can make is taken for it, more is not."""
        difference = trainer - engine
        if np.abs(difference).max() <= self.tolerance:
            self.found.add(Cause.PRECISION, difference)
            return
        rounding = self._bfloat16_rounding()
        self.found.evidence["rounding"] = {"bfloat16": rounding, "trainer": float(np.abs(difference).mean())}
        size = float(np.abs(difference).mean())
        noise = self._noise(self.scorer, trainer)
        if size <= _GUESS * rounding:
            self.found.add(Cause.PRECISION, difference)
        else:
            self.found.add(Cause.IMPLEMENTATION if noise >= _NOISE * size else otherwise, difference)

    def _rest(self, alone: np.ndarray, passes: Passes) -> None:
        """From the trainer, each sequence alone, to the numbers that it used."""
        together = self._flat(passes.together.raw)
        self.found.add(Cause.BATCH_VARIANCE, together - alone)
        if any(case.is_retokenised for case in self.cases):
            self.found.add(Cause.RETOKENISATION, self._flat(passes.own_tokens.raw) - together)
        if all(case.trainer_logprobs is not None for case in self.cases):
            self._used_numbers(self._views(passes.own_tokens))

    def _views(self, scores: Scores) -> list[TrainerView]:
        views = []
        for index, case in enumerate(self.cases):
            first = len(case.record.prompt_token_ids) - 1
            own = slice(first, first + case.num_tokens)
            tempered = None if scores.tempered is None else scores.tempered[index][own]
            views.append(TrainerView(scores.raw[index][own], tempered))
        return views

    def _used_numbers(self, views: list[TrainerView]) -> None:
        records = [case.record for case in self.cases]
        used = [_used(case) for case in self.cases]
        self.found.quantity = quantity = likeliest_quantity(records, views, used, self.tolerance)
        sampled, values, predicted = [], [], []
        for case, view in zip(self.cases, views, strict=True):
            sampled.append(sampler_values(case.record, Quantity.SAMPLED, case.num_tokens))
            values.append(sampler_values(case.record, quantity, case.num_tokens))
            predicted.append(trainer_values(case.record, view, quantity))
        self.found.add(Cause.SAMPLING_SEMANTICS, np.concatenate(values) - np.concatenate(sampled))
        self.found.add(Cause.UNEXPLAINED, np.concatenate(used) - np.concatenate(predicted))

    def _fold_rounding(self) -> None:
        """What is no larger than twice the rounding cannot be told from it: kernels round by the batch's shape too."""
        noise = self.found.evidence.get("changes_from_call_to_call", 0.0)
        into, size = Cause.PRECISION, self.found.size(Cause.PRECISION)
        if noise > 0 and self.found.size(Cause.IMPLEMENTATION) > size:  # nor from what changes at each call
            into, size = Cause.IMPLEMENTATION, noise
        for cause in (Cause.BATCH_VARIANCE, Cause.UNEXPLAINED):
            if 0 < self.found.size(cause) <= _LIKE_ROUNDING * size:
                self.found.evidence[f"{cause.value} counted as {into.value}"] = self.found.size(cause)
                self.found.add(into, self.found.parts.pop(cause))


def _used(case: Case) -> np.ndarray:
    assert case.trainer_logprobs is not None
    return case.trainer_logprobs[: case.num_tokens]
