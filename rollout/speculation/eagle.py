"""EAGLE (Li et al., 2024): one layer that guesses the model's next hidden state, and with it the next token.

    token p, feature p - 1 ─► fc ─► layer, over keys of its own ─► feature p, guessed ─► the model's head ─► token p + 1
                  ▲                                                      │                                    │
                  └──────────────── feeds back for the next guess ───────┴────────────────────────────────────┘

A feature is the model's final, normed hidden state. The layer's keys and values of the pair (token p, feature p - 1)
lie in slot p of its pool, so that what a block holds depends on the tokens up to its end alone, as prefix caching
wants it. The first token has no feature before it and makes no pair: slot 0 takes no part in the attention (see
`EagleAttention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import rollout_kernels
from rollout.core.schedule import DraftPlan, DraftSequence
from rollout.layers.linear import Linear, MergedLinear
from rollout.layers.norm import RMSNorm
from rollout.layers.rotary import RotaryEmbedding
from rollout.models.causal_lm import CausalLM
from rollout.models.llama import LlamaConfig, LlamaMLP
from rollout.models.loader import read_config
from rollout.speculation.checkpoint import (
    drafter_tensors,
    load_drafter,
    read_drafter_config,
    resolve_drafter,
    take_memory,
)
from rollout.speculation.config import MOST_DRAFTS
from rollout.speculation.features import slots_per_block
from rollout.speculation.guesses import before_failure, draw_guesses, stacked
from rollout.speculation.model_drafter import DrafterHost
from rollout.worker.batch import ForwardBatch, KVCaches, LastRows, PagedContext

_EMBEDDING = "embed_tokens.weight"
_MARGIN = 16  # dimensions: kernels like heads of a multiple of this
_FAR_BELOW = -1e6  # the score of what must not be seen


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The layer is one of Llama's, without the norm before its attention."""

    layer: LlamaConfig
    has_bias: bool  # of `fc`

    @classmethod
    def of_folder(cls, folder: Path, tensors: Mapping[str, torch.Tensor], model: CausalLM) -> EagleConfig:
        """From a checkpoint's `config.json`. Raises `ValueError` for what is not EAGLE's first kind, or not for this
        model."""
        fields = read_drafter_config(folder)
        if "medusa_num_heads" in fields:
            raise ValueError(f"model={str(folder)!r} is not valid with method='eagle': it holds heads of Medusa")
        newer = [name for name in ("d2t", "t2d", "midlayer.hidden_norm.weight") if name in tensors]
        if "draft_vocab_size" in fields or newer:
            what = f"tensor {newer[0]!r}" if newer else "'draft_vocab_size'"
            raise ValueError(
                f"model={str(folder)!r} is not supported: it has {what}, as EAGLE-3 does, and method='eagle' is for "
                "the layers of EAGLE and EAGLE-2"
            )
        layer = layer_of_folder(folder)
        if layer.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers={layer.num_hidden_layers} in {str(folder)!r} is not supported: it must be 1"
            )
        vocab_size, hidden_size = model.output_weight.shape
        for field, value, size in (
            ("vocab_size", layer.vocab_size, vocab_size),
            ("hidden_size", layer.hidden_size, hidden_size),
        ):
            if value != size:
                raise ValueError(f"{field}={value} in {str(folder)!r} is not valid: the model has {size}")
        # The table of angles reaches as far as the model's sequences and the guesses behind them.
        longest = model.shape.max_position_embeddings + MOST_DRAFTS
        return cls(replace(layer, max_position_embeddings=longest), _has_bias(fields, tensors, folder))


