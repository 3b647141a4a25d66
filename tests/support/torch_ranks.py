"""Ranks that train with torch's own wrappers (DDP, FSDP2, tensor parallel), with PEFT and accelerate on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rollout import LLM
from rollout.weights.broadcast import BroadcastSender
from rollout.weights.gather import SMALL_BYTES
from rollout.weights.incoming import Incoming
from rollout.weights.trainer_tensors import DEFAULT_BUCKET_BYTES, policy_tensors
from rollout.weights.transaction import PolicyUpdate
from tests.support.recording_engine import InjectedError
from tests.support.trainer_ranks import (
    LINEAR,
    LORA,
    SAVING,
    SMALL_BUCKET,
    Recorder,
    batch,
    measure_memory,
    merged_by_peft,
    push_adapter,
    rank,
    send,
    take_step,
    tiny_engine,
    trained_model,
)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same adapters on every rank
    checkpoint = folder / "untied"
    recorder = Recorder(folder, tiny_engine(checkpoint))
    half = Recorder(folder, tiny_engine(checkpoint, dtype="bfloat16"))

    ddp(recorder, checkpoint)
    lora_under_ddp(recorder, checkpoint)
    prepared(recorder, checkpoint)
    fsdp2(recorder, "fsdp2", trained_model(checkpoint))
    fsdp2(Recorder(folder, tiny_engine(folder / "tied")), "fsdp2-tied", trained_model(folder / "tied"))
    fsdp2(half, "fsdp2-bfloat16", trained_model(checkpoint, torch.bfloat16))
    mixed_precision(half, checkpoint)
    hybrid(recorder, checkpoint)
    tensor_parallel(recorder, checkpoint)
    lora_under_fsdp2(recorder, checkpoint)
    adapter_of_fsdp2(folder, checkpoint)
    sizes(folder)
    model = sharded(trained_model(checkpoint))
    shards = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    measure_memory(folder, model, shards)
    one_rank_fails(folder, recorder.llm, sharded(trained_model(checkpoint)))
    broadcast(folder, sharded(trained_model(checkpoint)))
    with_accelerate(recorder, checkpoint)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """As torch's own checkpointing gathers it; on rank 0 alone."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))


