"""Critics on packed batches: values against transformers', gradients where they belong, and wrong models refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import LLM
from rollout_trainers.critic import SeparateCritic, ValueHead, load_critic
from rollout_trainers.packing import pack, pack_micro_batches
from rollout_trainers.policy import SharedPolicy
from rollout_trainers.types import Sample
from tests.support.live_bytes import LiveBytes
from tests.support.reward_models import load_reward_model, make_reward_model
from tests.support.samples import make_sample
from tests.support.tiny import make_tiny_llama

CPU = torch.device("cpu")
SAMPLES = [  # two share a prompt; EOS in the middle; one token
    make_sample([1, 30, 31, 32], [40, 41, 2]),
    make_sample([1, 30, 31, 32], [50, 2, 51, 52, 53]),
    make_sample([7], [9]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def policy(folder: Path) -> SharedPolicy:
    engine = LLM(folder, dtype="float32", max_model_len=64, kv_cache_memory="1 MiB")
    return SharedPolicy(engine.shared_model(), 1.0)


def states_before(sample: Sample) -> slice:
    """The places of a whole sequence after which its completion tokens are drawn."""
    start = len(sample.prompt_token_ids) - 1
    return slice(start, start + sample.num_tokens)


@torch.no_grad()
def hidden_states(folder: Path, samples: Sequence[Sample]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    sequences = [torch.tensor([sample.prompt_token_ids + sample.completion_token_ids]) for sample in samples]
    return [
        model(ids).last_hidden_state[0, states_before(sample)] for ids, sample in zip(sequences, samples, strict=True)
    ]


def test_a_value_head_reads_the_state_before_each_token(folder: Path, policy: SharedPolicy):
    head = ValueHead(policy.hidden_size, 0.1, 3, policy.device)
    with torch.no_grad():
        head.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        head.head.bias.fill_(0.5)
    batch = pack(SAMPLES, [0, 1, 2])
    values = head.values(batch, policy.hidden(batch))
    states = torch.cat(hidden_states(folder, SAMPLES))
    torch.testing.assert_close(values, states @ head.head.weight[0] + 0.5, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="needs the policy's hidden states"):
        head.values(batch, None)


def test_a_value_heads_gradient_reaches_the_policy_times_its_factor_and_the_head_in_full(policy: SharedPolicy):
    batch = pack(SAMPLES, [0, 1, 2])
    gradients = {}
    for factor in (1.0, 0.25, 0.0):
        head = ValueHead(policy.hidden_size, factor, 3, policy.device)
        hidden = policy.hidden(batch).detach().requires_grad_()
        head.values(batch, hidden).square().sum().backward()
        assert hidden.grad is not None and head.head.weight.grad is not None
        gradients[factor] = (hidden.grad, head.head.weight.grad)
    full, own = gradients[1.0]
    assert full.any() and own.any()
    for factor, (reached, head_gradient) in gradients.items():
        torch.testing.assert_close(reached, factor * full)
        torch.testing.assert_close(head_gradient, own)


def test_heads_begin_near_zero_and_the_same_for_the_same_seed(policy: SharedPolicy):
    one, same, other = (ValueHead(policy.hidden_size, 0.1, seed, policy.device).head for seed in (3, 3, 4))
    assert torch.equal(one.weight, same.weight) and not torch.equal(one.weight, other.weight)
    batch = pack(SAMPLES, [0])
    with torch.no_grad():
        assert 0 < one(policy.hidden(batch)).abs().max() < 1


@pytest.mark.parametrize("tie", [True, False])
def test_a_separate_critic_begins_with_a_language_models_network(tmp_path: Path, tie: bool):
    folder = make_tiny_llama(tmp_path, tie=tie, tokenizer=True)
    critic = load_critic(folder, 131, "float32", 0, CPU)
    states = torch.cat(hidden_states(folder, SAMPLES))
    expected = states @ critic.head.weight[0]
    torch.testing.assert_close(critic.values(pack(SAMPLES, [0, 1, 2]), None), expected, rtol=1e-4, atol=1e-5)
    assert not any(name.endswith("lm_head.weight") for name, _ in critic.named_parameters())  # nothing that is not used


def test_a_separate_critic_begins_with_a_reward_models_judgement(tmp_path: Path):
    folder = make_reward_model(tmp_path)
    critic = load_critic(folder, 131, "float32", 0, CPU)
    model = load_reward_model(folder)
    values = critic.values(pack(SAMPLES, [0, 1, 2]), None).split([sample.num_tokens for sample in SAMPLES])
    for sample, own in zip(SAMPLES, values, strict=True):
        known = sample.prompt_token_ids
        for place in range(sample.num_tokens):  # what the reward model says of the text so far
            prefix = torch.tensor([known + sample.completion_token_ids[:place]])
            assert own[place].item() == pytest.approx(model(prefix).logits.item(), rel=1e-4, abs=1e-4)


# case TR-03
def test_every_parameter_of_a_separate_critic_learns_whatever_the_micro_batches(folder: Path):
    gradients = []
    for budget in (1000, 1):
        critic = load_critic(folder, 131, "float32", 0, CPU)
        for batch in pack_micro_batches(SAMPLES, budget):
            (critic.values(batch, None) - 1.0).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in critic.named_parameters()})
    whole, split = gradients
    for name, gradient in whole.items():
        assert gradient is not None and gradient.any(), name
        torch.testing.assert_close(split[name], gradient, rtol=1e-3, atol=1e-5)


def test_the_dtype_is_the_checkpoints_or_the_one_asked_for(folder: Path):
    critic: SeparateCritic = load_critic(folder, 131, "bfloat16", 0, CPU)
    assert {parameter.dtype for parameter in critic.network.parameters()} == {torch.bfloat16}
    assert critic.values(pack(SAMPLES, [0]), None).dtype == critic.head.weight.dtype == torch.float32
    assert load_critic(folder, 131, "auto", 0, CPU).network.output_weight.dtype == torch.float32


def test_models_that_cannot_be_critics_are_refused_by_name(tmp_path: Path, folder: Path):
    with pytest.raises(ValueError, match=r"critic\.model=.* its vocabulary has 131 tokens, the policy's 200"):
        load_critic(folder, 200, "auto", 0, CPU)
    three = make_reward_model(tmp_path / "three", num_labels=3)
    with pytest.raises(ValueError, match=r"'score\.weight' has the shape \(3, 64\), and not \(1, 64\)"):
        load_critic(three, 131, "auto", 0, CPU)
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_critic(tmp_path / "nowhere", 131, "auto", 0, CPU)
    deeper = make_tiny_llama(tmp_path / "deeper", num_layers=3)
    shallow = make_tiny_llama(tmp_path / "shallow", num_layers=2)
    (deeper / "config.json").write_bytes((shallow / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"nothing in a critic is named 'model\.layers\.2"):
        load_critic(deeper, 131, "auto", 0, CPU)
    (shallow / "config.json").write_text((shallow / "config.json").read_text().replace('layers": 2', 'layers": 3'))
    with pytest.raises(ValueError, match=r"it lacks model\.layers\.2"):
        load_critic(shallow, 131, "auto", 0, CPU)


def test_a_critic_of_its_own_that_recomputes_its_layers_keeps_less_and_learns_the_same_bits(folder: Path):
    batch = pack(SAMPLES, [0, 1, 2])
    found = []
    for checkpointing in (False, True):
        critic = load_critic(folder, 131, "float32", 3, CPU, checkpointing)
        with LiveBytes(critic.parameters(), settle=0.0) as memory:
            values = critic.values(batch, None)
            kept = memory.live
        values.square().sum().backward()
        found.append((values.detach(), {name: each.grad for name, each in critic.named_parameters()}, kept))
    (plain_values, plain, plain_kept), (values, gradients, kept) = found
    assert torch.equal(values, plain_values)
    for name, gradient in plain.items():
        assert gradient is not None
        assert torch.equal(gradients[name], gradient), name
    assert kept < plain_kept / 2


def test_a_critic_that_cannot_recompute_its_layers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    critic = load_critic(folder, 131, "float32", 3, CPU)
    monkeypatch.setattr(type(critic.network), "supports_recompute", False)
    with pytest.raises(ValueError, match=r"policy.gradient_checkpointing=True is not valid with a critic"):
        load_critic(folder, 131, "float32", 3, CPU, gradient_checkpointing=True)
