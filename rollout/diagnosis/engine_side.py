"""What a diagnosis asks of the engine's workers, as functions for `LLM.collective_rpc`: they get the worker first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.diagnosis.scorers import packed_scores
from rollout.models.loader import build_model, materialize, read_config
from rollout.weights.names import is_drafters
from rollout.weights.receipt import Receipt, changed_tensors, fingerprint_of, fingerprint_tensors
from rollout.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class WeightsNow:
    """The weights of a worker as they are, by Hugging Face name, tied names included."""

    dtype: torch.dtype
    fingerprints: dict[str, int]
    changed: list[str]  # tensors that are not those of the receipt
    tied: dict[str, str]  # name -> the name that it is another one for


def weights_now(worker: Worker, receipt: Receipt) -> WeightsNow:
    """Reads every byte of the weights."""
    parameters, tied = worker.parameters(), worker.tied()
    known = fingerprint_tensors(parameters)
    known |= {name: known[target] for name, target in tied.items()}
    copies = {} if worker.quantized is None else worker.quantized.tensors()
    changed = changed_tensors(receipt, parameters, tied, worker.buffers(), copies)
    own = [name for name in changed if not is_drafters(name)]  # what a drafter guesses changes no logprob
    return WeightsNow(worker.dtype, known, own, dict(tied))


def fingerprints(worker: Worker, dtype: torch.dtype) -> dict[str, int]:
    """Of the weights rounded to another dtype, by Hugging Face name, tied names included."""
    rounded = {name: fingerprint_of(tensor.detach().to(dtype)) for name, tensor in worker.parameters().items()}
    return rounded | {name: rounded[target] for name, target in worker.tied().items()}


def weights(worker: Worker, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of these names (None: all), tied names included."""
    parameters, tied = worker.parameters(), worker.tied()
    everything = {name: tensor.detach() for name, tensor in parameters.items()}
    everything |= {name: everything[target] for name, target in tied.items()}
    return everything if names is None else {name: everything[name] for name in names}


def rescore(worker: Worker, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> list[np.ndarray]:
    """Raw logprobs float64 of tokens 1.. of each sequence by the worker's model and weights, computed in `dtype`.

    Makes a copy of the weights in that dtype.
    """
    model = build_model(read_config(worker.folder), dtype)
    materialize(model, lambda shape, kind: torch.empty(shape, dtype=kind, device=worker.device), worker.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(worker.model.get_parameter(name))
        copied = dict(model.named_parameters())
        return [packed_scores(model, copied, [sequence], [1.0]).raw[0] for sequence in sequences]
