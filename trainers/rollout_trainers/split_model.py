"""A causal language model of transformers in two parts: from tokens to hidden states, and from some of these to logits.

Logits of a whole batch take vocabulary times tokens, most of which nobody asks for. But what a model does between its
last hidden states and its logits is its own business (soft caps, scales, biases): here the model's own code does it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from rollout.layers.gather import take_rows

_PROBE_TOKENS = 5


class SplitModel:
    """`hidden` calls `entry`: the model, or what wraps it (PEFT's model, a data-parallel one). Its decoder's hidden
    states are caught on the way to the head, which gets one row, for form's sake. `logits` calls a twin of the model,
    that has all its modules but for the decoder, in whose place something hands over the hidden states it was given.

    With `float32_logits` a head of lower precision does not round its logits: they are summed in float32 from the
    values of its weights and the hidden states, as the engine makes them. A head that is more than a linear layer (with
    an adapter, say) is left as it is.
    """

    def __init__(self, entry: nn.Module, model: PreTrainedModel, float32_logits: bool = False) -> None:
        self.entry = entry
        self._decoder = model.get_decoder()
        path = next((name for name, module in model.named_modules() if module is self._decoder), "")
        if not path:
            raise ValueError(f"{type(model).__name__} is not valid: it has no decoder below its head")
        self._given = _Given()
        self._head = _twin(model, path.split("."), self._given)
        head = model.get_output_embeddings()
        if float32_logits and type(head) is nn.Linear and head.weight.dtype != torch.float32:
            (name,) = [name for name, module in model.named_modules() if module is head]
            self._head = _twin(self._head, name.split("."), _Float32Linear(head))

    def hidden(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """input_ids, attention_mask: int64 [S, width]; rows: int64 [R], places in the flattened batch. Returns the last
        hidden states [R, hidden] there, in the model's dtype."""
        caught: list[torch.Tensor] = []

        def catch(module: nn.Module, arguments: Any, output: Any) -> Any:
            states = _last_hidden_state(output)
            caught.append(take_rows(states.flatten(0, 1), rows))
            self._given.kind = type(output)
            return type(output)(last_hidden_state=states[:1, :1])

        self._pass(catch, input_ids, attention_mask)
        (hidden,) = caught
        return hidden

    def logits_at_once(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`logits` of what `hidden` gives, [R, vocab], all in one pass through `entry`, for what wraps a model and must
        see all of it."""

        def keep_rows(module: nn.Module, arguments: Any, output: Any) -> Any:
            return type(output)(last_hidden_state=take_rows(_last_hidden_state(output).flatten(0, 1), rows)[None])

        return self._pass(keep_rows, input_ids, attention_mask).logits[0]

    def _pass(self, hook: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """A pass through `entry`, whose head gets what `hook` makes of the decoder's output."""
        handle = self._decoder.register_forward_hook(hook)
        try:
            return self.entry(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        finally:
            handle.remove()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden] -> [R, vocab], in the dtype in which the model makes them, or float32."""
        self._given.hidden = hidden[None]
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            return self._head(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given.hidden = None

    @torch.no_grad()
    def check(self, model: PreTrainedModel) -> None:
        """Raises `ValueError` where the two parts are not the whole: for an architecture that does something else."""
        ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
        mask = torch.ones_like(ids)
        whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
        parts = self.logits(self.hidden(ids, mask, torch.arange(_PROBE_TOKENS, device=ids.device)))
        if not torch.allclose(whole, parts, rtol=0.0, atol=0.0, equal_nan=True):
            raise ValueError(
                f"policy.kind='transformers' is not valid for {type(model).__name__}: its logits are made of more than "
                "its decoder's last hidden states"
            )


class _Float32Linear(nn.Module):
    """What `linear` computes, in float32 from its weights' values."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.linear.bias
        return functional.linear(x.float(), self.linear.weight.float(), None if bias is None else bias.float())


class _Given(nn.Module):
    """Stands where a decoder does and returns the `hidden` states [1, R, hidden] that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None
        self.kind: type[ModelOutput] | None = None  # of the decoder's outputs

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.kind is None:
            raise RuntimeError("logits were asked for before any hidden states were made")
        return self.kind(last_hidden_state=self.hidden)


def _last_hidden_state(output: Any) -> torch.Tensor:
    if isinstance(output, ModelOutput) and isinstance(output.get("last_hidden_state"), torch.Tensor):
        return output["last_hidden_state"]
    raise ValueError(f"the decoder returns a {type(output).__name__} without last_hidden_state: it cannot be trained")


def _twin(module: nn.Module, path: Sequence[str], leaf: nn.Module) -> nn.Module:
    """Another `module` with the same attributes, modules, parameters and hooks, but `leaf` in the place `path`."""
    twin = copy.copy(module)
    name, *rest = path
    child = module.get_submodule(name)
    twin._modules = {**module._modules, name: _twin(child, rest, leaf) if rest else leaf}
    return twin
