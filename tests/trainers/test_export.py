"""Exported models: whole folders that transformers loads with the trainer's own numbers, and vLLM by the same names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollout import LLM, SamplingParams
from rollout.cli import main
from rollout_trainers import export as export_module
from rollout_trainers.checkpoint import copy_model_files
from rollout_trainers.export import Source, export_model, find_source, plan_shards
from rollout_trainers.model_card import changed_values
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.types import Example
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text) for text in ("abc", "hello", "what", "q")]
HELD_OUT = [Example(text) for text in ("xyz", "another")]


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with float32 weights of a model whose config says otherwise, with checkpoints and a best one."""
    folder = tmp_path_factory.mktemp("export")
    model = make_tiny_llama(folder / "tiny-llama", tokenizer=True, dtype=torch.bfloat16)
    (model / "LICENSE").write_text("use it well\n")
    (model / "generation_config.json").unlink()
    values: dict[str, Any] = {
        "model": str(model),
        "name": "low ids",
        "output_dir": str(folder / "run"),
        "steps": 3,
        "engine": {"dtype": "float32", "max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 4, "prompts_per_step": 2},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"every": 1, "success_threshold": 0.5},
        "checkpoint": {"every": 1, "keep": 2, "best_metric": "eval/reward"},
        "tracking": {"wandb": "disabled"},
    }
    run(config_from_values(values), reward_functions=[share_of_low_ids], train=TRAIN, evaluation=HELD_OUT)
    return folder / "run"


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 131, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits


def test_transformers_computes_what_it_would_with_the_trainers_weights_bit_for_bit(trained: Path, tmp_path: Path):
    export(trained, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert exported.dtype == torch.float32
    optimizer = torch.load(trained / "checkpoints" / "step-000003" / "trainer.pt")["optimizers"]["optimizer"]
    config = AutoConfig.from_pretrained(trained.parent / "tiny-llama")
    trainers = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = trainers.load_state_dict(optimizer["masters"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    assert torch.equal(logits(exported), logits(trainers.eval()))


def test_the_engine_samples_from_it_what_the_trained_policy_would(trained: Path, tmp_path: Path):
    export(trained, tmp_path / "out")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    answers = []
    for folder in (tmp_path / "out", trained / "checkpoints" / "step-000003" / "model"):
        with LLM(str(folder), max_model_len=64, kv_cache_memory="2 MiB") as llm:
            answers.append([output.outputs[0] for output in llm.generate(["hello", "abc"], params, use_tqdm=False)])
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.raw_logprobs == theirs.raw_logprobs).all()


def test_the_folder_holds_what_transformers_and_vllm_look_for(trained: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(trained, out)
    names = {path.name for path in out.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {name for name in names if name.endswith((".safetensors", ".bin", ".pt"))} == {"model.safetensors"}
    assert (out / "LICENSE").read_text() == "use it well\n"
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tensors_in(out)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses others
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    assert AutoTokenizer.from_pretrained(out).encode("hello")
    # The names and shapes are those that transformers itself would save.
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    again = tensors_in(tmp_path / "again")
    assert {name: tensor.shape for name, tensor in tensors_in(out).items()} == {
        name: tensor.shape for name, tensor in again.items()
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_rounded_to_the_dtype_that_is_asked_for(trained: Path, tmp_path: Path, dtype: str):
    export(trained, tmp_path / "out", "--dtype", dtype)
    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == kind
    original = load_file(trained / "model" / "model.safetensors")
    assert all(torch.equal(tensor, original[name].to(kind)) for name, tensor in tensors_in(tmp_path / "out").items())


def test_large_models_are_split_with_an_index(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    export(trained, out, "--shard-size", "50 KB")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert f"{len(files)} files" in capsys.readouterr().out
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    original = load_file(trained / "model" / "model.safetensors")
    for file in files:
        held = load_file(file)
        assert {index["weight_map"][name] for name in held} == {file.name}
        assert sum(tensor.nbytes for tensor in held.values()) <= 50_000
        assert all(torch.equal(tensor, original[name]) for name, tensor in held.items())
    assert index["weight_map"].keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    whole, split = (AutoModelForCausalLM.from_pretrained(folder) for folder in (trained / "model", out))
    assert torch.equal(logits(whole), logits(split))


def test_a_tensor_larger_than_a_file_has_one_of_its_own():
    assert plan_shards({"a": 3, "b": 4, "c": 20, "d": 1, "e": 9}, 10) == [["a", "b"], ["c"], ["d", "e"]]


def test_the_best_checkpoint_or_any_other_can_be_chosen(trained: Path, tmp_path: Path):
    best = (trained / "checkpoints" / "best").resolve()
    step = json.loads((best / "state.json").read_text())["step"]
    export(trained, tmp_path / "best", "--best")
    export(trained, tmp_path / "step", "--step", step)
    export(best, tmp_path / "folder")
    export(trained / "checkpoints" / "best", tmp_path / "link")
    expected = load_file(best / "model" / "model.safetensors")
    for name in ("best", "step", "folder", "link"):
        found = tensors_in(tmp_path / name)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
        assert f"{step} steps" in (tmp_path / name / "README.md").read_text()


def test_the_card_says_what_the_model_is_and_gives_the_recipe_again(trained: Path, tmp_path: Path):
    export(trained, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    record = json.loads((trained / "run.json").read_text())
    assert "trained from tiny-llama" in text
    for label, of in (("untrained", "base"), ("this model", "trained")):
        assert f"| {label} | {record[of]['accuracy']:.1%} |" in text
    assert str(tmp_path.parent) not in card  # no paths of this machine
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    config = config_from_values({**recipe, "output_dir": str(trained)})
    assert changed_values(record["config"]) == recipe
    assert (config.steps, config.engine.dtype, config.algorithm.group_size) == (3, "float32", 4)


def messages(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert export(*arguments) == 2
    return capsys.readouterr().err


def test_nothing_that_is_there_is_replaced_unasked(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    (out / "inner").mkdir(parents=True)
    (out / "inner" / "mine.txt").write_text("mine")
    assert "is not empty" in messages(capsys, trained, out)
    assert "something else than an exported model" in messages(capsys, trained, out, "--force")
    assert (out / "inner" / "mine.txt").read_text() == "mine"
    for inside in (trained, trained / "model", trained / "checkpoints" / "step-000003" / "model"):
        assert "is in the folder of the run" in messages(capsys, trained, inside, "--force")
    export(trained, tmp_path / "model")
    assert "is not empty" in messages(capsys, trained, tmp_path / "model")
    assert export(trained, tmp_path / "model", "--force", "--dtype", "bfloat16") == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "empty").mkdir()
    assert export(trained, tmp_path / "empty") == 0


def test_a_model_that_no_export_wrote_is_not_replaced(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tmp_path / "base"
    shutil.copytree(trained.parent / "tiny-llama", model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    message = messages(capsys, trained, model, "--force")
    assert "'LICENSE' was not written by an export (there is no rollout_export.json in it)" in message
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_folder_to_which_something_was_added_is_not_replaced(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
):
    out = tmp_path / "out"
    export(trained, out)
    if kind == "file":
        (out / "notes.txt").write_text("mine")
    elif kind == "folder":
        (out / "notes.txt").mkdir()
    else:
        (out / "notes.txt").symlink_to(tmp_path / "elsewhere")
    assert "'notes.txt' was not written by an export, and --force" in messages(capsys, trained, out, "--force")
    assert "notes.txt" in [path.name for path in out.iterdir()]


def test_the_mark_of_an_export_is_not_taken_into_the_runs_that_begin_with_it(trained: Path, tmp_path: Path):
    export(trained, tmp_path / "out")
    assert (tmp_path / "out" / "rollout_export.json").is_file()
    copy_model_files(tmp_path / "out", tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    assert not (tmp_path / "model" / "rollout_export.json").exists()


def test_mistakes_are_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert "neither the folder of a run nor a checkpoint" in messages(capsys, tmp_path, out)
    assert "--step 9 is not valid" in messages(capsys, trained, out, "--step", 9)
    assert "checkpoint: --best and --step choose" in messages(
        capsys, trained / "checkpoints" / "step-000003", out, "--best"
    )
    assert "--shard-size='0' is not valid" in messages(capsys, trained, out, "--shard-size", "0")
    assert "was not trained with LoRA" in messages(capsys, trained, out, "--adapter")
    assert "--dtype bfloat16 is not valid with --adapter" in messages(
        capsys, trained, out, "--adapter", "--dtype", "bfloat16"
    )
    assert not out.exists()


def test_a_run_that_has_not_finished_has_no_trained_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Not even where an earlier run has left one in the same folder."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy, symlinks=True)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**record, "status": "unfinished"}))
    message = messages(capsys, copy, tmp_path / "out")
    assert "has not finished" in message and "--step (there are: " in message
    assert export(copy, tmp_path / "out", "--step", 3) == 0


def test_weights_that_are_not_the_models_are_refused(trained: Path, tmp_path: Path):
    source = find_source(trained)
    copy = tmp_path / "model"
    shutil.copytree(source.folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for change, message in (
        ({"model.norm.weight": None}, "1 tensors are missing: model.norm.weight"),
        ({"model.norm.weight": torch.zeros(3)}, r"no 'model.norm.weight' of the shape \(3,\)"),
        ({"extra": torch.zeros(3)}, "no 'extra'"),
    ):
        changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, copy / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            export_model(Source(copy, source.facts), tmp_path / "out", dtype=None, shard_bytes=10**9)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_what_was_there(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    export(trained, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(export_module, "save_tensors", full_disk)
    assert export(trained, out, "--force") == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_model_trained_with_lora_is_exported_merged_or_as_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model = make_tiny_llama(tmp_path / "base", tokenizer=True)
    values: dict[str, Any] = {
        "model": "base",
        "output_dir": str(tmp_path / "run"),
        "steps": 2,
        "policy": {"kind": "transformers", "lora": {"rank": 4}},
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 4, "prompts_per_step": 2, "recompute_logprobs": True},
        "optimizer": {"learning_rate": 1e-2},
        "tracking": {"wandb": "disabled"},
    }
    run(config_from_values(values), reward_functions=[share_of_low_ids], train=TRAIN)
    assert export(tmp_path / "run", tmp_path / "merged") == 0
    assert export(tmp_path / "run", tmp_path / "adapter", "--adapter") == 0
    assert "1 file" in capsys.readouterr().out
    assert not (tmp_path / "merged" / "adapter").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(logits(merged), logits(base))
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-4)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "peft"
    assert "LoRA adapter" in card and "needs its base model, base," in card
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        model
    )
    assert export(tmp_path / "run", tmp_path / "adapter", "--adapter", "--force") == 0
