"""A trainer's policy as named tensors: wrappers and adapters in one process, against PEFT's own merge."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rollout.errors import (
    AdapterTensorError,
    DuplicateTensorError,
    TensorKindError,
    TensorShapeError,
    UnknownTensorError,
)
from rollout.weights.receipt import parameters_fingerprint
from rollout.weights.trainer_tensors import policy_tensors
from rollout.weights.transaction import PolicyUpdate
from tests.support.recording_engine import (
    NAMES,
    RecordingEngine,
    assert_holds,
    assert_old_policy_serves,
    module_of,
    new_policy,
    snapshot,
)

LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _llama(tie: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]


def _peft(config: LoraConfig | IA3Config, tie: bool = False, dtype: torch.dtype = torch.float32) -> PeftModel:
    model = get_peft_model(_llama(tie, dtype), config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter.data, std=0.3)
    assert isinstance(model, PeftModel)
    return model


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy_tensors(model)}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _checkpointed(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))


def _compiled(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def _compiled_layer(model: nn.Module) -> None:
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[0] = _compiled(layers[0])


def _sharded(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module)
    fully_shard(model)
    return model


INSIDE: dict[str, Callable[[nn.Module], None]] = {"checkpoint": _checkpointed, "compile a layer": _compiled_layer}
OUTSIDE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": _compiled,
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
}


@settings(max_examples=25)
@given(
    inside=st.permutations(list(INSIDE)).flatmap(lambda names: st.integers(0, 2).map(lambda count: names[:count])),
    adapters=st.sampled_from([None, [], ["lm_head"], ["lm_head", "norm"]]),
    shard=st.booleans(),
    outside=st.lists(st.sampled_from(list(OUTSIDE)), max_size=3),
    tie=st.booleans(),
)
def test_any_stack_of_real_wrappers_gives_every_weight_once_under_its_own_name(
    process_group: None, inside: list[str], adapters: list[str] | None, shard: bool, outside: list[str], tie: bool
):  # case WS-08
    model: nn.Module = _llama(tie)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for wrapper in inside:
        INSIDE[wrapper](model)
    if adapters is not None:
        if "lm_head" in adapters:  # PEFT makes a copy of its own, so that the two are no longer tied
            expected["lm_head.weight"] = model.get_parameter("lm_head.weight").detach().clone()
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=adapters))
    if shard:
        model, outside = _sharded(model), [name for name in outside if name == "compile"]
    for wrapper, _ in itertools.groupby(outside):  # torch.compile of a compiled model is no module
        model = OUTSIDE[wrapper](model)
    _assert_equal(_values(model), expected)


def test_an_engine_gets_every_parameter_of_a_wrapped_model_exactly_once():  # case WS-08
    engine = RecordingEngine(tied=False)
    policy = new_policy(engine)
    with PolicyUpdate(engine) as update:
        assert sorted(update.load(nn.DataParallel(module_of(policy)))) == sorted(policy)
    assert_holds(engine, policy)
    assert update.receipt.bytes_copied == update.receipt.num_bytes


@pytest.mark.parametrize(
    ("name", "shape", "error", "message"),
    [
        ("value_head.weight", (1, 16), UnknownTensorError, "value_head.weight"),
        (NAMES[4], (3, 5), TensorShapeError, r"down_proj\.weight' has shape \(3, 5\), .* has \(16, 32\)"),
    ],
)
def test_what_a_model_cannot_give_is_found_before_anything_is_written(
    name: str, shape: tuple[int, ...], error: type[Exception], message: str
):  # cases WS-08, WS-10
    engine = RecordingEngine()
    old, policy = snapshot(engine), new_policy(engine)
    with pytest.raises(error, match=message), PolicyUpdate(engine) as update:
        update.load(module_of({**policy, name: torch.zeros(shape)}))
    assert_old_policy_serves(engine, old)


def test_a_model_over_the_engines_memory_moves_no_bytes():
    engine = RecordingEngine()
    with PolicyUpdate(engine) as update:
        update.load(module_of(engine.tensors))
    assert update.receipt.bytes_shared == update.receipt.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_those_of_peft_and_the_base_stays_bit_for_bit(dtype: torch.dtype):  # case WS-11
    model = _peft(LoraConfig(**LORA, modules_to_save=["lm_head"]), dtype=dtype)
    before, base = _state(model), {name: tensor.clone() for name, tensor in _llama(dtype=dtype).state_dict().items()}
    merged = _values(model)
    _assert_equal(_state(model), before)
    oracle = model.merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]
    assert merged.keys() == oracle.keys()
    for name, tensor in oracle.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6 if dtype is torch.float32 else 0.02, rtol=0.01)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    parts = [
        f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert changed == {*parts, "model.embed_tokens.weight", "lm_head.weight"}


def test_a_merge_is_rounded_once():  # case WS-11
    model = _peft(LoraConfig(**LORA), dtype=torch.bfloat16)
    layer = model.get_submodule("base_model.model.model.layers.1.mlp.down_proj")
    assert isinstance(layer, Linear)
    up, down = (layer.get_parameter(f"lora_{factor}.default.weight").double() for factor in "BA")
    exact = layer.get_parameter("base_layer.weight").double() + 4 * up @ down
    assert torch.equal(_values(model)["model.layers.1.mlp.down_proj.weight"], exact.float().bfloat16())


def test_a_bfloat16_base_is_bit_for_bit_the_same_after_50_syncs_where_merging_in_place_drifts():  # case WS-11
    model = _peft(LoraConfig(**LORA), dtype=torch.bfloat16)
    before = _state(model)
    first = _values(model)
    for _ in range(50):
        _assert_equal(_values(model), first)
    _assert_equal(_state(model), before)
    for _ in range(5):
        model.merge_adapter()  # pyright: ignore[reportCallIssue]
        model.unmerge_adapter()  # pyright: ignore[reportCallIssue]
    drifted = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any(name.endswith("q_proj.base_layer.weight") for name in drifted)


def test_views_taken_before_unmerging_are_the_base_and_the_trainers_fingerprint_tells():  # case WS-11
    model, names = _peft(LoraConfig(**LORA)), list(_llama().state_dict())
    model.merge_adapter()  # pyright: ignore[reportCallIssue]
    views = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    model.unmerge_adapter()  # pyright: ignore[reportCallIssue]
    engine = RecordingEngine()
    engine.tensors, engine._ties = {name: torch.zeros_like(_llama().state_dict()[name]) for name in names}, {}
    with PolicyUpdate(engine) as update:
        update.load(views)
    assert update.receipt.parameters_fingerprint != parameters_fingerprint(policy_tensors(model), torch.float32)
    with PolicyUpdate(engine) as update:
        update.load(model)
    assert update.receipt.parameters_fingerprint == parameters_fingerprint(policy_tensors(model), torch.float32)
    oracle = model.merge_and_unload().state_dict()  # pyright: ignore[reportCallIssue]
    for name, tensor in engine.tensors.items():
        torch.testing.assert_close(tensor, oracle[name], atol=1e-6, rtol=0)


def test_two_active_adapters_are_summed_and_a_disabled_model_is_its_base():
    model = _peft(LoraConfig(**LORA, modules_to_save=["lm_head"]))
    model.add_adapter("second", LoraConfig(**LORA))
    model.base_model.set_adapter(["default", "second"])  # pyright: ignore[reportCallIssue]
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert isinstance(layer, Linear)
    nn.init.normal_(layer.get_parameter("lora_B.second.weight"), std=0.3)
    name, base = "model.layers.0.self_attn.q_proj.weight", layer.get_parameter("base_layer.weight")
    expected = base + layer.get_delta_weight("default") + layer.get_delta_weight("second")
    torch.testing.assert_close(_values(model)[name], expected.detach(), atol=1e-6, rtol=0)
    with model.disable_adapter():
        _assert_equal(_values(model), dict(_llama().state_dict()))


def test_the_active_adapters_copy_of_a_saved_module_is_sent():
    model = _peft(LoraConfig(**LORA, modules_to_save=["lm_head"]))
    model.add_adapter("second", LoraConfig(**LORA, modules_to_save=["lm_head"]))
    for adapter in ("second", "default"):
        model.set_adapter(adapter)
        copy = model.get_parameter(f"base_model.model.lm_head.modules_to_save.{adapter}.weight")
        nn.init.normal_(copy)
        assert torch.equal(_values(model)["lm_head.weight"], copy)


def test_an_already_merged_model_is_not_merged_twice():  # case WS-11
    model = _peft(LoraConfig(**LORA))
    once = _values(model)
    model.merge_adapter()  # pyright: ignore[reportCallIssue]
    for name, tensor in _values(model).items():
        torch.testing.assert_close(tensor, once[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("model", "both"),
    [
        (lambda: _llama(tie=True), False),
        (lambda: _peft(LoraConfig(target_modules=["q_proj"]), tie=True), False),
        (lambda: _peft(LoraConfig(target_modules=["embed_tokens"]), tie=True), True),
        (lambda: _peft(LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), tie=True), True),
    ],
)
def test_tied_weights_come_once_unless_adapters_untie_them(model: Callable[[], nn.Module], both: bool):  # case WS-05
    values = _values(model())
    assert ("lm_head.weight" in values) == both
    if both:
        assert not torch.equal(values["lm_head.weight"], values["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "config", [LoraConfig(target_modules=["embed_tokens"]), LoraConfig(modules_to_save=["lm_head"])]
)
def test_adapters_that_peft_keeps_tied_give_equal_weights(config: LoraConfig):  # case WS-05
    config.ensure_weight_tying = True
    before = _llama(tie=True).get_parameter("model.embed_tokens.weight")
    values = _values(_peft(config, tie=True))
    embedding = values["model.embed_tokens.weight"]
    assert not torch.equal(embedding, before)
    assert torch.equal(values.get("lm_head.weight", embedding), embedding)


def test_an_unsharded_weight_is_the_trainers_memory_and_only_merged_ones_are_new():
    model = _peft(LoraConfig(**LORA))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert sum(tensor.data_ptr() not in own for _, tensor in policy_tensors(model)) == 5
    plain = _llama()
    given = {name: tensor.data_ptr() for name, tensor in policy_tensors(plain)}
    assert given == {name: parameter.data_ptr() for name, parameter in plain.named_parameters()}


def test_a_gathered_tensor_is_over_when_the_next_is_asked_for(process_group: None):  # case WS-10
    tensors = policy_tensors(_sharded(_llama()))
    name, first = next(tensors)
    assert (name, first.shape) == ("model.embed_tokens.weight", (32, 16))
    alias = first.detach()
    next(tensors)
    assert first.shape == (0,)
    assert alias.shape == (32, 16)


def test_weights_come_in_the_dtype_asked_for():
    model = _llama()
    for name, tensor in policy_tensors(model, dtype=torch.bfloat16):
        assert torch.equal(tensor, model.get_parameter(name).bfloat16())


def test_shapes_are_known_before_anything_is_gathered(process_group: None):
    expected = {name: tensor.shape for name, tensor in _llama().state_dict().items()}
    assert policy_tensors(_sharded(_llama())).shapes == expected
    assert policy_tensors(_peft(LoraConfig(**LORA))).shapes == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(**LORA, use_dora=True), "DoRA"),
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "LoRA bias"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "ia3_l"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]), "trainable_tokens"),
    ],
)
def test_adapters_that_cannot_be_merged_here_raise(config: LoraConfig, message: str):  # case WS-08
    with pytest.raises(AdapterTensorError, match=rf"{message}.*merge") as caught:
        policy_tensors(_peft(config))
    assert "policy_tensors(model)" not in str(caught.value)  # that is what was done


def test_trainable_tokens_are_sent_by_a_merged_copy():
    model = _peft(LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    sent = dict(policy_tensors(copy.deepcopy(model).merge_and_unload()))
    expected = _llama()
    expected.load_state_dict(sent)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(expected(input_ids=ids).logits, model(input_ids=ids).logits)


def _quantised() -> nn.Module:
    model = _llama()
    model.model.norm.weight = nn.Parameter(torch.zeros(16, dtype=torch.int8), requires_grad=False)
    return model


def _wrapper_subclass() -> nn.Module:
    model = _llama()
    model.model.norm.weight = nn.Parameter(TwoTensor(torch.zeros(16), torch.zeros(16)))
    return model


def _offloaded() -> nn.Module:
    model = _llama()
    model.model.norm = model.model.norm.to("meta")
    return model


def _unreduced() -> nn.Module:
    model = _llama()
    mesh = init_device_mesh("cpu", (1,))
    model.model.norm.weight = nn.Parameter(DTensor.from_local(torch.zeros(16), mesh, [Partial()]))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_quantised, "norm.weight' is torch.int8: a quantised base"),
        (_wrapper_subclass, "norm.weight' is a TwoTensor"),
        (_offloaded, "norm.weight' has no memory"),
        (_unreduced, "unreduced parts"),
        (lambda: FullyShardedDataParallel(_llama(), device_id=torch.device("cpu")), r"FSDP1.*use fully_shard"),
    ],
)
def test_weights_that_cannot_be_read_raise_and_say_what_they_are(
    process_group: None, make: Callable[[], nn.Module], message: str
):
    with pytest.raises(TensorKindError, match=message):
        policy_tensors(make())


def test_two_parameters_with_one_name_raise():
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.weight = nn.Parameter(torch.zeros(2))
    model.layer._orig_mod = nn.Linear(1, 1)
    with pytest.raises(DuplicateTensorError, match=r"both layer\.weight; .*'layer\._orig_mod\.weight'"):
        policy_tensors(model)


@pytest.mark.parametrize("bad", [0, -5, 1.5, True, None])
def test_a_bucket_size_that_is_no_positive_integer_raises(bad: object):
    with pytest.raises(ValueError, match="max_bucket_bytes"):
        policy_tensors(_llama(), max_bucket_bytes=bad)  # pyright: ignore[reportArgumentType]


def test_a_dtype_that_is_no_floating_point_and_a_model_without_parameters_raise():
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        policy_tensors(_llama(), dtype=torch.int8)
    for model, message in (
        (nn.Identity(), "Identity has no parameters"),
        (_llama().state_dict(), "OrderedDict is no torch module"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_tensors(model)  # pyright: ignore[reportArgumentType]
