"""Every algorithm on episodes, which hold tokens that the policy did not sample: the gradient of the whole model is
that of the paper's loss over the policy's tokens, by transformers and torch's own autograd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout import LLM
from rollout_trainers.credit import assign_advantages
from rollout_trainers.loss_config import LossSection
from rollout_trainers.losses import Denominators
from rollout_trainers.objective import micro_batch_loss
from rollout_trainers.packing import pack_micro_batches
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.types import Sample
from tests.support.oracle import load_reference
from tests.support.paper_losses import FORMULAS, GROUP_SIZE, MAX_TOKENS, REWARDS, samples
from tests.support.tiny import make_tiny_llama

TEMPERATURE = 0.7
GIVEN = [11, 2, 2, 12]  # what an environment says between two turns; EOS and the padding's id are among it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module")
def policy(folder: Path) -> SharedPolicy:
    return SharedPolicy(LLM(folder, dtype="float32", kv_cache_memory="1 MiB").shared_model(), TEMPERATURE)


def episodes() -> list[Sample]:
    """The papers' samples with turns of one, two, three, ... tokens, and given ones between them."""
    made = samples()
    for sample in made:
        tokens, mask = [], []
        for place, token in enumerate(sample.completion_token_ids):
            if place in (1, 3):
                tokens += GIVEN
                mask += [False] * len(GIVEN)
            tokens.append(token)
            mask.append(True)
        sample.completion_token_ids, sample.loss_mask = tokens, np.array(mask, np.bool_)
    return made


def gradients_by_us(
    policy: SharedPolicy, of: Sequence[Sample], section: LossSection, budget: int, ranks: int = 1
) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed over the micro-batches of `ranks` trainers, each with every `ranks`-th sample."""
    denominators = Denominators(sum(sample.num_tokens for sample in of), len(of), MAX_TOKENS)
    value = 0.0
    for rank in range(ranks):
        for batch in pack_micro_batches(of[rank::ranks], budget):
            loss = micro_batch_loss(*policy.logprobs(batch), batch, denominators, section).loss
            loss.backward()
            value += loss.item()
    gradients = {}
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
        parameter.grad = None
    return value, gradients


def logprob_rows(model: PreTrainedModel, of: Sequence[Sample]) -> list[torch.Tensor]:
    """Float64 logprobs of each sample's policy tokens, one sequence after the other, without padding or packing."""
    rows = []
    for sample in of:
        mask = sample.loss_mask
        assert mask is not None
        tokens = torch.tensor([*sample.prompt_token_ids, *sample.completion_token_ids])
        logits = model(tokens[None], use_cache=False).logits[0].double() / TEMPERATURE
        before = logits[:-1].log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
        rows.append(before[len(sample.prompt_token_ids) - 1 :][torch.from_numpy(mask)])
    return rows


# cases TR-01, TR-03, TR-06
@pytest.mark.parametrize("algorithm", sorted(FORMULAS))
def test_the_models_gradient_on_episodes_is_that_of_the_papers_loss(
    algorithm: str, folder: Path, policy: SharedPolicy
) -> None:
    formula, choices = FORMULAS[algorithm]
    section = LossSection(algorithm, **choices)  # type: ignore[arg-type]
    model, of = load_reference(folder), episodes()
    rows = logprob_rows(model, of)
    for sample, row in zip(of, rows, strict=True):
        shift = sample.sampled_logprobs - sample.reference_logprobs
        drift = np.float32(1e-4 if algorithm == "gspo" else 0.05) * np.arange(sample.num_tokens)
        sample.sampled_logprobs = row.detach().numpy().astype(np.float32) + drift  # of a policy that has moved a bit
        sample.reference_logprobs = (sample.sampled_logprobs - shift).astype(np.float32)
    assign_advantages(of, GROUP_SIZE, section)
    old = [torch.from_numpy(sample.sampled_logprobs.astype(np.float64)) for sample in of]
    expected = formula(rows, old, np.array(REWARDS))
    expected.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    for budget, ranks in ((1000, 1), (1, 1), (20, 2)):
        value, ours = gradients_by_us(policy, of, section, budget, ranks)
        assert value == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert gradient is not None and gradient.abs().max() > 0
            torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