def layer_of_folder(folder: Path) -> LlamaConfig:
    """The layer that a `config.json` describes. Raises `ValueError` naming the folder for one that cannot be."""
    config = read_config(folder)
    try:
        layer = LlamaConfig.from_pretrained_config(config)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"the config.json in {str(folder)!r} is not valid: {reason}") from error
    for field, value in (
        ("num_attention_heads", layer.num_attention_heads),
        ("num_key_value_heads", layer.num_key_value_heads),
        ("head_dim", layer.head_dim),
        ("intermediate_size", layer.intermediate_size),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{field}={value!r} in {str(folder)!r} is not valid: it must be an integer of at least 1")
    eps = layer.rms_norm_eps
    if not isinstance(eps, int | float) or not 0 < eps < math.inf:
        raise ValueError(f"rms_norm_eps={eps!r} in {str(folder)!r} is not valid: it must be a finite number above 0")
    return layer


def _has_bias(fields: Mapping[str, object], tensors: Mapping[str, torch.Tensor], folder: Path) -> bool:
    """Whether `fc` has a bias. Raises `ValueError` where "bias" says something else than the tensors do."""
    has_bias = "fc.bias" in tensors
    if fields.get("bias", has_bias) is not has_bias:
        there = "a tensor" if has_bias else "no tensor"
        raise ValueError(f"bias={fields['bias']!r} in {str(folder)!r} is not valid: there is {there} 'fc.bias' in it")
    return has_bias


class EagleAttention(nn.Module):
    """Causal attention over the pairs of a sequence, those from position 1 on.

    In the pool queries and keys are wider than a head by `_MARGIN` dimensions, of which the first is 1 in all queries,
    0 in the keys of pairs, and so far below in slot 0 that its weight vanishes.
    """

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = head_dim**-0.5
        self.q_proj = Linear(hidden, self.num_heads * head_dim, dtype, bias)
        self.k_proj = Linear(hidden, self.num_kv_heads * head_dim, dtype, bias)
        self.v_proj = Linear(hidden, self.num_kv_heads * head_dim, dtype, bias)
        self.o_proj = Linear(self.num_heads * head_dim, hidden, dtype, bias, out_dtype=torch.float32)
        self.qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.rotary = (rotary,)  # registered once, in EagleModel

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, only: LastRows | None
    ) -> torch.Tensor:
        """x: [T, hidden] in the model's dtype -> float32 [T, hidden], or [R, hidden] with `only` R rows."""
        q, k, v = self.rotary[0].project(self.qkv, x, positions, self.num_heads, self.num_kv_heads)
        paged = batch.paged
        if paged is None:
            return self.o_proj(rollout_kernels.varlen_attention(q, k, v, batch.query_start, self.scale).flatten(1))
        head_dim = q.shape[-1]
        q, k, v = (nn.functional.pad(part, (0, _MARGIN)) for part in (q, k, v))
        q[..., head_dim] = 1
        is_first = positions == 0
        k.masked_fill_(is_first[:, None, None], 0)
        v.masked_fill_(is_first[:, None, None], 0)
        k[..., head_dim] = is_first.to(k.dtype)[:, None] * (_FAR_BELOW / self.scale)
        cache = paged.kv_caches[0]
        rollout_kernels.write_kv(k, v, cache, paged.slot_mapping)
        query_start = batch.query_start
        if only is not None:
            q, query_start = q[only.rows], only.query_start
        out = rollout_kernels.paged_attention(
            q, cache, paged.block_tables, query_start, paged.seq_lens, paged.block_size, self.scale
        )
        assert isinstance(out, torch.Tensor)  # a pair only where the log-sum-exp is asked for
        return self.o_proj(out[..., :head_dim].flatten(1))


