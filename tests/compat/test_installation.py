"""What `import vllm` finds: nothing, unless asked; then this engine; then nothing again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

import rollout
import rollout.compat
from rollout.compat.vllm import LLM
from tests.support.tiny import make_tiny_llama
from tests.support.trl import needs_trl


def test_importing_the_package_puts_nothing_in_the_place_of_vllm():
    assert not any(name.split(".")[0] == "vllm" for name in sys.modules)


def test_names_that_clients_import_are_there_until_uninstall(stand_in: None):
    vllm = importlib.import_module("vllm")
    assert (vllm.LLM, vllm.SamplingParams, vllm.RequestOutput) == (LLM, rollout.SamplingParams, rollout.RequestOutput)
    params = importlib.import_module("vllm.sampling_params")
    assert params.StructuredOutputsParams is rollout.StructuredOutputsParams
    assert vllm.sampling_params is params
    assert importlib.import_module("vllm.lora.request").LoRARequest is rollout.LoRARequest
    network = importlib.import_module("vllm.utils.network_utils")
    assert len(network.get_ip().split(".")) == 4
    assert 0 < network.get_open_port() < 65536
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.beam"):
        importlib.import_module("vllm.beam")
    rollout.compat.uninstall()
    assert importlib.util.find_spec("vllm") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm.sampling_params")


@needs_trl
def test_trl_takes_it_for_a_version_that_it_supports(stand_in: None, recwarn: pytest.WarningsRecorder):
    from trl.import_utils import is_vllm_available

    assert is_vllm_available(min_version="0.28.0")
    assert not [warning for warning in recwarn if "vLLM" in str(warning.message)]
    rollout.compat.uninstall()
    assert not is_vllm_available()


@pytest.mark.parametrize("module", ["nccl_common", "packed_tensor"])
def test_the_weight_transfer_of_servers_is_refused_where_it_is_called(stand_in: None, module: str):
    names = vars(importlib.import_module(f"vllm.distributed.weight_transfer.{module}"))
    for name in ("trainer_init", "packed_nccl_broadcast_producer"):
        if name in names:
            with pytest.raises(ValueError, match="vllm_mode='colocate'"):
                names[name](object(), packed=True)


def test_options_are_checked_at_once_and_leave_nothing_behind():
    for options, message in (
        ({"kv_cache": "1MiB"}, "kv_cache='1MiB' is not a field of EngineConfig: .*kv_cache_memory"),
        ({"dtype": "int4"}, "dtype='int4' is not valid"),
        ({"seed": 3}, "seed=3 cannot be given"),
        ({"model": "here"}, "model='here' cannot be given"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout.compat.install(**options)
    assert "vllm" not in sys.modules


def test_options_win_over_arguments_and_a_second_call_replaces_them(stand_in: None, tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("options") / "model")
    with LLM(folder, max_num_batched_tokens=4096, max_num_seqs=3, gpu_memory_utilization=0.3) as llm:
        assert (llm.config.max_num_batched_tokens, llm.config.max_num_seqs, llm.config.block_size) == (64, 3, 4)
    rollout.compat.install(kv_cache_memory="1MiB", dtype="bfloat16")
    with LLM(folder, max_num_batched_tokens=128) as llm:
        assert (llm.config.max_num_batched_tokens, llm.config.block_size, llm.config.dtype) == (128, 16, "bfloat16")


def test_vllm_itself_is_not_replaced_once_it_was_imported(monkeypatch: pytest.MonkeyPatch):
    real = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", real)
    with pytest.raises(RuntimeError, match="imported already"):
        rollout.compat.install()
    rollout.compat.uninstall()
    assert sys.modules["vllm"] is real


def test_a_module_that_has_looked_for_vllm_in_vain_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trl.generation.vllm_generation", ModuleType("trl.generation.vllm_generation"))
    with pytest.raises(RuntimeError, match=r"trl\.generation\.vllm_generation has been imported already"):
        rollout.compat.install()
    assert "vllm" not in sys.modules
