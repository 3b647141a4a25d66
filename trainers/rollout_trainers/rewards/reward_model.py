"""A reward model as a reward function: a sequence classifier of transformers that says one number about a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rollout_trainers.types import Prompt


class RewardModel:
    """`reward(prompts, completions, **columns) -> list[float]`: the model's number for each, times `weight`.

    Text goes in: a chat is rendered by the reward model's own chat template, a text prompt and its completion are one
    text, and its own tokenizer makes the tokens. So it may have another vocabulary than the policy. `dtype` is "auto"
    (the checkpoint's), "bfloat16" or "float32". At most `batch_tokens` tokens, padding included, are computed at once;
    padding changes no number but for rounding.

    Raises `ValueError` for a folder without a config, a model whose head says more or less than one number, and one
    that is no sequence classifier or lacks weights, where transformers would make up random ones.
    """

    def __init__(
        self, folder: str | Path, *, weight: float = 1.0, dtype: str = "auto", batch_tokens: int = 8192
    ) -> None:
        self.folder = Path(folder)
        self.weight = weight
        self.batch_tokens = batch_tokens
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{self._named} is not valid: there is no config.json in it")
        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        architectures = config.architectures or []
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise ValueError(f"{self._named} is not valid: it is of {architectures}, and no sequence classifier")
        if config.num_labels != 1:
            raise ValueError(f"{self._named} is not valid: its head says {config.num_labels} numbers, not one")
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            self.folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ValueError(f"{self._named} is not valid: its checkpoint lacks {', '.join(missing[:8])}")
        self.model.eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        positions = config.to_dict().get("max_position_embeddings") or self.tokenizer.model_max_length
        self._longest = min(positions, self.tokenizer.model_max_length)
        self._chooses_pad = config.pad_token_id is None

    @property
    def _named(self) -> str:
        return f"reward_model.model={str(self.folder)!r}"

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Raises `ValueError` for prompts that are token ids, whose text it does not know, for chats where its
        tokenizer has no chat template, and for texts that are longer than it was made for."""
        sequences = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores = torch.empty(len(sequences))
        for indices in self._batches([len(sequence) for sequence in sequences]):
            scores[indices] = self._score([sequences[index] for index in indices])
        return [self.weight * float(score) for score in scores]

    def _encode(self, prompt: Prompt, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            token_ids = list(self.tokenizer(prompt + completion)["input_ids"])
        elif prompt and isinstance(prompt[0], dict):
            token_ids = self._encode_chat([*prompt, *completion])
        else:
            raise ValueError("a prompt is token ids: a reward model reads text or chats")
        if len(token_ids) > self._longest:
            raise ValueError(f"a text has {len(token_ids)} tokens, and {self._named} reads at most {self._longest}")
        return token_ids

    def _encode_chat(self, messages: list[Any]) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self._named} has no chat template: it can read text prompts alone")
        return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of texts of like length together."""
        batches: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
            longest = lengths[batches[-1][0]] if batches else 0  # the first is the longest
            if not batches or longest * (len(batches[-1]) + 1) > self.batch_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def _score(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Float32 [N]. Padded on the right, with the id whose trailing run the model skips to find a text's end."""
        pad = self._pad_id(sequences)
        width = max(map(len, sequences))
        input_ids = torch.full((len(sequences), width), pad, dtype=torch.int64)
        mask = torch.zeros((len(sequences), width), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            input_ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
            mask[row, : len(sequence)] = 1
        return self.model(input_ids=input_ids, attention_mask=mask).logits[:, 0].float()

    def _pad_id(self, sequences: Sequence[Sequence[int]]) -> int:
        """The config's. A config without one reads a text to its last token, whatever that is; transformers then takes
        single texts only, so it is told one that no text ends with."""
        config = self.model.config
        if self._chooses_pad:
            ends = {sequence[-1] for sequence in sequences}
            config.pad_token_id = next(token for token in range(len(ends) + 1) if token not in ends)
        return config.pad_token_id
