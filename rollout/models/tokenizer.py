"""The tokenizer in a model's folder, and the ids that end a sample."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rollout.models.loader import read_config


def find_tokenizer(tokenizer: str | None, folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the folder `tokenizer`, else that of the model's folder, None where that has none.

    Raises `ValueError` where `tokenizer` names a folder without one.
    """
    found = _load_tokenizer(Path(tokenizer or folder))
    if tokenizer is not None and found is None:
        raise ValueError(f"tokenizer={tokenizer!r} is not valid: there is no tokenizer in this folder")
    return found


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def find_eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> frozenset[int]:
    """Every id that ends a sample: those of the generation config, else of the config, and the tokenizer's own."""
    if (folder / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        configured = read_config(folder).eos_token_id
    ids: set[int] = {configured} if isinstance(configured, int) else set(configured or ())
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return frozenset(token_id for token_id in ids if token_id < vocab_size)
