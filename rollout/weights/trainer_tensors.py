"""The policy of a real trainer as named tensors, one at a time, whatever it is wrapped in and however it is sharded.

    with rollout.policy_update() as update:
        update.load(policy_tensors(model))        every rank of the trainer runs this, together

`model` may be a plain module, a DDP, compiled, checkpointed, PEFT or accelerate-prepared one, an FSDP2 model or a
DeepSpeed engine (ZeRO 0 to 3), and any stack of these. Shards are gathered a bucket at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from rollout.weights.gather import SMALL_BYTES, gathered, gathered_bytes, reshard
from rollout.weights.gloo_threads import wait_for_gloo_at_exit
from rollout.weights.policy_weights import Weight, policy_weights
from rollout.weights.transport import NamedTensor

DEFAULT_BUCKET_BYTES = 256 << 20


class PolicyTensors(Iterator[NamedTensor]):
    """Iterates once over (Hugging Face name, whole tensor); `policy_tensors` makes it.

    A gathered tensor is valid until the next is asked for, and then becomes an empty one of shape (0,). Where the model
    is sharded, every rank must come to the end: by iterating, or by `close()`.
    """

    def __init__(self, weights: Sequence[Weight], max_bucket_bytes: int, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._buckets = deque(_buckets(weights, max_bucket_bytes))
        self._tensors = self._produce()
        self.shapes = {
            weight.name: weight.shape for weight in weights
        }  # of all that come, known before any is gathered

    def __next__(self) -> NamedTensor:
        return next(self._tensors)

    def close(self) -> None:
        """Takes part in the gathers that are left, without using what comes, so that other ranks can go on.

        For a rank that fails in the middle, and for one that has nobody to send to. An iterator that is dropped
        without it leaves the other ranks waiting, until the time limit of their process group. May be called twice.
        """
        self._tensors.close()
        while self._buckets:
            with gathered(_parameters(self._buckets.popleft())):
                pass

    def _produce(self) -> Generator[NamedTensor]:
        while self._buckets:
            yield from self._gather(self._buckets.popleft())

    def _gather(self, bucket: Sequence[Weight]) -> Generator[NamedTensor]:
        """The tensors of one bucket. What it held is free when it ends, before the next is gathered."""
        with gathered(_parameters(bucket)) as whole:
            for weight in bucket:
                tensor = weight.value(whole)
                if self._dtype is not None:
                    tensor = tensor.to(self._dtype)
                if not weight.is_sharded:
                    yield weight.name, tensor
                    continue
                lent = tensor.new_empty(0)
                lent.data = tensor  # no view, since a view would hold the whole bucket after its end
                del tensor
                yield weight.name, lent
                lent.data = lent.new_empty(0)  # whoever still has it sees that it is over


def policy_tensors(
    model: nn.Module, *, max_bucket_bytes: int = DEFAULT_BUCKET_BYTES, dtype: torch.dtype | None = None
) -> PolicyTensors:
    """The weights that `model` trains, merged with its active LoRA adapters; its own tensors stay as they are.

    Tensors come in the parameters' dtype, or in `dtype`; those of an unsharded model are its own memory where nothing
    is merged or cast. Tied weights come once. At most `max_bucket_bytes` are gathered at a time (or one weight, where
    it is larger); on top of it stands what is made of the weight at hand: merging needs it once in float32.

    Collective where the model is sharded: every rank calls it with the same arguments and iterates to the end or calls
    `close()`. Everything that can be wrong with the model is found here, before the first gather, on all ranks alike:
    raises `ValueError`, `AdapterTensorError`, `TensorKindError` or `UnknownTensorError`, naming the wrapper or tensor.
    """
    if isinstance(max_bucket_bytes, bool) or not isinstance(max_bucket_bytes, int) or max_bucket_bytes < 1:
        raise ValueError(f"max_bucket_bytes={max_bucket_bytes!r} is not valid: it must be a positive integer")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} is not valid: it must be a floating-point dtype, or None")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is not valid: a {type(model).__name__} is no torch module")
    reshard(model)
    if dist.is_available() and dist.is_initialized():
        wait_for_gloo_at_exit()
    return PolicyTensors(policy_weights(model), max_bucket_bytes, dtype)


def _buckets(weights: Sequence[Weight], limit: int) -> Iterator[list[Weight]]:
    """Consecutive weights whose gathered parameters, and a copy of the largest small one, take at most `limit` bytes.

    The copy is what FSDP2's gather makes of a part of its buffer, unless the buffer holds that parameter alone.
    """
    bucket: list[Weight] = []
    total, copied, count = 0, 0, 0
    for weight in weights:
        sizes = [gathered_bytes(parameter) for parameter in weight.parameters]
        small = max((size for size in sizes if size <= SMALL_BYTES), default=0)
        total, copied, count = total + sum(sizes), max(copied, small), count + len(sizes)
        if bucket and total + (copied if count > 1 else 0) > limit:
            yield bucket
            bucket, total, copied, count = [], sum(sizes), small, len(sizes)
        bucket.append(weight)
    if bucket:
        yield bucket


def _parameters(bucket: Sequence[Weight]) -> list[torch.Tensor]:
    return [parameter for weight in bucket for parameter in weight.parameters]
