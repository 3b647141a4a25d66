"""Trains the heads that guess for speculation, so that they follow the policy: Medusa's, or EAGLE's layer.

    rollouts (token ids) ─► the target's packed forward, without gradient ─► features ─► loss of the heads ─► AdamW
                                                                                                        │
    update.load(trainer.named_parameters()) ◄───────── "drafter.…", in the policy's own update ◄────────┘

Nothing here moves the policy: its weights are read detached. A step over a few samples takes a fraction of what the
policy's own step over them takes, since the heads are small and the target runs forward only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import rollout_kernels
from rollout.models.causal_lm import CausalLM
from rollout.outputs import RequestOutput
from rollout.speculation.eagle import EagleModel
from rollout.speculation.medusa import MedusaHeads
from rollout.weights.names import DRAFTER_PREFIX
from rollout.worker.batch import ForwardBatch
from rollout_trainers.checks import check_integer, check_real, fail
from rollout_trainers.config import OptimizerSection
from rollout_trainers.optimizer import MasterAdamW
from rollout_trainers.types import Sample

_ROWS_AT_ONCE = 256  # of logits, where whole distributions are compared: 256 x 49,152 float32 are 50 MB


@dataclass(frozen=True, slots=True)
class DrafterTraining:
    """How the heads are trained. Raises `ValueError` naming the field for a value out of range.

    A step learns from at most `tokens_per_step` sampled tokens, those of a random part of the samples' tokens where
    there are more. `temperature` is that of the samples.

    Medusa (Cai et al., 2024, section 2.2.1): the cross-entropy of head i counts `head_decay`^i. EAGLE (Li et al., 2024,
    section 3.2): the smooth L1 distance of the features, and `token_weight` times the cross-entropy between the
    distributions that they give; the features that go in have uniform noise of up to `feature_noise` added.
    """

    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(learning_rate=1e-3))
    tokens_per_step: int = 1024
    temperature: float = 1.0
    head_decay: float = 0.8
    token_weight: float = 0.1
    feature_noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, OptimizerSection):
            fail("drafter", "optimizer", self.optimizer, "an OptimizerSection")
        check_integer("drafter", "tokens_per_step", self.tokens_per_step, 1)
        check_integer("drafter", "seed", self.seed, 0)
        if self.seed >= 2**64:
            fail("drafter", "seed", self.seed, "below 2^64")
        for name in ("temperature", "head_decay"):
            check_real("drafter", name, getattr(self, name), 0.0, open_low=True)
        if self.head_decay > 1:
            fail("drafter", "head_decay", self.head_decay, "at most 1")
        for name in ("token_weight", "feature_noise"):
            check_real("drafter", name, getattr(self, name), 0.0)


class Tokens(Protocol):
    """What is learned from: a prompt and what followed it, as token ids, and which of those the policy has sampled
    (`loss_mask`, None for all). A `Sample` is one."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def completion_token_ids(self) -> list[int]: ...

    @property
    def loss_mask(self) -> np.ndarray | None: ...