class EagleLayer(nn.Module):
    def __init__(self, config: LlamaConfig, dtype: torch.dtype, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = EagleAttention(config, dtype, rotary)
        self.mlp = LlamaMLP(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, only: LastRows | None = None
    ) -> torch.Tensor:
        """x: float32 [T, hidden] -> the same of the next layer, of all rows or of `only` some."""
        dtype = self.post_attention_layernorm.weight.dtype
        attended = self.self_attn(x.to(dtype), positions, batch, only)
        normed, summed = self.post_attention_layernorm(attended, x if only is None else x[only.rows])
        return summed + self.mlp(normed)


class EagleModel(nn.Module):
    """Parameters are named as in the published checkpoints. The embedding and the output head are the model's."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype) -> None:
        super().__init__()
        layer = config.layer
        self.config = config
        self.fc = Linear(2 * layer.hidden_size, layer.hidden_size, dtype, config.has_bias, out_dtype=torch.float32)
        self.rotary = RotaryEmbedding(layer.rope, layer.head_dim, layer.max_position_embeddings)
        self.layers = nn.ModuleList([EagleLayer(layer, dtype, self.rotary)])

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """embedded: float32 [T, hidden] of the tokens at `positions`; features: [T, hidden] of those before them.

        Returns guesses of the tokens' own features in the same dtype, [T, hidden], or [R, hidden] of `batch.last_rows`.
        """
        x = self.fc(torch.cat([embedded.to(features.dtype), features], dim=-1))
        return self.layers[0](x, positions, batch, batch.last_rows).to(features.dtype)


def eagle_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint by the names of `EagleModel`'s parameters. Raises `ValueError` where there is none.

    Its copy of the embedding is left out: the layer reads the model's, which training may change.
    """
    return {name: tensor for name, tensor in drafter_tensors(folder) if name != _EMBEDDING}


def read_eagle(folder: Path, model: CausalLM) -> tuple[EagleConfig, dict[str, torch.Tensor]]:
    """The configuration of a folder's layer for `model`, and its tensors.

    Raises `ValueError` where there is no layer, or that of another model.
    """
    tensors = eagle_tensors(folder)
    return EagleConfig.of_folder(folder, tensors, model), tensors


class EagleDrafter:
    """Guesses with EAGLE's layer; see `rollout.speculation.model_drafter.ModelDrafter`."""

    has_kv = True
    needs_features = True

    def __init__(self, host: DrafterHost) -> None:
        """Raises `ValueError` for a folder without a layer for the host's model, and for a model without `embed`."""
        assert host.speculative.model is not None
        if type(host.model).embed is CausalLM.embed:
            raise ValueError(
                f"method='eagle' is not valid for {type(host.model).__name__}: it has no `embed` (see `CausalLM`); use "
                "another method"
            )
        self.distributions: dict[str, torch.Tensor] | None = None
        self.kv_caches: KVCaches = []
        self._host = host
        self._block_size = host.config.block_size
        self._folder = resolve_drafter(host.speculative.model)
        config, _ = read_eagle(self._folder, host.model)
        with torch.device("meta"):
            self.eagle = EagleModel(config, host.dtype)
        take_memory(self.eagle, host)

    @property
    def module(self) -> nn.Module:
        return self.eagle

    @property
    def block_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self._cache_shapes(1)) * self._host.dtype.itemsize

    def _cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        layer = self.eagle.config.layer
        return rollout_kernels.kv_cache_shapes(
            num_blocks,
            self._block_size,
            layer.num_key_value_heads,
            layer.head_dim + _MARGIN,
            self._host.dtype,
            self._host.kv_layout,
        )

    def load(self, on_tensor: Callable[[str], None] | None = None) -> None:
        """Reads the checkpoint (again), into the tensors that are there."""
        load_drafter(self.eagle, read_eagle(self._folder, self._host.model)[1], self._folder, on_tensor)

    def measure_step(self) -> int:
        """What the widest tensors of a catch-up of `max_num_batched_tokens` take together, and the logits of a guess
        of each sequence."""
        host, layer = self._host, self.eagle.config.layer
        attention = layer.head_dim * (2 * layer.num_attention_heads + 2 * layer.num_key_value_heads)
        per_token = 4 * (5 * layer.hidden_size + 3 * layer.intermediate_size + 2 * attention)
        logits = 4 * layer.vocab_size * host.speculative.max_batch_for_speculation
        return host.config.max_num_batched_tokens * per_token + logits

    def allocate(self, num_blocks: int) -> None:
        """Takes memory for the layer's keys and values."""
        host = self._host
        slab = host.platform.memory("drafter_kv_cache", num_blocks * self.block_bytes + 128, huge_pages=False)
        host.ledger.register("drafter_kv_cache", slab)
        keys, values = (slab.carve(shape, host.dtype) for shape in self._cache_shapes(num_blocks))
        self.kv_caches = [rollout_kernels.KVCache(keys, values)]

    @torch.inference_mode()
    def propose(self, plan: DraftPlan) -> dict[str, list[int]]:
        """The keys of all tokens of the plan, and `num_drafts` guesses one after the other."""
        if not plan.sequences:
            return {}
        features = self._catch_up(plan.sequences)  # of the last known token of those that guess
        active = [sequence for sequence in plan.sequences if sequence.num_drafts]
        guesses: dict[str, list[int]] = {sequence.request_id: [] for sequence in active}
        drawn_from = self._host.new_record()
        ahead = 0
        while active:
            ends = [sequence.start + len(sequence.token_ids) + ahead for sequence in active]
            logits = self._host.model.compute_logits(features)
            drawn = draw_guesses(logits, active, ends, self._host.inputs, drawn_from=drawn_from)
            for sequence, token_id in zip(active, drawn, strict=True):
                guesses[sequence.request_id].append(token_id)
            ahead += 1
            goes_on = [
                index
                for index, (sequence, token_id) in enumerate(zip(active, drawn, strict=True))
                if sequence.num_drafts > ahead and token_id >= 0
            ]
            if not goes_on:
                break
            features = self._next(active, drawn, ends, features, goes_on)
            active = [active[index] for index in goes_on]
        self.distributions = stacked(drawn_from)
        return {request_id: before_failure(token_ids) for request_id, token_ids in guesses.items()}

    def _catch_up(self, sequences: Sequence[DraftSequence]) -> torch.Tensor:
        """Computes the known tokens of each; the guessed features [R, hidden] of the last ones of those that guess."""
        counts = np.array([len(sequence.token_ids) for sequence in sequences])
        starts = np.array([sequence.start for sequence in sequences])
        token_ids = np.fromiter((t for sequence in sequences for t in sequence.token_ids), np.int64, int(counts.sum()))
        before = [  # at position 0 there is no feature before; any will do, since its keys are not used
            np.maximum(np.arange(sequence.start, sequence.start + count) - 1, 0)
            for sequence, count in zip(sequences, counts.tolist(), strict=True)
        ]
        features = self._host.features().read([sequence.target_block_ids for sequence in sequences], before)
        guessing = np.array([sequence.num_drafts > 0 for sequence in sequences])
        return self._forward(sequences, token_ids, starts, counts, features, guessing)

    def _next(
        self,
        sequences: Sequence[DraftSequence],
        token_ids: Sequence[int],
        positions: Sequence[int],
        features: torch.Tensor,
        chosen: Sequence[int],
    ) -> torch.Tensor:
        """Computes the guess of each chosen sequence with its guessed feature."""
        index = np.array(chosen)
        (rows,) = self._host.inputs.send([index])
        some = [sequences[place] for place in chosen]
        ones = np.ones(len(chosen), np.int64)
        return self._forward(
            some, np.array(token_ids)[index], np.array(positions)[index], ones, features[rows], ones > 0
        )

    def _forward(
        self,
        sequences: Sequence[DraftSequence],
        token_ids: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        features: torch.Tensor,
        guessing: np.ndarray,
    ) -> torch.Tensor:
        """Runs the layer over `counts[i]` tokens from position `starts[i]` of each sequence, with the features before
        them. Returns the guessed features of the last tokens where `guessing`, [R, hidden]."""
        ends = counts.cumsum()
        owner = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(len(token_ids)) + (starts - (ends - counts))[owner]
        tables = np.zeros((len(sequences), max(len(sequence.block_ids) for sequence in sequences)), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.block_ids)] = sequence.block_ids
        blocks = tables[owner, positions // self._block_size].astype(np.int64)
        slots = blocks * slots_per_block(self._block_size) + positions % self._block_size
        query_start = np.concatenate([[0], ends]).astype(np.int32)
        last_start = np.concatenate([[0], guessing.cumsum()]).astype(np.int32)
        ids, places, slot_mapping, block_tables, keys, first, last, last_first = self._host.inputs.send(
            [
                token_ids,
                positions,
                slots,
                tables,
                (starts + counts).astype(np.int32),
                query_start,
                (ends - 1)[guessing],
                last_start,
            ]
        )
        paged = PagedContext(self.kv_caches, block_tables, keys, slot_mapping, self._block_size)
        batch = ForwardBatch(first, paged=paged, last_rows=LastRows(last, last_first))
        return self.eagle(self._host.model.embed(ids), features, places, batch)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self.eagle.named_parameters())

    def tied(self) -> Mapping[str, str]:
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return dict(self.eagle.named_buffers())
