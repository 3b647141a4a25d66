"""A draft model: a smaller model with the same vocabulary, which computes the next tokens one after another.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al., "Accelerating Large
Language Model Decoding with Speculative Sampling" (2023). Here it draws with the noise that the target will draw with,
so that both are likely to draw the same token also where neither distribution has a clear favourite.

It runs as the target does: a `Runner` of its own, over a pool of its own, with recorded or captured decode steps. Its
weights and keys have the target's dtype; int8 copies, int8 keys and LoRA adapters are the target's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from rollout.core.schedule import DraftPlan, DraftSequence, ScheduledSequence
from rollout.core.stop import NOT_A_TOKEN
from rollout.models.causal_lm import CausalLM
from rollout.models.loader import build_model, load_weights, read_config
from rollout.models.pretrained import resolve_model
from rollout.models.tokenizer import find_tokenizer
from rollout.speculation.checkpoint import take_memory
from rollout.speculation.guesses import before_failure, draw_guesses, stacked
from rollout.speculation.model_drafter import DrafterHost
from rollout.worker.pool_layout import PoolLayout
from rollout.worker.runner import Runner
from rollout.worker.step_memory import LargestStep, measure_graphs, measure_peak, set_aside
from rollout.worker.step_replays import decode_graphs, decode_programs


class DraftModel:
    """See the module's docstring, and `rollout.speculation.model_drafter.ModelDrafter` for the methods."""

    has_kv = True
    needs_features = False

    def __init__(self, host: DrafterHost) -> None:
        """Raises `ValueError` for a folder that holds no model that is supported, or one with another vocabulary."""
        assert host.speculative.model is not None
        self.distributions: dict[str, torch.Tensor] | None = None
        self._host = host
        self._folder = resolve_model(host.speculative.model)
        self._model = build_model(read_config(self._folder), host.dtype)
        check_vocabulary(self._model, self._folder, host)
        take_memory(self._model, host)
        shape = self._model.shape
        self._layout = PoolLayout(
            shape.num_hidden_layers,
            shape.num_key_value_heads,
            shape.head_dim,
            host.dtype,
            host.config.block_size,
            host.kv_layout,
        )
        self._runner = Runner(self._model, [], block_size=host.config.block_size, inputs=host.inputs)
        self._longest = min(host.longest, shape.max_position_embeddings)
        self._num_seqs = min(host.speculative.max_batch_for_speculation, host.config.max_num_seqs)

    @property
    def module(self) -> nn.Module:
        return self._model

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    def load(self, on_tensor: Callable[[str], None] | None = None) -> None:
        try:
            load_weights(self._model, self._folder, on_tensor)
        except ValueError as error:
            raise ValueError(f"speculative_config: model={str(self._folder)!r} cannot be used: {error}") from error

    @property
    def _max_rows(self) -> int:
        """Of a recorded step: after one in which all guesses were right, these and the token behind them are new."""
        return self._num_seqs * (self._host.speculative.num_speculative_tokens + 1)

    @property
    def _max_blocks(self) -> int:
        """Of a sequence's table, which may be longer than what the draft model was made for."""
        return -(-self._host.longest // self._host.config.block_size)

    @property
    def _captures(self) -> bool:
        return self._host.runs_triton and not self._host.config.enforce_eager

    def measure_step(self) -> int:
        host = self._host
        step = LargestStep(host.config.max_num_batched_tokens, self._num_seqs, self._max_rows, self._longest)
        with set_aside(self._runner):
            peak = measure_peak(self._runner, self._layout, host.platform, step, self._runner.execute)
            if self._captures and host.platform.max_profile_tokens is None:
                graphs = decode_graphs(self._runner, self._max_rows, self._max_blocks, host.platform)
                peak += measure_graphs(graphs, adapter_slot=-1)
        return peak

    def allocate(self, num_blocks: int) -> None:
        host, runner = self._host, self._runner
        slab = host.platform.memory("drafter_kv_cache", self._layout.pool_bytes(num_blocks), huge_pages=False)
        host.ledger.register("drafter_kv_cache", slab)
        runner.kv_caches = self._layout.caches(num_blocks, slab.carve)
        if self._captures:
            graphs = decode_graphs(runner, self._max_rows, self._max_blocks, host.platform)
            host.ledger.register("drafter_graphs", lambda: graphs.num_bytes, graphs.release)
            runner.decode_graphs = graphs
        elif host.platform.device.type == "cpu" and not host.config.enforce_eager:
            runner.decode_programs, workspace = decode_programs(
                runner, self._max_rows, self._max_blocks, host.platform, "drafter_workspace"
            )
            host.ledger.register("drafter_workspace", workspace)

    @torch.inference_mode()
    def propose(self, plan: DraftPlan) -> dict[str, list[int]]:
        """One forward pass over the known tokens of all sequences, and one for each further guess of the longest."""
        some = [(sequence, *self._within(sequence)) for sequence in plan.sequences if sequence.start < self._longest]
        if not some:
            return {}
        known = [ScheduledSequence(s.request_id, s.start, token_ids, s.block_ids) for s, token_ids, _ in some]
        logits, rows = self._runner.last_logits(known, [most > 0 for _, _, most in some])
        guessing = [_Guessing(sequence, most) for sequence, _, most in some if most]
        guesses = {one.sequence.request_id: one.token_ids for one in guessing}
        drawn_from = self._host.new_record()
        while guessing:
            sequences, ends = [one.sequence for one in guessing], [one.end for one in guessing]
            drawn = draw_guesses(logits, sequences, ends, self._host.inputs, rows, drawn_from)
            for one, token_id in zip(guessing, drawn, strict=True):
                one.token_ids.append(token_id)
            guessing = [one for one in guessing if one.goes_on]
            if guessing:
                logits, rows = self._runner.last_logits([one.last for one in guessing], [True] * len(guessing))
        self.distributions = stacked(drawn_from)
        return {request_id: before_failure(token_ids) for request_id, token_ids in guesses.items()}

    def _within(self, sequence: DraftSequence) -> tuple[list[int], int]:
        """The tokens at positions that the draft model was made for, and how many guesses they leave room for."""
        end = sequence.start + len(sequence.token_ids)
        most = max(0, min(sequence.num_drafts, self._longest - end + 1)) if end <= self._longest else 0
        return sequence.token_ids[: self._longest - sequence.start], most

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self._model.named_parameters())

    def tied(self) -> Mapping[str, str]:
        return self._model.tied_names

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return dict(self._model.named_buffers())