@dataclass(frozen=True, slots=True)
class _Tokens:
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    loss_mask: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Sequences:
    """S whole sequences, one after another, with what the target makes of them.

    `input_ids`, `positions`: int64 [T]; `query_start`: int32 [S + 1]; `is_learned`: bool [T], the tokens that heads
    should guess (those that were sampled); `features` [T, hidden] in the target's dtype, without gradient.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    is_learned: torch.Tensor
    features: torch.Tensor

    def places(self, ahead: int) -> torch.Tensor:
        """int64 [R]: the places t of which the token `ahead` places further is of the same sequence, and learned."""
        count = len(self.input_ids)
        if count <= ahead:
            return torch.zeros(0, dtype=torch.int64)
        is_same = self.positions[ahead:] >= ahead
        return torch.nonzero(is_same & self.is_learned[ahead:])[:, 0]


@torch.no_grad()
def sequences_of(target: CausalLM, samples: Sequence[Tokens]) -> Sequences:
    """The samples' whole sequences with the target's features, under its weights as they are."""
    lengths = [len(sample.prompt_token_ids) + len(sample.completion_token_ids) for sample in samples]
    tokens = [token for sample in samples for token in (*sample.prompt_token_ids, *sample.completion_token_ids)]
    input_ids = torch.tensor(tokens, dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    query_start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    features = target(input_ids, positions, ForwardBatch.packed(query_start))
    is_learned = torch.cat([_is_policys(sample) for sample in samples])
    return Sequences(input_ids, positions, query_start, is_learned, features)


def _is_policys(sample: Tokens) -> torch.Tensor:
    """bool [tokens of the whole sequence]: those that the policy has sampled."""
    own = np.ones(len(sample.completion_token_ids), np.bool_) if sample.loss_mask is None else sample.loss_mask
    return torch.from_numpy(np.concatenate([np.zeros(len(sample.prompt_token_ids), np.bool_), own]))


@dataclass(slots=True)
class Loss:
    """A scalar with gradient, and what is reported beside it."""

    value: torch.Tensor
    metrics: dict[str, float]


class Objective(Protocol):
    """What a kind of heads learns from."""

    def loss(self, batch: Sequences, most_rows: int, generator: torch.Generator) -> Loss | None:
        """From at most `most_rows` tokens of the batch; None where it has none to learn from."""
        ...


class MedusaObjective:
    """Head i at place t should give the token at t + 2 + i: the sampled tokens' cross-entropy."""

    def __init__(self, heads: MedusaHeads, target: CausalLM, config: DrafterTraining) -> None:
        self.heads = heads
        self._target = target
        self._config = config

    def loss(self, batch: Sequences, most_rows: int, generator: torch.Generator) -> Loss | None:
        parts: list[torch.Tensor] = []
        metrics: dict[str, float] = {}
        for head in range(len(self.heads)):
            places = _some(batch.places(head + 2), most_rows, generator)
            if not len(places):
                break
            hidden = self.heads.hidden(head, batch.features[places])
            weight = self.heads.output_weight(head, self._target)
            weight = weight if self.heads.config.has_own_output else weight.detach()
            logprobs, _ = rollout_kernels.linear_token_logprobs(
                hidden, weight, batch.input_ids[places + head + 2], self._config.temperature
            )
            parts.append(-(self._config.head_decay**head) * logprobs.mean())
            metrics[f"drafter/cross_entropy_at_{head + 1}"] = -float(logprobs.detach().mean())
        if not parts:
            return None
        return Loss(torch.stack(parts).sum(), metrics)


