"""Ranks that run TRL's GRPOTrainer, unmodified, in two processes: DDP, FSDP2, ZeRO-2 and ZeRO-3, with and without LoRA.

Each has an engine of its own in the place of vLLM, or as `rollout_func`. A case leaves `<case>.rank<n>.json` behind.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import rollout.compat
from tests.support.trl import ENGINE, grpo_trainer, spread

RANK = int(os.environ.get("RANK", "0"))
# Two groups of four: each rank has one, and in its own order, so that both draw for other prompts and with other seeds.
TWO_RANKS: dict[str, Any] = {"per_device_train_batch_size": 4}
ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}


def main(folder: Path) -> None:
    """DDP, then FSDP2, which accelerate takes for DDP on CPUs unless it is told that these are GPUs."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    rollout.compat.install(**ENGINE)
    run(folder, "ddp", vllm_enable_sleep_mode=True)
    run(folder, "ddp-lora", peft_config=lora())
    shared_group(folder)
    rollout_func(folder, "ddp-rollout_func")

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    wrap = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap} | CONFIGURED
    run(folder, "fsdp2", vllm_enable_sleep_mode=True, **fsdp)
    run(folder, "fsdp2-lora", peft_config=lora(), **fsdp)
    rollout_func(folder, "fsdp2-rollout_func", **fsdp)


def deepspeed(folder: Path) -> None:
    """ZeRO-2 and ZeRO-3."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    rollout.compat.install(**ENGINE)
    zero3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
    run(folder, "zero2", **zero(stage=2))
    run(folder, "zero3", vllm_enable_sleep_mode=True, **zero(**zero3))
    run(folder, "zero3-lora", peft_config=lora(), **zero(**zero3))
    rollout_func(folder, "zero3-rollout_func", **zero(**zero3))


CONFIGURED: dict[str, Any] = {"accelerator_config": {"use_configured_state": True}}


def zero(**optimization: Any) -> dict[str, Any]:
    """Options of a trainer under DeepSpeed, for which accelerate wants a state that nobody has used."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    settings = ZERO | {"zero_optimization": optimization}
    return {"deepspeed": settings, "use_cpu": False} | CONFIGURED


def lora() -> Any:
    import torch
    from peft import LoraConfig

    torch.manual_seed(0)  # the same adapters on every rank
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


class Collect:
    """A reward function that keeps what was sampled."""

    def __init__(self) -> None:
        self.__name__ = "collect"
        self.prompts: list[str] = []
        self.completions: list[list[int]] = []

    def __call__(self, prompts: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.prompts += [prompt[0]["content"] for prompt in prompts]
        self.completions += completion_ids
        return spread(completion_ids)


def run(folder: Path, case: str, **options: Any) -> None:
    """Two steps of a trainer that samples with the engine in vLLM's place."""
    collect = Collect()
    values = TWO_RANKS | {"use_vllm": True} | options
    trainer = grpo_trainer(folder / "model", folder / case, collect, **values)
    trainer.train()
    llm = trainer.vllm_generation.llm
    write(folder, case, trainer, llm, collect)
    llm.close()
    trainer.accelerator.wait_for_everyone()
    del trainer
    gc.collect()


def shared_group(folder: Path) -> None:
    """One group over both ranks: the same prompt on each, and other samples."""
    run(folder, "shared-group", num_generations=8)


def rollout_func(folder: Path, case: str, **options: Any) -> None:
    """Engines with the same seed on both ranks, which get the trainer's policy as it is sharded and adapted."""
    collect = Collect()
    with rollout.LLM(folder / "model", **ENGINE) as llm:
        function = rollout.compat.make_rollout_func(llm)
        values = TWO_RANKS | {"num_generations": 8, "peft_config": lora()} | options
        trainer = grpo_trainer(folder / "model", folder / case, collect, rollout_func=function, **values)
        trainer.train()
        write(folder, case, trainer, llm, collect)
    trainer.accelerator.wait_for_everyone()


def write(folder: Path, case: str, trainer: Any, llm: Any, collect: Collect) -> None:
    assert llm.receipt is not None
    result = {
        "wrapper": type(trainer.model_wrapped).__name__,
        "parameter": type(next(iter(trainer.model.parameters()))).__name__,
        "log": [row for row in trainer.state.log_history if "grad_norm" in row],
        "version": llm.policy_version,
        "fingerprint": llm.receipt.parameters_fingerprint,
        "prompts": collect.prompts,
        "completions": collect.completions,
    }
    (folder / f"{case}.rank{RANK}.json").write_text(json.dumps(result, default=float))
