"""Ranks that train with DeepSpeed, ZeRO 1 to 3, with PEFT and accelerate on top."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from rollout.errors import TensorKindError
from rollout.weights.shared_memory import SharedMemorySender
from rollout.weights.trainer_tensors import policy_tensors
from tests.support.trainer_ranks import (
    LINEAR,
    LORA,
    SMALL_BUCKET,
    Recorder,
    batch,
    measure_memory,
    merged_by_peft,
    push_adapter,
    rank,
    send,
    tiny_engine,
    trained_model,
)


def main(folder: Path) -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    checkpoint = folder / "untied"
    recorder = Recorder(folder, tiny_engine(checkpoint))
    half = Recorder(folder, tiny_engine(checkpoint, dtype="bfloat16"))
    tied = Recorder(folder, tiny_engine(folder / "tied"))

    zero(recorder, "zero1", trained_model(checkpoint), 1)
    zero(half, "zero2-bfloat16", trained_model(checkpoint), 2, dtype="bf16")
    zero(recorder, "zero3", trained_model(checkpoint), 3)
    zero(half, "zero3-bfloat16", trained_model(checkpoint), 3, dtype="bf16")
    zero(tied, "zero3-tied", trained_model(folder / "tied"), 3)
    zero(recorder, "zero3-persistent", trained_model(checkpoint), 3, persistent=5000)
    lora_under_zero3(recorder, checkpoint)
    adapter_of_zero3(folder, checkpoint)
    engine = initialised(trained_model(checkpoint), 3)
    through_shared_memory(folder, engine)
    measure_memory(folder, engine, [parameter.ds_tensor for parameter in engine.module.parameters()])
    pipeline(folder)
    with_accelerate(folder)


def settings(stage: int, dtype: str | None = None, persistent: int = 0) -> dict[str, Any]:
    """A DeepSpeed configuration; parameters of at most `persistent` elements stay whole between steps of ZeRO-3."""
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": persistent,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    return config | ({dtype: {"enabled": True}} if dtype else {})


def initialised(model: nn.Module, stage: int, **options: Any) -> Any:
    """The engine of DeepSpeed; a torch optimiser, since DeepSpeed's own would have to be compiled."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage, **options))
    return engine


def take_step(engine: Any) -> None:
    loss = engine(input_ids=batch(), labels=batch(), use_cache=False).loss
    engine.backward(loss)
    engine.step()


def gathered_by_deepspeed(engine: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The weights as DeepSpeed itself writes them to disk; on rank 0 alone."""
    engine.save_16bit_model(str(folder), "whole.bin")
    return torch.load(folder / "whole.bin") if rank() == 0 else {}


def zero(recorder: Recorder, case: str, model: nn.Module, stage: int, **options: Any) -> None:
    engine = initialised(model, stage, **options)
    take_step(engine)
    shapes = [parameter.shape for parameter in engine.module.parameters()]
    if stage == 3:  # placeholders, but for what is small enough to persist
        assert torch.Size([0]) in shapes
        assert any(shape.numel() for shape in shapes) == ("persistent" in options)
    recorder.push(case, engine, gathered_by_deepspeed(engine, recorder.folder))
    take_step(engine)  # the trainer goes on


def lora_under_zero3(recorder: Recorder, checkpoint: Path) -> None:
    engine = initialised(get_peft_model(trained_model(checkpoint), LORA), 3)
    take_step(engine)
    state = gathered_by_deepspeed(engine, recorder.folder)
    recorder.push("zero3-lora", engine, merged_by_peft(checkpoint, LORA, state))


def adapter_of_zero3(folder: Path, checkpoint: Path) -> None:
    engine = initialised(get_peft_model(trained_model(checkpoint), LINEAR), 3)
    take_step(engine)
    state = gathered_by_deepspeed(engine, folder)
    push_adapter(folder, "zero3-adapter", engine, merged_by_peft(checkpoint, LINEAR, state))


def through_shared_memory(folder: Path, engine: Any) -> None:
    """To an engine in another process on this machine, by rank 0."""
    take_step(engine)
    sender = SharedMemorySender(folder / "channel", bucket_bytes=SMALL_BUCKET, timeout=300, sends=rank() == 0)
    send(folder, sender, str(folder / "channel"), engine, gathered_by_deepspeed(engine, folder))


def pipeline(folder: Path) -> None:
    """A model of which each rank holds other layers is refused, by name."""
    from deepspeed.pipe import PipelineModule

    model = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2)
    message = ""
    try:
        policy_tensors(model)
    except TensorKindError as error:
        message = str(error)
    (folder / f"pipeline.rank{rank()}.json").write_text(json.dumps(message))


def with_accelerate(folder: Path) -> None:
    """`Accelerator.prepare` with ZeRO-3: from here on transformers shards whatever it loads in this process."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    plugin = DeepSpeedPlugin(hf_ds_config=settings(3))
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    assert accelerator.num_processes == 2
    checkpoint = folder / "untied"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    assert {tuple(parameter.shape) for parameter in model.parameters()} == {(0,)}
    llm = tiny_engine(checkpoint)
    assert llm.receipt is not None
    (folder / f"loaded.rank{rank()}.json").write_text(json.dumps(llm.receipt.tensors))

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    prepared, optimizer = accelerator.prepare(model.train(), optimizer)
    loss = prepared(input_ids=batch(), labels=batch(), use_cache=False).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    Recorder(folder, llm).push("accelerate-zero3", prepared, gathered_by_deepspeed(prepared, folder))