class EagleObjective:
    """The guessed feature of each token should be the target's own, and give the same distribution."""

    def __init__(self, eagle: EagleModel, target: CausalLM, config: DrafterTraining) -> None:
        self.eagle = eagle
        self._target = target
        self._config = config

    def loss(self, batch: Sequences, most_rows: int, generator: torch.Generator) -> Loss | None:
        places = batch.places(1)  # whose features say how a learned token is drawn
        is_pair = batch.positions > 0
        rows = torch.nonzero(is_pair)[:, 0]  # of the batch, in the order of the pairs
        places = _some(places[batch.positions[places] > 0], most_rows, generator)
        if not len(places):
            return None
        with torch.no_grad():
            embedded = self._target.embed(batch.input_ids[rows])
        before = batch.features[rows - 1]
        noise = (2 * torch.rand(before.shape, generator=generator) - 1) * self._config.feature_noise
        starts = batch.query_start - torch.arange(len(batch.query_start), dtype=torch.int32)  # one less a sequence
        guessed = self.eagle(
            embedded, (before + noise).to(before.dtype), batch.positions[rows], ForwardBatch.packed(starts)
        )
        row_of = torch.cumsum(is_pair, 0) - 1
        guessed, wanted = guessed[row_of[places]], batch.features[places]
        distance = functional.smooth_l1_loss(guessed.float(), wanted.float())
        divergence, agreement = self._compare(guessed, wanted)
        metrics = {
            "drafter/feature_distance": float(distance.detach()),
            "drafter/cross_entropy_at_1": float(divergence.detach()),
            "drafter/agreement_at_1": agreement,
        }
        return Loss(distance + self._config.token_weight * divergence, metrics)

    def _compare(self, guessed: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The mean cross-entropy between the target's distributions and the guessed ones, and the mean mass that the
        two have in common: how often a guess drawn with the same noise can be right."""
        weight, temperature = self._target.output_weight.detach(), self._config.temperature
        total, common = guessed.new_zeros((), dtype=torch.float32), 0.0
        for start in range(0, len(guessed), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            with torch.no_grad():
                target = rollout_kernels.linear(wanted[part], weight, None, torch.float32) / temperature
                target = target.softmax(-1)
            logits = rollout_kernels.linear(guessed[part], weight, None, torch.float32) / temperature
            total = total + functional.cross_entropy(logits, target, reduction="sum")
            common += float(torch.minimum(target, logits.detach().softmax(-1)).sum())
        return total / len(guessed), common / len(guessed)


def _some(places: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """The places, or a random part of them, in order."""
    if len(places) <= most:
        return places
    return places[torch.randperm(len(places), generator=generator)[:most].sort().values]


def check_target(target: object) -> None:
    """Raises `ValueError` for a model that is not the engine's own kind, which computes features."""
    if not isinstance(target, CausalLM):
        raise ValueError(
            f"target is a {type(target).__name__}: it must be a CausalLM of rollout.models, as llm.shared_model() gives"
        )


def objective_of(module: nn.Module, target: CausalLM, config: DrafterTraining) -> Objective:
    """What these heads learn from. Raises `ValueError` for a module of another kind."""
    if isinstance(module, MedusaHeads):
        return MedusaObjective(module, target, config)
    if isinstance(module, EagleModel):
        return EagleObjective(module, target, config)
    raise ValueError(f"{type(module).__name__} is no drafter that can be trained: MedusaHeads and EagleModel are")


def _tokens_of(sample: Sample | RequestOutput) -> list[Tokens]:
    if isinstance(sample, Sample):
        return [sample]
    if not isinstance(sample, RequestOutput):
        raise TypeError(
            f"{type(sample).__name__} is nothing to learn from: it must be a Sample, or a RequestOutput of llm.generate"
        )
    if sample.is_delta:
        raise ValueError(
            f"the output of {sample.request_id!r} is a part of a stream (DELTA): whole outputs are learned from"
        )
    return [
        _Tokens(
            sample.prompt_token_ids + one.token_ids[: one.num_forced_tokens], one.token_ids[one.num_forced_tokens :]
        )
        for one in sample.outputs
    ]


class DrafterTrainer:
    """Trains `module` (the heads that `fresh_medusa`, `fresh_eagle` or `load_heads` gave) for `target`, one
    `learn(samples)` at a time.

    In a GRPO loop: `learn` after the policy's own step, and `update.load(trainer.named_parameters())` beside the
    policy's tensors.
    """

    def __init__(self, module: nn.Module, target: CausalLM, config: DrafterTraining | None = None) -> None:
        """Raises `ValueError` for a module that is no drafter, and for a target that is no `CausalLM`."""
        check_target(target)
        self.config = DrafterTraining() if config is None else config
        self.module = module
        self.target = target
        self._objective = objective_of(module, target, self.config)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        self._optimizer = MasterAdamW(module.named_parameters(), self.config.optimizer)
        self._generator = torch.Generator().manual_seed(self.config.seed)

    def learn(self, samples: Iterable[Sample | RequestOutput], rate: float | None = None) -> dict[str, float]:
        """One optimiser step at learning rate `rate` (the configured one); returns metrics, {} where the samples hold
        nothing to learn from.

        `samples` are a trainer's, or outputs of `llm.generate`, of which each sample counts. Raises `TypeError` for
        anything else, and `ValueError` for parts of a stream and for a rate that is no finite number above 0.
        """
        if rate is not None:
            check_real("drafter", "rate", rate, 0.0, open_low=True)
        chosen = self._choose([tokens for sample in samples for tokens in _tokens_of(sample)])
        if not chosen:
            return {}
        loss = self._objective.loss(sequences_of(self.target, chosen), self.config.tokens_per_step, self._generator)
        if loss is None:
            return {}
        loss.value.backward()
        norm = self._optimizer.step(self.config.optimizer.learning_rate if rate is None else rate)
        return {"drafter/loss": float(loss.value.detach()), "drafter/grad_norm": norm} | loss.metrics

    def _choose(self, samples: list[Tokens]) -> list[Tokens]:
        """Samples in random order, until they have `tokens_per_step` tokens."""
        chosen: list[Tokens] = []
        num_tokens = 0
        for index in torch.randperm(len(samples), generator=self._generator).tolist():
            sample = samples[index]
            num_own = int(_is_policys(sample).sum())
            if num_own and sample.prompt_token_ids:
                chosen.append(sample)
                num_tokens += num_own
            if num_tokens >= self.config.tokens_per_step:
                break
        return chosen

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """For `update.load`: every tensor of the heads, under the engine's names."""
        for name, parameter in self.module.named_parameters():
            yield DRAFTER_PREFIX + name, parameter.detach()