@dataclass(slots=True)
class _Guessing:
    """A sequence, and its guesses so far."""

    sequence: DraftSequence
    most: int
    token_ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position of the next guess."""
        return self.sequence.start + len(self.sequence.token_ids) + len(self.token_ids)

    @property
    def goes_on(self) -> bool:
        return len(self.token_ids) < self.most and self.token_ids[-1] != NOT_A_TOKEN

    @property
    def last(self) -> ScheduledSequence:
        """What has to be computed for the next guess: the last one."""
        return ScheduledSequence(self.sequence.request_id, self.end - 1, self.token_ids[-1:], self.sequence.block_ids)


def check_vocabulary(draft: CausalLM, folder: Path, host: DrafterHost) -> None:
    """Raises `ValueError`, saying what differs, where the draft model's token ids are not the target's."""
    name, size, wanted = str(folder), draft.shape.vocab_size, host.model.shape.vocab_size
    if size != wanted:
        raise ValueError(
            f"model={name!r} has a vocabulary of {size} tokens, the target one of {wanted}: they must be the same"
        )
    own, other = _token_ids(folder), _token_ids(Path(host.config.tokenizer or host.folder))
    if own is None or other is None or own == other:
        return
    differing = sorted(own.items() ^ other.items(), key=lambda entry: (entry[1], entry[0]))
    token, token_id = differing[0]
    mine = "has" if own.get(token) == token_id else "does not have"
    raise ValueError(
        f"model={name!r} has another vocabulary than the target: its tokenizer {mine} {token!r} as token {token_id} "
        f"({len(differing)} such differences)"
    )


def _token_ids(folder: Path) -> dict[str, int] | None:
    """Token -> id, of the tokenizer in a folder; None where there is none."""
    tokenizer = find_tokenizer(None, folder)
    return None if tokenizer is None else tokenizer.get_vocab()
