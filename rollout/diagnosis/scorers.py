"""The trainer's own logprobs of given sequences: from a callable, or from a torch module, also with other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from rollout.errors import AdapterTensorError
from rollout.models.causal_lm import CausalLM
from rollout.weights.names import canonical_name
from rollout.weights.trainer_tensors import policy_tensors
from rollout.worker.batch import ForwardBatch
from rollout_kernels import linear_token_logprobs

_ROWS = 256  # rows of logits in float32 at a time
_LORA = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})  # names of PEFT's modules

Sequences = Sequence[Sequence[int]]
LogprobFunction = Callable[[list[list[int]]], Sequence[Any]]
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs float64 of tokens 1.. of each sequence: `raw` at temperature 1, `tempered` at the sequence's own."""

    raw: list[np.ndarray]
    tempered: list[np.ndarray] | None = None  # None: a callable does not tell


class CallableScorer:
    """A function from token id sequences to raw logprobs: of each token after the first, given those before it."""

    def __init__(self, function: LogprobFunction) -> None:
        self._function = function

    def score(self, sequences: Sequences, temperatures: Sequence[float]) -> Scores:
        """All sequences in one call. Raises `ValueError` for an answer of another length."""
        raw = [_array(item) for item in self._function([list(sequence) for sequence in sequences])]
        if len(raw) != len(sequences):
            raise ValueError(f"trainer returned {len(raw)} arrays for {len(sequences)} sequences")
        for index, (array, sequence) in enumerate(zip(raw, sequences, strict=True)):
            if array.shape != (len(sequence) - 1,):
                raise ValueError(
                    f"trainer returned shape {array.shape} for sequence {index} of {len(sequence)} tokens: it must "
                    f"return the logprob of each token after the first, {len(sequence) - 1} values. A trainer that "
                    "makes tokens of text anew has other tokens: give them as trainer_token_ids"
                )
        return Scores(raw)


class ModuleScorer:
    """A causal language model of transformers, or of this package, as it is: in its own mode, dtype and device.

    Its parameters may be replaced for the time of a call; the module itself is never changed. Several sequences are
    padded on the right, with an attention mask; a `CausalLM` gets them packed.
    """

    def __init__(self, module: torch.nn.Module, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        self._module = module
        self._weights = {name: parameter.detach() for name, parameter in module.named_parameters()} | dict(
            weights or {}
        )

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._weights.values())).dtype

    def named_tensors(self) -> NamedTensors:
        """Its weights under names that `canonical_name` reads; adapters merged. Raises `ValueError` for shards."""
        if any(isinstance(tensor, DTensor) or tensor.numel() == 0 for tensor in self._weights.values()):
            raise ValueError(
                "trainer holds shards of its parameters (FSDP, ZeRO-3): give a function that returns logprobs as "
                "trainer, and the gathered tensors as parameters"
            )
        return policy_tensors(self._module) if self._names()[1] else self._weights

    def _names(self) -> tuple[dict[str, str], list[str]]:
        """Hugging Face name -> the module's own, without adapters; and the names of adapters' tensors."""
        names: dict[str, str] = {}
        of_adapters = []
        for own in self._weights:
            try:
                name = canonical_name(own)
            except AdapterTensorError:
                of_adapters.append(own)
                continue
            if name is not None:
                names[name] = own
        return names, of_adapters

    def with_weights(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> ModuleScorer | None:
        """The same module with `tensors` (by Hugging Face name) in place of its own; all in `dtype`, where given.
        LoRA adapters, which `tensors` are merged with, add nothing then.

        None where there are adapters of other kinds, which cannot be made to add nothing.
        """
        names, of_adapters = self._names()
        if any(_LORA.isdisjoint(own.split(".")) for own in of_adapters):
            return None
        merged = dict(policy_tensors(self._module)) if of_adapters else {}
        replaced = {}
        for name, own in names.items():
            mine = self._weights[own]
            tensor = tensors.get(name, merged.get(name, mine))
            replaced[own] = tensor.detach().to(device=mine.device, dtype=dtype or mine.dtype)
        for own in of_adapters:
            replaced[own] = torch.zeros_like(self._weights[own], dtype=dtype)
        return ModuleScorer(self._module, replaced)

    @torch.no_grad()
    def score(self, sequences: Sequences, temperatures: Sequence[float]) -> Scores:
        """All sequences in one forward pass."""
        packed = isinstance(self._module, CausalLM)
        return self._score_packed(sequences, temperatures) if packed else self._score_padded(sequences, temperatures)

    def _score_padded(self, sequences: Sequences, temperatures: Sequence[float]) -> Scores:
        device = next(iter(self._weights.values())).device
        width = max(map(len, sequences))
        ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device=device)
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
        mask = (torch.arange(width, device=device)[None, :] < lengths[:, None]).long()
        options = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        logits = functional_call(self._module, self._weights, (), options).logits  # [S, width, vocab]
        raw, tempered = [], []
        for row, sequence, temperature in zip(logits, sequences, temperatures, strict=True):
            targets = torch.tensor(sequence[1:], device=device)
            raw.append(_gathered(row[: len(sequence) - 1], targets, 1.0))
            tempered.append(
                raw[-1] if temperature == 1.0 else _gathered(row[: len(sequence) - 1], targets, temperature)
            )
        return Scores(raw, tempered)

    def _score_packed(self, sequences: Sequences, temperatures: Sequence[float]) -> Scores:
        return packed_scores(self._module, self._weights, sequences, temperatures)


def packed_scores(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], sequences: Sequences, temperatures: Sequence[float]
) -> Scores:
    """Logprobs by a `CausalLM` over whole sequences, without a KV cache, with the kernels that the trainers use."""
    lengths = [len(sequence) - 1 for sequence in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    device = next(iter(weights.values())).device
    ids = torch.tensor([token for sequence in sequences for token in sequence[:-1]], device=device)
    targets = torch.tensor([token for sequence in sequences for token in sequence[1:]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    call = _PackedCall(module)
    # With gradients enabled a merged projection reads its parts' own parameters, the replaced ones; none needs a graph.
    with torch.enable_grad():
        prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}
        hidden, head = functional_call(call, prefixed, (ids, positions, starts.to(device)))
    places = torch.repeat_interleave(torch.tensor(temperatures, dtype=torch.float32), torch.tensor(lengths))
    bounds = starts.tolist()[1:-1]
    both = [
        linear_token_logprobs(hidden, head, targets, temperature)[0].double().cpu().numpy()
        for temperature in (1.0, places.to(device))
    ]
    return Scores(*(np.split(array, bounds) for array in both))


class _PackedCall(torch.nn.Module):
    """A `CausalLM` whose call also returns the output head that it has for the time of the call."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> Any:
        assert isinstance(self.model, CausalLM)
        hidden = self.model(ids, positions, ForwardBatch.packed(starts))
        return hidden.detach(), self.model.output_weight.detach()


def _gathered(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> np.ndarray:
    """float64 [T]: log-softmax of logits [T, vocab] / temperature at the targets."""
    parts = []
    for start in range(0, len(targets), _ROWS):
        rows = torch.log_softmax(logits[start : start + _ROWS].double() / temperature, dim=-1)
        parts.append(rows.gather(1, targets[start : start + _ROWS, None])[:, 0])
    return torch.cat(parts).cpu().numpy()


def _array(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, np.float64)
