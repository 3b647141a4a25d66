"""`token_logprobs` and its gradient."""

import pytest
import torch

import rollout_kernels as rk
from tests.support.kernels import BACKENDS, assert_close, assert_same_bits, num_threads, randn, rows_apart


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 15, 131, 49_152])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_float64(backend: str, size: int, temperature: float) -> None:
    logits = randn(9, size, seed=1, scale=4.0) + 30.0
    token_ids = torch.randint(0, size, (9,), generator=torch.Generator().manual_seed(0))
    with rk.use_backend(backend):
        logprobs, entropy = rk.token_logprobs_and_entropy(rows_apart(logits), token_ids, temperature)
    expected = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected[torch.arange(9), token_ids], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours_or_threads(backend: str) -> None:
    rows = 33 if backend == "cpu" else 7
    logits, token_ids = randn(rows, 40_003, seed=2), torch.arange(rows) * 1000
    temperatures = torch.linspace(0.5, 1.5, rows)
    with rk.use_backend(backend):
        whole = rk.token_logprobs(logits, token_ids, temperatures)
        for count in (1, 2):
            with num_threads(count):
                assert_same_bits(rk.token_logprobs(logits, token_ids, temperatures), whole)
                alone = []
                for i in range(rows):
                    row = slice(i, i + 1)
                    alone.append(rk.token_logprobs(logits[row], token_ids[row], temperatures[i].item()))
                assert_same_bits(torch.cat(alone), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_numbers_give_nan_and_impossible_tokens_minus_infinity(backend: str) -> None:
    logits = torch.zeros(4, 40)
    logits[0, 39], logits[1, 0], logits[2], logits[3, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    with rk.use_backend(backend):
        logprobs, entropy = rk.token_logprobs_and_entropy(logits, torch.full((4,), 7))
    assert logprobs[:3].isnan().all()
    assert entropy[:3].isnan().all()
    assert logprobs[3] == -torch.inf
    assert abs(entropy[3].item() - torch.tensor(39.0).log().item()) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_values_are_named(backend: str) -> None:
    logits = randn(2, 9)
    with rk.use_backend(backend):
        with pytest.raises(ValueError, match=r"token_ids\[1\]=9 is not in the vocabulary \(0 to 8\)"):
            rk.token_logprobs(logits, torch.tensor([0, 9]))
        with pytest.raises(ValueError, match=r"temperature=0\.0 \(row 0\) is not valid"):
            rk.token_logprobs(logits, torch.tensor([0, 1]), 0.0)
        with pytest.raises(ValueError, match=r"temperature=nan \(row 1\)"):
            rk.token_logprobs(logits, torch.tensor([0, 1]), torch.tensor([1.0, torch.nan]))
        with pytest.raises(TypeError, match=r"token_ids is torch\.int32"):
            rk.token_logprobs(logits, torch.tensor([0, 1]).int())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_equals_float64(backend: str) -> None:
    logits = randn(5, 131, seed=3, scale=2.0).requires_grad_()
    token_ids, grad = torch.tensor([0, 130, 5, 5, 77]), randn(5, seed=4)
    with rk.use_backend(backend):
        rk.token_logprobs(logits, token_ids, 0.8).backward(grad)
    exact = logits.detach().double().requires_grad_()
    (exact / 0.8).log_softmax(-1)[torch.arange(5), token_ids].backward(grad.double())
    assert logits.grad is not None
    assert exact.grad is not None
    assert_close(logits.grad, exact.grad, 2e-6)