def ddp(recorder: Recorder, checkpoint: Path) -> None:
    """Compiled and checkpointed layers under DDP."""
    base = trained_model(checkpoint)
    apply_activation_checkpointing(base, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    base.model.norm = torch.compile(base.model.norm, backend="eager")  # pyright: ignore[reportAttributeAccessIssue]
    model = DistributedDataParallel(base)
    take_step(model)
    recorder.push("ddp", model, dict(trained_names(checkpoint, base)))


def trained_names(checkpoint: Path, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters under the names that they have in a model without wrappers, which has the same order."""
    names = [name for name, _ in trained_model(checkpoint).named_parameters()]
    return list(zip(names, model.parameters(), strict=True))


def lora_under_ddp(recorder: Recorder, checkpoint: Path) -> None:
    """A head trained beside the adapters, and a compiled model inside DDP."""
    peft = get_peft_model(trained_model(checkpoint), SAVING)
    model = DistributedDataParallel(torch.compile(peft, backend="eager"))  # pyright: ignore[reportArgumentType]
    take_step(model)
    oracle = merged_by_peft(checkpoint, SAVING, peft.state_dict())
    recorder.push("ddp-lora", model, oracle)


def prepared(recorder: Recorder, checkpoint: Path) -> None:
    """As accelerate prepares a model on CPUs: DDP, with the forward pass in bfloat16."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    base = trained_model(checkpoint)
    model = accelerator.prepare(base)
    assert isinstance(model, DistributedDataParallel)
    take_step(model, accelerator.backward)
    recorder.push("accelerate", model, dict(base.named_parameters()))


def fsdp2(recorder: Recorder, case: str, base: LlamaForCausalLM) -> None:
    model = sharded(base)
    take_step(model)
    recorder.push(case, model, full_state(model))


def mixed_precision(recorder: Recorder, checkpoint: Path) -> None:
    """float32 shards, bfloat16 in the forward pass, whose unsharded and outdated parameters the root keeps."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(trained_model(checkpoint), mp_policy=policy, reshard_after_forward=False)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=batch(), labels=batch(), use_cache=False).loss.backward()
    with torch.no_grad():
        model(input_ids=batch())  # leaves every parameter unsharded
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    optimizer.step()
    shards = zip(names, optimizer.param_groups[0]["params"], strict=True)
    recorder.push("fsdp2-mixed", model, {name: shard.full_tensor() for name, shard in shards})


def hybrid(recorder: Recorder, checkpoint: Path) -> None:
    model = sharded(trained_model(checkpoint), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s")))
    take_step(model)
    recorder.push("hybrid", model, full_state(model))


def tensor_parallel(recorder: Recorder, checkpoint: Path) -> None:
    """Shards along either dimension, and parameters that are whole."""
    model = trained_model(checkpoint)
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    take_step(model, data=0)  # all ranks need the same
    recorder.push("tensor-parallel", model, full_state(model))


def lora_under_fsdp2(recorder: Recorder, checkpoint: Path) -> None:
    model = sharded(get_peft_model(trained_model(checkpoint), LORA))
    take_step(model)
    recorder.push("fsdp2-lora", model, merged_by_peft(checkpoint, LORA, full_state(model)))


def adapter_of_fsdp2(folder: Path, checkpoint: Path) -> None:
    model = sharded(get_peft_model(trained_model(checkpoint), LINEAR))
    take_step(model)
    push_adapter(folder, "fsdp2-adapter", model, merged_by_peft(checkpoint, LINEAR, full_state(model)))


def sizes(folder: Path) -> None:
    """Parameters that are gathered alone and together, cut evenly and not, and one that leaves nothing for rank 1."""
    torch.manual_seed(1)  # the same on every rank
    model = nn.Sequential(nn.Linear(1024, 1023), nn.Linear(1023, 8), nn.Linear(8, 3), nn.Linear(3, 1))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert max(tensor.nbytes for tensor in expected.values()) > SMALL_BYTES
    for layer in model:
        fully_shard(layer)
    wrong = {}
    for bucket in (1, 50_000, DEFAULT_BUCKET_BYTES):
        tensors = {name: tensor.clone() for name, tensor in policy_tensors(model, max_bucket_bytes=bucket)}
        assert tensors.keys() == expected.keys()
        wrong[bucket] = [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])]
    (folder / f"sizes.rank{rank()}.json").write_text(json.dumps(wrong))


def one_rank_fails(folder: Path, llm: LLM, model: nn.Module) -> None:
    """Rank 1's engine breaks in the middle of an update; the other rank's update succeeds, and nobody hangs."""
    before = llm.policy_version
    error = ""
    try:
        with llm.policy_update() as update:
            if rank() == 1:
                break_at(update, "model.layers.0.mlp.up_proj.weight")
            update.load(model)
    except InjectedError as failure:
        error = str(failure)
    dist.barrier()  # every rank has come to the end of its gathers
    result = {"error": error, "versions": llm.policy_version - before}
    (folder / f"fails.rank{rank()}.json").write_text(json.dumps(result))


def break_at(update: PolicyUpdate, name: str) -> None:
    """The engine cannot take the tensor `name`."""
    store = update._store

    def failing(item: Incoming) -> None:
        if item.name == name:
            raise InjectedError(name)
        store(item)

    update._store = failing


def broadcast(folder: Path, model: nn.Module) -> None:
    """To an engine in another process, of another process group, by rank 0."""
    take_step(model)
    sender = BroadcastSender(bucket_bytes=SMALL_BUCKET, timeout=300, sends=rank() == 0)
    send(folder, sender, sender.address, model, full_state(model))


def with_accelerate(recorder: Recorder, checkpoint: Path) -> None:
    """`Accelerator.prepare` with FSDP2, which accelerate knows on GPUs only: two lines make it do so on CPUs."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of the case before
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = trained_model(checkpoint)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    assert all(isinstance(parameter, DTensor) for parameter in prepared.parameters())
    accelerator.backward(prepared(input_ids=batch(), labels=batch(), use_cache=False).loss)
    optimizer.step()
    recorder.push("accelerate-fsdp2", prepared, full_state(prepared))
