"""Gradients of packed attention against float64, and the same bits for a sequence alone and beside others."""

from itertools import pairwise

import pytest
import torch

from rollout_kernels.gpu.attention_backward import attention_backward
from tests.kernels.gpu.paged import exact_attention
from tests.support.kernels import assert_close, assert_same_bits, randn, rows_apart
from tests.support.triton_kernels import poisoned_memory

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 8e-3, torch.float32: 2e-5}


class Packed:
    """Random packed sequences, their forward in float64, and `grad`, a gradient of the output."""

    def __init__(
        self,
        lengths: list[int],
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.window, self.soft_cap = window, soft_cap
        self.scale = head_dim**-0.5
        self.lengths = lengths
        self.query_start = torch.tensor([0, *lengths]).cumsum(0).int()
        counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
        self.q, self.k, self.v, self.grad = (
            randn(sum(lengths), count, head_dim, dtype=dtype, seed=seed) for seed, count in enumerate(counts)
        )
        parts = [self._forward(*(x[a:b] for x in (self.q, self.k, self.v))) for a, b in pairwise(self.starts())]
        self.out = torch.cat([out for out, _ in parts]).to(dtype)
        self.lse = torch.cat([lse for _, lse in parts]).float()

    def starts(self) -> list[int]:
        return self.query_start.tolist()

    def _forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return exact_attention(q, k, v, self.scale, self.window, self.soft_cap)

    def backward(self, rows: slice = slice(None), query_start: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The kernels' gradients of these rows, q, k and v being views with gaps between their rows."""
        q, k, v = (rows_apart(x[rows]) for x in (self.q, self.k, self.v))
        starts = self.query_start if query_start is None else query_start
        return attention_backward(
            *(self.grad[rows], q, k, v, self.out[rows], self.lse[rows], starts, self.scale, self.window, self.soft_cap)
        )

    def exact(self) -> tuple[torch.Tensor, ...]:
        """Gradients in float64 by torch's autograd, of the float64 forward of the same inputs."""
        inputs = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        parts = [self._forward(*(x[a:b] for x in inputs))[0] for a, b in pairwise(self.starts())]
        return torch.autograd.grad(torch.cat(parts), inputs, self.grad.double())


@pytest.mark.parametrize("heads", [(3, 1, 64), (4, 4, 24), (7, 1, 80), (4, 2, 128), (2, 1, 256), (2, 1, 7)])
def test_gradients_equal_float64_for_head_sizes_and_groups(heads: tuple[int, int, int]) -> None:
    packed = Packed([1, 20], heads, torch.bfloat16)
    for actual, expected in zip(packed.backward(), packed.exact(), strict=True):
        assert actual.dtype == torch.bfloat16 and actual.is_contiguous()
        assert_close(actual, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_equal_float64_at_the_ends_of_blocks(dtype: torch.dtype) -> None:
    packed = Packed([1, 63, 64, 65, 2, 130], (3, 1, 16), dtype)
    for actual, expected in zip(packed.backward(), packed.exact(), strict=True):
        assert_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "soft_cap"), [(2, None), (20, None), (64, 3.0), (None, 1.5), (129, None)])
def test_gradients_under_windows_and_soft_caps_equal_float64(window: int | None, soft_cap: float | None) -> None:
    packed = Packed([3, 130], (2, 1, 16), torch.float32, window, soft_cap)
    with poisoned_memory():
        found = packed.backward()
    for actual, expected in zip(found, packed.exact(), strict=True):
        assert_close(actual, expected, TOLERANCE[torch.float32])
    alone = packed.backward(slice(3, 133), torch.tensor([0, 130]).int())
    for a, b in zip(alone, found, strict=True):
        assert_same_bits(a, b[3:])


def test_a_window_that_hides_nothing_changes_no_bit() -> None:
    packed, windowed = (Packed([5, 70], (2, 1, 16), torch.bfloat16, window) for window in (None, 70))
    for a, b in zip(packed.backward(), windowed.backward(), strict=True):
        assert_same_bits(a, b)


def test_a_sequence_has_the_same_gradients_alone_and_beside_others() -> None:
    packed = Packed([5, 70, 1, 40], (4, 2, 16), torch.bfloat16)
    together = packed.backward()
    for first, end in pairwise(packed.starts()):
        alone = packed.backward(slice(first, end), torch.tensor([0, end - first]).int())
        for a, b in zip(alone, together, strict=True):
            assert_same_bits(a, b[first:end])


def test_empty_sequences_and_rows_after_the_last_get_zeros_and_change_nothing() -> None:
    packed = Packed([30, 0, 9, 0], (2, 1, 16), torch.float32)
    expected = packed.backward()
    extra = Packed([30, 0, 9, 11], (2, 1, 16), torch.float32)
    for name in ("q", "k", "v", "grad", "out", "lse"):
        tensor = getattr(extra, name)
        tensor[:39], tensor[39:] = getattr(packed, name), torch.nan
    padded = extra.backward(query_start=packed.query_start)
    for a, b in zip(padded, expected, strict=True):
        assert_same_bits(a[:39], b)
        assert a[39:].eq(0).all()


def test_a_head_size_that_no_configuration_serves_is_refused() -> None:
    packed = Packed([2], (1, 1, 257), torch.float32)
    with pytest.raises(ValueError, match="head_dim=257 is not valid"):
        packed.backward()
