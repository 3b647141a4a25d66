"""Reward models of transformers as reward functions: one text at a time says what is right, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from rollout_trainers.rewards import score
from rollout_trainers.rewards.reward_model import RewardModel
from tests.support.reward_models import load_reward_model, make_reward_model
from tests.support.samples import make_sample
from tests.support.tiny import make_tiny_llama

PROMPTS = ["abc", "what is it?", "q"]
COMPLETIONS = [" a long answer to a short question", "", " no"]
EOS = 2


@torch.no_grad()
def one_by_one(folder: Path, sequences: list[list[int]]) -> list[float]:
    model = load_reward_model(folder)
    return [model(torch.tensor([sequence])).logits.item() for sequence in sequences]


@pytest.mark.parametrize("batch_tokens", [1, 60, 8192])
@pytest.mark.parametrize("pad_token_id", [None, EOS, 0])
def test_texts_get_the_number_that_each_has_by_itself(tmp_path: Path, pad_token_id: int | None, batch_tokens: int):
    folder = make_reward_model(tmp_path, pad_token_id=pad_token_id)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = one_by_one(folder, [tokenizer(p + c)["input_ids"] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    reward = RewardModel(folder, weight=2.0, batch_tokens=batch_tokens)
    assert reward(PROMPTS, COMPLETIONS, answer=["x"] * 3) == pytest.approx(
        [2 * number for number in expected], rel=1e-4
    )
    assert len(set(expected)) == 3


# case TR-01
@pytest.mark.parametrize("pad_token_id", [None, EOS, 0])
def test_chats_are_rendered_by_its_own_template_and_a_pad_id_that_is_eos_is_no_matter(
    tmp_path: Path, pad_token_id: int | None
):
    folder = make_reward_model(tmp_path, pad_token_id=pad_token_id)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'][0] + '>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    completions = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    texts = [f"u>{p}<|im_end|>a>{c}<|im_end|>" for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert all(sequence[-1] == EOS for sequence in sequences)
    assert RewardModel(folder)(prompts, completions) == pytest.approx(one_by_one(folder, sequences), rel=1e-4)


def test_an_encoder_is_a_reward_model_too(tmp_path: Path):
    make_tiny_llama(tmp_path, tokenizer=True)
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=131,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = one_by_one(tmp_path, [tokenizer(p + c)["input_ids"] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    assert RewardModel(tmp_path)(PROMPTS, COMPLETIONS) == pytest.approx(expected, rel=1e-4)


def test_it_stands_beside_other_rewards(tmp_path: Path):
    samples = [
        make_sample([1], [3], text=text, prompt=prompt) for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    model = RewardModel(make_reward_model(tmp_path))

    def ones(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [1.0] * len(prompts)

    score(samples, [ones, model])
    assert [sample.reward for sample in samples] == pytest.approx([1 + each for each in model(PROMPTS, COMPLETIONS)])
    assert samples[0].rewards.keys() == {"ones", "RewardModel"}


def test_wrong_heads_are_refused_with_what_is_wrong(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is not valid: its head says 3 numbers, not one"):
        RewardModel(make_reward_model(tmp_path / "three", num_labels=3))
    with pytest.raises(ValueError, match=r"it is of \['LlamaForCausalLM'\], and no sequence classifier"):
        RewardModel(make_tiny_llama(tmp_path / "causal", tokenizer=True))
    with pytest.raises(ValueError, match=r"there is no config\.json in it"):
        RewardModel(tmp_path / "nowhere")
    headless = make_reward_model(tmp_path / "headless")
    model = AutoModelForSequenceClassification.from_pretrained(headless)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(headless, state_dict=state)
    with pytest.raises(ValueError, match=r"its checkpoint lacks score\.weight"):
        RewardModel(headless)


def test_prompts_that_it_cannot_read_are_refused(tmp_path: Path):
    folder = make_reward_model(tmp_path, max_position_embeddings=16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    reward = RewardModel(folder)
    with pytest.raises(ValueError, match="token ids: a reward model reads text or chats"):
        reward([[5, 6]], ["x"])
    with pytest.raises(ValueError, match="has no chat template"):
        reward([[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "b"}]])
    with pytest.raises(ValueError, match=r"a text has 18 tokens, and .* reads at most 16"):
        reward(["a" * 17], ["b"])
