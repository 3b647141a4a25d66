"""Rows that are picked often: their gradients are summed in float32."""

from __future__ import annotations

import torch

from rollout.layers.gather import take_rows


def test_rows_are_picked_by_index_from_any_view():
    x = torch.arange(12.0).reshape(4, 3)[:, 1:]
    assert take_rows(x, torch.tensor([2, 0, 2])).tolist() == [[7.0, 8.0], [1.0, 2.0], [7.0, 8.0]]


def test_the_gradient_of_a_row_is_the_sum_over_its_copies():
    x = torch.randn(3, 2, requires_grad=True)
    (take_rows(x, torch.tensor([1, 1, 2])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0], [3.0, 3.0], [4.0, 4.0]]


def test_the_sum_is_not_rounded_to_bfloat16_on_the_way():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    copies = take_rows(x, torch.zeros(9, dtype=torch.int64))
    copies.backward(torch.tensor([[256.0]] + [[1.0]] * 8, dtype=torch.bfloat16))  # in bfloat16, 256 + 1 is 256
    assert x.grad is not None
    assert x.grad.item() == 264.0
