"""vLLM's `LLM`, as trainers hold it in their own process (TRL's colocate mode), on this engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rollout.llm
from rollout.compat.rows import generate_rows
from rollout.compat.stand_in import installed_options
from rollout.engine.admission import LoRAChoice, OnInvalid
from rollout.outputs import RequestOutput
from rollout.prompts import PromptLike, split_prompts
from rollout.sampling_params import SamplingParams
from rollout.weights.transaction import PolicyUpdate

_BACKENDS = (None, "uni", "external_launcher")
_IMPLEMENTATIONS = ("auto", "vllm")


class PushedWeights:
    """The `model` to which a trainer pushes its weights, as many at a time as it likes, one by one under TRL.

    The first of them opens a policy update, which `LLM.reset_prefix_cache` commits, or the next `LLM.generate`. Both
    raise where a parameter is missing. A tensor that is unknown, or has another shape, is refused at once; the update
    is then given up, and the next tensor opens another.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._update: PolicyUpdate | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copies tensors under their Hugging Face names, and returns those names. Raises as `PolicyUpdate.load`."""
        if self._update is None:
            self._update = self._llm.policy_update().__enter__()
        try:
            return set(self._update.load(weights))
        except BaseException as error:
            update, self._update = self._update, None
            update.give_up(error)
            raise

    def commit(self) -> None:
        """Ends the update that is open, if one is. Raises `UncoveredParametersError` naming what was not pushed."""
        if self._update is not None:
            update, self._update = self._update, None
            update.__exit__(None, None, None)


class LLM(rollout.llm.LLM):
    """`rollout.LLM` with the arguments, attributes and defaults of vLLM's that trainers use.

    Options that `rollout.compat.install` was given win over arguments. Every engine can sleep: `enable_sleep_mode` only
    says that somebody will have it do so. Raises `ValueError` for what this engine does not do, naming the argument.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        distributed_executor_backend: str | None = None,
        model_impl: str = "auto",
        enable_sleep_mode: bool = False,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        **config: Any,
    ) -> None:
        _check_one_rank(tensor_parallel_size, distributed_executor_backend)
        if model_impl not in _IMPLEMENTATIONS:
            raise ValueError(f"model_impl={model_impl!r} is not supported: it must be 'auto' or 'vllm'")
        if not isinstance(enable_sleep_mode, bool):
            raise ValueError(f"enable_sleep_mode={enable_sleep_mode!r} is not valid: it must be True or False")
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        config |= {field: size for field, size in sizes.items() if size is not None}
        super().__init__(model, **config | installed_options())
        self._weights = PushedWeights(self)
        # The path by which trainers reach the weights, and what they ask of it on the way.
        runner = SimpleNamespace(model=self._weights)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        limits = SimpleNamespace(max_model_len=self._engine.max_model_len)
        self.llm_engine = SimpleNamespace(model_config=limits, model_executor=executor)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        on_invalid: OnInvalid = "raise",
    ) -> list[RequestOutput]:
        """Like `rollout.LLM.generate`, after the weights that were pushed have become a policy.

        Equal rows of token ids that stand side by side, with one sample each and no seed, are computed as the samples
        of one prompt.
        """
        self._weights.commit()
        items = split_prompts(prompts)
        rows = [_token_row(item) for item in items]
        if (
            not isinstance(sampling_params, SamplingParams)
            or sampling_params.n != 1
            or priority is not None
            or lora_request is not None
            or on_invalid != "raise"
            or any(row is None for row in rows)
        ):
            return super().generate(
                items,
                sampling_params,
                use_tqdm=use_tqdm,
                priority=priority,
                lora_request=lora_request,
                on_invalid=on_invalid,
            )
        run = super().generate
        return generate_rows(
            [row for row in rows if row is not None],
            sampling_params,
            lambda unique, params: run(unique, params, use_tqdm=use_tqdm),
        )

    def reset_prefix_cache(self) -> bool:
        """Makes a policy of the weights that were pushed, and forgets every cached block."""
        self._weights.commit()
        return super().reset_prefix_cache()


def _check_one_rank(tensor_parallel_size: int, backend: str | None) -> None:
    if tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size!r} is not supported: every rank of the trainer has a whole "
            "engine of its own (vllm_tensor_parallel_size=1)"
        )
    if backend not in _BACKENDS:
        known = ", ".join(map(repr, _BACKENDS))
        raise ValueError(f"distributed_executor_backend={backend!r} is not supported: it must be one of {known}")


def _token_row(item: object) -> list[int] | None:
    """The ids of a prompt that is nothing but a list of them; None for every other."""
    if isinstance(item, Mapping) and item.keys() == {"prompt_token_ids"}:
        ids = item["prompt_token_ids"]
        return ids if isinstance(ids, list) else None
    return None
