"""LoRA runs that send the adapter alone: the engine samples with what PEFT computes, and holds its base weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.errors import FingerprintMismatchError
from rollout.weights.receipt import Receipt, make_receipt
from rollout_trainers.data_parallel import check_same_policy
from rollout_trainers.environments import EnvironmentFactory
from rollout_trainers.grpo import GRPOTrainer
from rollout_trainers.ranks import Ranks
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example
from tests.support.environments import Echo
from tests.support.tiny import make_tiny_llama

TRAIN = [Example(text, {"answer": text}) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
HELD_OUT = [Example(text, {"answer": text}) for text in ("xyz", "more", "last")]
ADAPTER = ("policy.lora.send=adapter",)
RANK = 8


class LowIds:
    """The share of token ids below 60; `last` are the ids of its last call."""

    __name__ = "low_ids"

    def __init__(self, breaks_after: int | None = None) -> None:
        self.last: list[list[int]] = []
        self._left = breaks_after

    def __call__(self, prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        if self._left == 0:
            raise KeyboardInterrupt
        self._left = None if self._left is None else self._left - 1
        self.last = completion_ids
        return [sum(token < 60 for token in ids) / max(1, len(ids)) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


def train(
    model: Path,
    output: Path,
    *overrides: str,
    reward: LowIds | None = None,
    evaluation: list[Example] | None = None,
    environment: EnvironmentFactory | None = None,
) -> list[dict[str, Any]]:
    """The metrics of each step."""
    values = {
        "model": str(model),
        "output_dir": str(output),
        "steps": 4,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "policy": {"kind": "transformers", "lora": {"rank": RANK, "alpha": 32, "initialization": "gaussian"}},
        "sampling": {"max_tokens": 12},
        "algorithm": {
            "group_size": 4,
            "prompts_per_step": 3,
            "micro_batch_tokens": 100,
            "recompute_logprobs": True,
        },
        "loss": {"kl_coefficient": 0.01},
        "optimizer": {"learning_rate": 3e-2},
        "tracking": {"wandb": "disabled"},
    }
    run(
        config_from_values(values, overrides),
        reward_functions=[reward or LowIds()],
        train=TRAIN,
        evaluation=evaluation or [],
        environment=environment,
    )
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def record_receipts(monkeypatch: pytest.MonkeyPatch) -> list[Receipt]:
    receipts: list[Receipt] = []
    update_engine = GRPOTrainer.update_engine

    def recording(trainer: GRPOTrainer, version: int) -> None:
        update_engine(trainer, version)
        assert isinstance(trainer.receipt, Receipt)
        receipts.append(trainer.receipt)

    monkeypatch.setattr(GRPOTrainer, "update_engine", recording)
    return receipts


def assert_sampled_from_the_adapter(rows: list[dict[str, Any]]) -> None:  # case TR-06
    """The policy moves far from its base, and the sampler's logprobs stay those of the trainer's model with it."""
    assert rows[0]["kl"] < 1e-6  # it begins as no change: the reference is the base with the adapter off
    assert rows[-1]["kl"] > 0.02
    assert all(0 < row["sampling/logp_difference/max"] < 1e-3 for row in rows)


def test_updates_send_the_adapters_bytes_and_evaluations_sample_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    receipts = record_receipts(monkeypatch)
    reward = LowIds()
    rows = train(model, tmp_path / "adapter", *ADAPTER, reward=reward, evaluation=HELD_OUT)
    assert_sampled_from_the_adapter(rows)
    adapter = load_file(tmp_path / "adapter/model/adapter/adapter_model.safetensors")
    sent = sum(each.nbytes for each in adapter.values()) + 4 * len(adapter) // 2  # with a scale for each A and B
    assert [receipt.bytes_copied for receipt in receipts] == [sent] * 4
    assert len({receipt.parameters_fingerprint for receipt in receipts}) == 1  # the base's
    assert len({receipt.fingerprint for receipt in receipts}) == 4
    merged = train(model, tmp_path / "merged", evaluation=HELD_OUT)
    whole = load_file(model / "model.safetensors")
    assert [receipt.bytes_copied for receipt in receipts[4:]] == [sum(each.nbytes for each in whole.values())] * 4
    for ours, theirs in zip(rows, merged, strict=True):  # float32: the same but for rounding
        assert ours["reward"] == theirs["reward"]
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-2, abs=1e-6)

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter/model/adapter"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [
        row
        for row in read_json_lines(tmp_path / "adapter/samples.jsonl")
        if row["split"] == "held out" and row["step"] == 4
    ]
    assert len(samples) == len(reward.last) == len(HELD_OUT)
    for row, ids, example in zip(samples, reward.last, HELD_OUT, strict=True):
        prompt = tokenizer(str(example.prompt))["input_ids"]
        assert row["logprob"] == pytest.approx(mean_logprob(peft, prompt, ids), abs=1e-4)
        assert row["logprob"] == pytest.approx(mean_logprob(saved, prompt, ids), abs=1e-4)
        with peft.disable_adapter():
            assert abs(row["logprob"] - mean_logprob(peft, prompt, ids)) > 1e-2


@torch.no_grad()
def mean_logprob(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> float:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return float(torch.log_softmax(logits, -1)[torch.arange(len(completion)), completion].mean())


@pytest.mark.parametrize(
    "options",
    [
        ("policy.lora.dropout=0.1", "algorithm.minibatches=2", "engine.dtype=bfloat16"),
        ("asynchrony.over_sampling=0.7",),  # samples go on under the next policy
        ("asynchrony.mode=one_step_off", "engine.sleep=false"),
    ],
    ids=["in turns", "over-sampled", "one step off"],
)
def test_a_resumed_run_is_the_unbroken_one(options: tuple[str, ...], model: Path, tmp_path: Path):
    options = (*ADAPTER, *options, "checkpoint.every=2")
    train(model, tmp_path / "unbroken", *options)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "broken", *options, reward=LowIds(breaks_after=3))
    train(model, tmp_path / "broken", *options, "resume=true")
    kept = ("step", "reward", "loss", "grad_norm", "kl", "entropy")
    runs = [read_json_lines(tmp_path / name / "metrics.jsonl") for name in ("unbroken", "broken")]
    rows = [[[row[name] for name in kept] for row in each] for each in runs]
    assert rows[0] == rows[1]
    assert runs[0][-1]["kl"] > 0.02
    if "engine.dtype=bfloat16" not in options:  # whatever the policy itself has sampled, and not an older one
        own = [row for row in runs[0] if row["sampling/logp_difference/num_tokens"] > 0]
        assert all(row["sampling/logp_difference/max"] < 1e-3 for row in own)
        assert own[-1]["step"] > 2 or "engine.sleep=false" in options  # a step ahead all samples are an older policy's
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("unbroken", "broken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("options", [(), ("asynchrony.over_sampling=0.4",)], ids=["in turns", "over-sampled"])
def test_every_turn_of_an_episode_is_sampled_with_the_adapter(options: tuple[str, ...], model: Path, tmp_path: Path):
    rows = train(model, tmp_path, *ADAPTER, *options, "environment.max_turns=2", environment=lambda: Echo(2))
    assert rows[-1]["num_turns/mean"] > 1
    own = [row for row in rows if row["sampling/logp_difference/num_tokens"] > 0]  # of the policy's own samples
    assert len(own) > 1
    assert_sampled_from_the_adapter(own)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.lora.send=deltas", "policy.lora.send='deltas' is not valid: it must be one of 'merged', 'adapter'"),
        ("policy.lora={rank: 0, send: adapter}", "policy.lora.send='adapter' is not valid: it must be left out where"),
        ("tracking.diagnose_above=0.1", "tracking.diagnose_above=0.1 is not valid: it must be left out with policy.lo"),
        (
            "policy.lora.target_modules=[q_proj, embed_tokens]",
            "policy.lora.target_modules is not valid for this model: its embeddings and its head share their weight",
        ),
    ],
)
def test_what_an_engine_cannot_apply_is_refused_before_the_first_step(
    override: str, message: str, model: Path, tmp_path: Path
):
    with pytest.raises(ValueError, match="is not valid") as raised:
        train(model, tmp_path, *ADAPTER, override)
    assert str(raised.value).startswith(message)


def test_embeddings_that_the_engine_cannot_adapt_are_refused_before_the_first_step(tmp_path: Path):
    untied = make_tiny_llama(tmp_path / "untied", tokenizer=True, tie=False)
    with pytest.raises(ValueError, match="since the engine cannot apply this adapter"):
        train(untied, tmp_path, *ADAPTER, "policy.lora.target_modules=[q_proj, embed_tokens]")


class TwoRanks(Ranks):
    """Rank 0, beside another one that holds `other`."""

    def __init__(self, other: Receipt) -> None:
        super().__init__()
        self._other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, (self._other.parameters_fingerprint, self._other.adapters)]


def test_ranks_that_hold_different_adapters_are_noticed():
    base = {"weight": torch.ones(4, 4)}
    one, same, other = (
        make_receipt(3, base, {}, {}, adapters={"policy/q_proj.lora_A.weight": torch.full((2, 4), value)})
        for value in (1.0, 1.0, 2.0)
    )
    check_same_policy(TwoRanks(same), one)
    with pytest.raises(FingerprintMismatchError, match="rank 1 holds another adapter than rank 0"):
        check_same_policy(TwoRanks(other), one)
