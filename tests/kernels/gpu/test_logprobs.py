"""The Triton `token_logprobs` and its gradient, in the interpreter."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import rollout_kernels as rk
from rollout_kernels.dispatch import use_kernels
from rollout_kernels.gpu.logprobs import token_logprobs, token_logprobs_backward
from tests.support.kernels import TOLERANCE, assert_close, assert_same_bits, randn, rows_apart

KERNELS = SimpleNamespace(name="triton", token_logprobs=token_logprobs, token_logprobs_backward=token_logprobs_backward)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """`torch.empty` gives NaN, and the largest integers, instead of what lay in memory."""
    torch.use_deterministic_algorithms(True)
    try:
        with use_kernels(KERNELS):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1, 131, 4096, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_float64(size: int, temperature: float) -> None:
    rows = 3
    logits = randn(rows, size, seed=size, scale=4.0) + 30.0
    token_ids = torch.randint(0, size, (rows,))
    logprobs, entropy = rk.token_logprobs_and_entropy(rows_apart(logits), token_ids, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected[torch.arange(rows), token_ids], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=2e-6, atol=2e-6)


def test_many_light_tokens_count() -> None:
    """Half of the mass lies in tokens that each weigh 1e-5 of the heaviest: nothing is lost in the integers."""
    logits = torch.full((1, 100_000), -11.512925464970229)  # log(1e-5)
    logits[0, 70_000] = 0.0
    logprobs, entropy = rk.token_logprobs_and_entropy(logits, torch.tensor([70_000]))
    exact = logits.double().log_softmax(-1)
    assert abs(logprobs.double() - exact[0, 70_000]).item() < 3e-7
    assert abs(entropy.double() + (exact.exp() * exact).sum()).item() < 3e-6


def test_a_row_does_not_depend_on_its_neighbours_or_its_place_in_memory() -> None:
    logits, token_ids = randn(5, 4100, seed=2), torch.arange(5) * 1000
    temperatures = torch.linspace(0.5, 1.5, 5)
    whole, entropy = rk.token_logprobs_and_entropy(logits, token_ids, temperatures)
    for row in range(5):
        part, heat = slice(row, row + 1), temperatures[row].item()
        alone = rk.token_logprobs_and_entropy(rows_apart(logits)[part], token_ids[part], heat)
        assert_same_bits(alone[0], whole[part])
        assert_same_bits(alone[1], entropy[part])


def test_rows_that_are_not_numbers_give_nan_and_impossible_tokens_minus_infinity() -> None:
    logits = torch.zeros(4, 40)
    logits[0, 39], logits[1, 0], logits[2], logits[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logprobs, entropy = rk.token_logprobs_and_entropy(logits, torch.full((4,), 7))
    assert logprobs[:3].isnan().all()
    assert entropy[:3].isnan().all()
    assert logprobs[3] == -torch.inf
    assert abs(entropy[3].item() - torch.tensor(39.0).log().item()) < 1e-5


def test_wrong_values_on_the_host_are_named() -> None:
    logits = randn(2, 9)
    with pytest.raises(ValueError, match=r"token_ids\[1\]=9 is not in the vocabulary \(0 to 8\)"):
        rk.token_logprobs(logits, torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"temperature=0\.0 \(row 0\) is not valid"):
        rk.token_logprobs(logits, torch.tensor([0, 1]), 0.0)
    with pytest.raises(ValueError, match=r"temperature=nan \(row 1\)"):
        rk.token_logprobs(logits, torch.tensor([0, 1]), torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match=r"logits has 262145 columns: the Triton kernels take up to 262144"):
        rk.token_logprobs(torch.empty(1, 262_145), torch.tensor([0]))


def test_wrong_values_on_the_device_give_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does not see is masked, beside rows that are right."""
    monkeypatch.setattr("rollout_kernels.checks.logprob_values", lambda *arguments: None)
    logits, heat = randn(4, 9), torch.tensor([1.0, 1.0, 0.0, torch.nan])
    logprobs = rk.token_logprobs(logits, torch.tensor([3, 9, 1, 1]), heat)
    assert logprobs.isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_equals_float64(dtype: torch.dtype) -> None:
    logits, grad = randn(3, 4101, seed=3, scale=2.0), randn(3, seed=4)
    token_ids = torch.tensor([0, 4100, 77])
    actual = token_logprobs_backward(logits, token_ids, 0.8, grad, dtype)
    exact = logits.double().requires_grad_()
    (exact / 0.8).log_softmax(-1)[torch.arange(3), token_ids].backward(grad.double())
    assert exact.grad is not None
    assert actual.dtype is dtype
    tolerance = {torch.float16: 2**-10} | TOLERANCE
    assert_close(actual, exact.grad, tolerance[dtype])
    alone = token_logprobs_backward(logits[1:2], token_ids[1:2], torch.tensor([0.8]), grad[1:2], dtype)
    assert_same_bits(alone, actual[1:2])


def test_gradient_through_the_public_operation_and_rows_without_a_distribution() -> None:
    logits = randn(2, 40, seed=5)
    logits[1, 3] = torch.nan
    logits.requires_grad_()
    rk.token_logprobs(logits, torch.tensor([4, 5]))[0].backward()
    exact = logits.detach()[:1].double().requires_grad_()
    exact.log_softmax(-1)[0, 4].backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert_close(logits.grad[:1], exact.grad, 2e-6)
    assert logits.grad[1].isnan().all()
