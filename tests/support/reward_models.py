"""Tiny random sequence classifiers, as folders that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from tests.support.tiny import make_tiny_llama


def make_reward_model(path: Path, *, num_labels: int = 1, pad_token_id: int | None = None, **tiny: Any) -> Path:
    """A random `LlamaForSequenceClassification` with the body and tokenizer of `make_tiny_llama`, options `tiny`."""
    make_tiny_llama(path, tokenizer=True, **tiny)
    config = LlamaConfig.from_pretrained(path, num_labels=num_labels, pad_token_id=pad_token_id)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(path, config=config)
    model.score.weight.data.normal_()
    model.save_pretrained(path)
    return path


def load_reward_model(path: Path) -> PreTrainedModel:
    """As transformers runs it, in float32."""
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
