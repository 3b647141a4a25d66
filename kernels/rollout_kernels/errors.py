"""Errors about values inside tensors, which only the kernels see, in the same words for every backend."""

from __future__ import annotations

import torch

from rollout_kernels.results import SampleArguments


def token_error(token_ids: torch.Tensor, token: int, vocab_size: int) -> ValueError:
    """A token id outside the vocabulary."""
    return ValueError(f"token_ids[{token}]={int(token_ids[token])} is not in the vocabulary (0 to {vocab_size - 1})")


def slot_error(slot_mapping: torch.Tensor, token: int, num_slots: int) -> ValueError:
    """A slot outside the KV cache."""
    slot = int(slot_mapping[token])
    return ValueError(f"slot_mapping[{token}]={slot} is not a slot of the cache (0 to {num_slots - 1})")


def adapter_error(adapter_ids: torch.Tensor, token: int, num_adapters: int) -> ValueError:
    """An id that is neither -1 (no adapter) nor an adapter's."""
    adapter = int(adapter_ids[token])
    return ValueError(f"adapter_ids[{token}]={adapter} is no adapter: it must be -1 (none) to {num_adapters - 1}")


def position_error(positions: torch.Tensor, token: int, max_positions: int) -> ValueError:
    """A position outside the table of cosines and sines."""
    return ValueError(f"positions[{token}]={int(positions[token])} is outside cos_sin (0 to {max_positions - 1})")


def draw_error(arguments: SampleArguments, draw: int, problem: int) -> ValueError:
    """An argument of `sample` out of range; `problem` counts the arguments from 1."""
    name, valid = (
        ("temperature", "a finite number, 0 or above"),
        ("top_k", "-1 or above"),
        ("top_p", "above 0, up to 1"),
        ("min_p", "from 0 to 1"),
        ("row_index", "a row of the logits"),
        ("banned", "ascending offsets, and token ids of the vocabulary"),
        ("adjusted", "-1 or the index of a row of the adjusted logits"),
        ("allowed", "-1 or the index of a row of the masks"),
        ("forced", "-1 or a token id of the vocabulary"),
    )[problem - 1]
    if name == "banned" or (name == "row_index" and arguments.row_index is None):
        return ValueError(f"{name} of draw {draw} is not valid: it must be {valid}")
    argument = getattr(arguments, name)
    if isinstance(argument, tuple):
        return ValueError(f"{name} of draw {draw} has index {int(argument[1][draw])}: it must be {valid}")
    value = argument[draw].item()
    return ValueError(f"{name}[{draw}]={value!r} is not valid: it must be {valid}")


def top_logprob_error(
    token_ids: torch.Tensor, row_index: torch.Tensor | None, draw: int, problem: int, num_rows: int, vocab_size: int
) -> ValueError:
    """A token id (problem 1), a row (2) or the chosen ids (3) of a draw of `top_logprobs` out of range."""
    if problem == 1:
        value = int(token_ids[draw])
        return ValueError(f"token_ids[{draw}]={value} is not valid: it must be -1 (none) to {vocab_size - 1}")
    if problem == 2:
        value = draw if row_index is None else int(row_index[draw])
        return ValueError(
            f"row_index[{draw}]={value} is not valid: it must be a row of the logits, up to {num_rows - 1}"
        )
    return ValueError(
        f"chosen of draw {draw} is not valid: it must be ascending offsets, and token ids of the vocabulary"
    )


def logprob_error(
    token_ids: torch.Tensor, temperature: float | torch.Tensor, row: int, problem: int, vocab_size: int
) -> ValueError:
    """A token id (problem 1) or a temperature (problem 2) of `token_logprobs` out of range."""
    if problem == 1:
        return token_error(token_ids, row, vocab_size)
    value = temperature[row].item() if isinstance(temperature, torch.Tensor) else temperature
    return ValueError(f"temperature={value!r} (row {row}) is not valid: it must be a finite number above 0")
