"""Mistral (Jiang et al., 2023): Llama whose layers see a window of the last tokens, where the config sets one."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from transformers import PretrainedConfig

from rollout.models.llama import LlamaConfig, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """KV outside the window stays in its blocks until the request ends."""

    @classmethod
    def from_pretrained_config(cls, config: PretrainedConfig, dtype: torch.dtype) -> Self:
        """Raises `ValueError` for what Llama refuses too, and for a window that is no number of tokens."""
        window = config.to_dict().get("sliding_window")
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"sliding_window={window!r} is not valid: it must be an integer of at least 1, or null")
        return cls(replace(LlamaConfig.from_pretrained_config(config), sliding_window=window), dtype)
