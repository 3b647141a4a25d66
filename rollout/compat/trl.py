"""`rollout_func` of TRL's GRPOTrainer on an engine: TRL asks for samples, and gets them as they were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rollout.compat.rows import generate_rows
from rollout.llm import LLM
from rollout.outputs import RequestOutput
from rollout.sampling_params import SamplingParams

__all__ = ["RolloutFunction", "Trainer", "make_rollout_func"]

_RANK_STRIDE = 1 << 16  # more samples than a group has


class Trainer(Protocol):
    """What is read of `trl.GRPOTrainer`, whose own types say less."""

    args: Any  # GRPOConfig
    accelerator: Any
    chat_template: str | None
    chat_template_kwargs: Any
    environment_factories: Any
    model: Any
    processing_class: Any
    state: Any
    tools: Any
    use_vllm: bool
    vllm_generation: Any  # where use_vllm
    vllm_mode: str


def make_rollout_func(llm: LLM | None = None) -> RolloutFunction:
    """A `rollout_func` for `trl.GRPOTrainer`:

        trainer = GRPOTrainer(..., rollout_func=make_rollout_func(LLM("path/to/model")))

    Before the first samples of every optimiser step the trainer's policy goes to `llm` in a policy update, whatever it
    is wrapped and sharded by (`docs/real_trainers.md`); every rank has an engine of its own. TRL does not correct for a
    sampler that differs from the trainer, unless it has one of its own: with `llm=None` its engine is used
    (`use_vllm=True` after `rollout.compat.install()`), TRL pushes the weights, corrects, and logs `sampling/*`.

    Sampling parameters are those of the trainer's `args`, `generation_kwargs` included. Reward functions get the
    samples (`CompletionOutput`: arrays, seed, policy versions, finish reason) as the column `rollout_sample`.
    """
    return RolloutFunction(llm)


class RolloutFunction:
    """See `make_rollout_func`. `llm` may serve one trainer after another."""

    def __init__(self, llm: LLM | None) -> None:
        self._llm = llm
        self._holds: tuple[Trainer, int] | None = None  # whose policy the engine has, and of which step

    def __call__(self, prompts: Sequence[Any], trainer: Trainer) -> dict[str, list[Any]]:
        """Samples one completion for each of `prompts`, in which TRL has repeated each for its group.

        Raises `ValueError` for a trainer with tools or environments, prompts with images, and sampling parameters that
        the engine refuses.
        """
        if trainer.tools or trainer.environment_factories is not None:
            raise ValueError("rollout_func of rollout.compat has no tools: leave tools and environment_factory out")
        params = sampling_params_of(trainer)
        rows = _token_rows(prompts, trainer)
        llm = self._with_policy(trainer)
        outputs = generate_rows(rows, params, lambda unique, each: llm.generate(unique, each, use_tqdm=False))
        if llm is not self._llm and trainer.args.vllm_enable_sleep_mode:
            llm.sleep(level=2)
        return _columns(outputs)

    def _with_policy(self, trainer: Trainer) -> LLM:
        """The engine, awake, with the trainer's policy of this step."""
        if self._llm is None:
            return _engine_of(trainer)
        current = (trainer, trainer.state.global_step)
        if self._llm.is_sleeping:
            self._llm.wake_up()
            self._holds = None
        if self._holds != current:
            with self._llm.policy_update() as update:
                update.load(trainer.model)
            self._holds = current
        return self._llm


def sampling_params_of(trainer: Trainer) -> SamplingParams:
    """What `trainer` would have a sampler of its own draw with.

    Ranks whose engines have the same seed draw other samples for the same prompts all the same: the sample index begins
    with another number on each.
    """
    args = trainer.args
    fields: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
        "detokenize": False,
        "first_sample_index": _RANK_STRIDE * trainer.accelerator.process_index,
    }
    return SamplingParams(**fields | (args.generation_kwargs or {}))


def _engine_of(trainer: Trainer) -> LLM:
    """The engine that TRL made because of `use_vllm`; it has pushed the weights before it asks for samples."""
    if not trainer.use_vllm or trainer.vllm_mode != "colocate":
        raise ValueError(
            "make_rollout_func() without an engine uses the trainer's own, and it has none: give it an LLM, or set "
            "use_vllm=True and vllm_mode='colocate' after rollout.compat.install()"
        )
    llm = trainer.vllm_generation.llm
    if not isinstance(llm, LLM):
        raise ValueError(f"the trainer samples with {type(llm)}, not with a rollout.LLM: call rollout.compat.install()")
    if "weights" in llm.sleeping_tags:  # pushed for an earlier call of this step, and given back since
        trainer.vllm_generation.sync_weights()
    llm.wake_up(["kv_cache"])
    return llm


def _token_rows(prompts: Sequence[Any], trainer: Trainer) -> list[list[int]]:
    """Token ids of text, or of conversations by the trainer's chat template, as TRL makes them."""
    tokenizer = trainer.processing_class
    if all(isinstance(prompt, str) for prompt in prompts):
        return [list(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    for prompt in prompts:
        if any(not isinstance(message.get("content"), str | None) for message in prompt):
            raise ValueError("rollout_func of rollout.compat takes messages whose content is text, not parts or images")
    tokens = tokenizer.apply_chat_template(
        [list(prompt) for prompt in prompts],
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [list(ids) for ids in tokens["input_ids"]]


def _columns(outputs: Sequence[RequestOutput]) -> dict[str, list[Any]]:
    samples = [output.outputs[0] for output in outputs]
    return {
        "prompt_ids": [output.prompt_token_ids for output in outputs],
        "completion_ids": [sample.token_ids for sample in samples],
        "logprobs": [sample.sampled_logprobs.tolist() for sample in samples],
        "rollout_sample": samples,
    }
