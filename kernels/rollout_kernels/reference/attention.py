"""Causal attention over the paged cache, one query at a time in float64, and its backward over packed sequences."""

from __future__ import annotations

from itertools import pairwise

import torch

from rollout_kernels.kv_cache import KVCache
from rollout_kernels.reference.kv_cache import read_kv, sequence_slots
from rollout_kernels.reference.reduce import accumulation_dtype, row_sum


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, soft_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query [Hkv, G, D] against all of k and v [Hkv, n, D]: out [Hkv, G, D], lse [Hkv, G], probabilities."""
    scores = row_sum(q[:, :, None, :] * k[:, None, :, :]) * scale  # [Hkv, G, n]
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    maximum = scores.amax(-1, keepdim=True)
    exponentials = (scores - maximum).exp()
    total = row_sum(exponentials)
    probabilities = exponentials / total[..., None]
    out = row_sum(probabilities[:, :, None, :] * v.transpose(1, 2)[:, None, :, :])
    return out, maximum[..., 0] + total.log(), probabilities


def paged_attention(
    q: torch.Tensor,
    cache: KVCache,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    scale: float,
    return_lse: bool,
    window: int | None,
    soft_cap: float | None,
    last_places: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_heads, num_kv_heads, head_dim = q.shape[1], cache.keys.shape[1], q.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
    starts = query_start.tolist()
    for sequence, num_keys in enumerate(seq_lens.tolist()):
        slots = sequence_slots(block_tables[sequence], num_keys, block_size)
        if last_places is not None and int(last_places[sequence]) >= 0:
            slots[-1] = sequence_slots(block_tables[sequence], int(last_places[sequence]) + 1, block_size)[-1]
        keys, values = (part.double().transpose(0, 1) for part in read_kv(cache, slots, head_dim))
        first, end = starts[sequence], starts[sequence + 1]
        for token in range(first, end):
            visible = num_keys - (end - 1 - token)
            oldest = 0 if window is None else max(visible - window, 0)
            query = q[token].double().view(num_kv_heads, num_heads // num_kv_heads, head_dim)
            value, log_total, _ = _attend(query, keys[:, oldest:visible], values[:, oldest:visible], scale, soft_cap)
            out[token] = value.reshape(num_heads, head_dim).to(q.dtype)
            lse[token] = log_total.reshape(num_heads).to(lse.dtype)
    return out, lse if return_lse else None


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v in their dtypes, each sequence by itself, in float64."""
    num_kv_heads = k.shape[1]
    grads = [torch.zeros(tensor.shape, dtype=torch.float64, device=q.device) for tensor in (q, k, v)]
    starts = query_start.tolist()
    for first, end in pairwise(starts):
        length = end - first
        unseen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        if window is not None:
            unseen |= ~torch.ones_like(unseen).triu(1 - window)
        for head in range(q.shape[1]):
            kv_head = head * num_kv_heads // q.shape[1]
            queries, outputs, g = (tensor[first:end, head].double() for tensor in (q, out, grad))
            keys, values = (tensor[first:end, kv_head].double() for tensor in (k, v))
            scores = queries @ keys.T * scale
            slope = None
            if soft_cap is not None:
                capped = (scores / soft_cap).tanh()
                scores, slope = soft_cap * capped, 1 - capped.square()
            probabilities = (scores.masked_fill(unseen, -torch.inf) - lse[first:end, head, None].double()).exp()
            delta = (g * outputs).sum(-1, keepdim=True)
            grad_scores = probabilities * (g @ values.T - delta) * scale
            if slope is not None:
                grad_scores *= slope
            grads[0][first:end, head] = grad_scores @ keys
            grads[1][first:end, kv_head] += grad_scores.T @ queries
            grads[2][first:end, kv_head] += probabilities.T @ g
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
