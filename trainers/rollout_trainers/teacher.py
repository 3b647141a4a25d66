"""A frozen language model that reads what the policy has sampled, on the sampler's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rollout.layers.gather import take_rows
from rollout.models.loader import (
    build_model,
    load_weights,
    materialize,
    num_parameter_bytes,
    read_config,
    resolve_dtype,
)
from rollout.models.pretrained import resolve_model
from rollout.models.registry import ModelRegistry
from rollout.models.tokenizer import find_tokenizer
from rollout.platform.platform import Platform, platform_for
from rollout.worker.batch import ForwardBatch, SharedRows
from rollout_kernels import linear_token_logprobs
from rollout_trainers.config import RunConfig
from rollout_trainers.packing import PackedBatch


class Teacher:
    """Log-probabilities of sampled tokens under the weights in `folder`, at `temperature`.

    `dtype` is "auto" (the checkpoint's), "bfloat16" or "float32". With `sleep` the weights' memory is the device's only
    during a call; they are read from `folder` again at the next, which must therefore stay as it is.

    Raises `ValueError` for an architecture that the engine does not know, and a checkpoint that is not whole.
    """

    def __init__(self, folder: Path, dtype: str, platform: Platform, temperature: float, sleep: bool) -> None:
        self.folder = folder
        self.temperature = temperature
        self.sleep = sleep
        self.device = platform.device
        config = read_config(folder)
        self.model = build_model(config, resolve_dtype(dtype, config))
        self.memory = platform.memory("teacher", num_parameter_bytes(self.model))
        materialize(self.model, self.memory.carve, platform.device)
        load_weights(self.model, folder)
        self._is_awake = True
        if sleep:
            self.suspend()

    def suspend(self) -> None:
        """Gives the weights' memory back."""
        self.memory.release()
        self._is_awake = False

    def resume(self) -> None:
        """Reads the weights again, where they are not there."""
        if not self._is_awake:
            self.memory.resume()
            load_weights(self.model, self.folder)
            self._is_awake = True

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Logprobs float32 [C] of each batch's completion tokens, without gradient."""
        if not batches:
            return []
        self.resume()
        try:
            return [self._logprobs(batch.to(self.device)) for batch in batches]
        finally:
            if self.sleep:
                self.suspend()

    def _logprobs(self, batch: PackedBatch) -> torch.Tensor:
        vocab_size = self.model.shape.vocab_size
        if max(batch.input_ids.max(), batch.targets.max()) >= vocab_size:
            raise ValueError(f"the policy has sampled a token that its teacher, with {vocab_size}, does not know")
        context = ForwardBatch.packed(batch.query_start, SharedRows(batch.gather, batch.first))
        hidden = take_rows(self.model(batch.input_ids, batch.positions, context), batch.rows)  # [C, H]
        return linear_token_logprobs(hidden, self.model.output_weight, batch.targets, self.temperature)[0]


def load_teacher(config: RunConfig) -> Teacher | None:
    """The teacher that a run's section names, or None; see `check_teacher`."""
    section = config.teacher
    if section.model is None:
        return None
    platform = platform_for(config.engine.device)
    return Teacher(resolve_model(section.model), section.dtype, platform, config.sampling.temperature, section.sleep)


def check_teacher(config: RunConfig) -> None:
    """Raises `ValueError` where a run's teacher cannot read all that its policy can write: it is no model that the
    engine knows, has other tokens, or its longest sequence is shorter. Reads configurations and tokenizers only."""
    if config.teacher.model is None:
        return
    policy = resolve_model(config.model)
    try:
        folder = resolve_model(config.teacher.model)
        theirs = read_config(folder)
        ModelRegistry.resolve(theirs)
    except ValueError as error:
        raise ValueError(f"teacher.model is not valid: {error}") from error
    ours = read_config(policy)
    problem = _vocabulary_problem(folder, policy, theirs.vocab_size, ours.vocab_size)
    longest = config.engine.max_model_len or ours.max_position_embeddings
    if problem is None and theirs.max_position_embeddings < longest:
        problem = f"it reads at most {theirs.max_position_embeddings} tokens, and engine.max_model_len is {longest}"
    if problem is not None:
        raise ValueError(f"teacher.model={config.teacher.model!r} is not valid: {problem}")


def _vocabulary_problem(teacher: Path, policy: Path, their_size: int, our_size: int) -> str | None:
    """Why the tokens of two models' folders are not the same, or None. Sizes may differ where tokenizers agree, since
    embeddings of one family are often padded differently; without a tokenizer only equal sizes say anything."""
    tokenizers = [find_tokenizer(None, folder) for folder in (teacher, policy)]
    if tokenizers[0] is None or tokenizers[1] is None:
        if their_size == our_size:
            return None
        return f"its vocabulary has {their_size} tokens, the policy's {our_size}"
    theirs, ours = tokenizers[0].get_vocab(), tokenizers[1].get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            what = f"as {theirs[token]}" if token in theirs else "not at all"
            return f"it has other tokens than the policy, whose {token!r} is {number}: its tokenizer has it {what}"
    needed = max(ours.values(), default=-1) + 1
    return f"it knows {their_size} of the {needed} tokens" if their_size < needed else None
