"""What every rank of a real trainer does in the tests: train a step, push the policy, sample, and write down both.

A case leaves in its folder: `rank<n>.json` (what the engine of that rank sampled, and its receipt),
`engine.safetensors` (the memory of rank 0's engine) and `oracle.safetensors` (the policy as the trainer's own library
gathers it).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from rollout import LLM, SamplingParams
from rollout.weights.trainer_tensors import DEFAULT_BUCKET_BYTES, policy_tensors
from rollout.weights.transport import Sender, Transport
from tests.support.distributed import run_ranks
from tests.support.live_bytes import LiveBytes
from tests.support.oracle import assert_greedy_matches, load_reference, sampled_reference

PROMPT = [5, 17, 99, 3, 64, 28, 11]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TARGETS = ["q_proj", "down_proj", "embed_tokens"]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
SAVING = LoraConfig(r=4, target_modules=["v_proj", "o_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
LINEAR = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
_LAYERS = ("model.layers.0", "model.layers.1")
LORA_TRAINED = frozenset(
    ["model.embed_tokens.weight"]
    + [f"{layer}.{part}.weight" for layer in _LAYERS for part in ("self_attn.q_proj", "mlp.down_proj")]
)
SAVING_TRAINED = frozenset(
    ["lm_head.weight"] + [f"{layer}.self_attn.{part}.weight" for layer in _LAYERS for part in ("v_proj", "o_proj")]
)
LARGEST_WEIGHT = 131 * 64 * 4  # bytes of the embedding, in float32
SMALL_BUCKET = 40_000  # bytes: the tiny model has 340,000 in float32, its embedding 34,000


def rank() -> int:
    return int(os.environ["RANK"])


def trained_model(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The checkpoint `folder`, ready for training."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    assert isinstance(model, LlamaForCausalLM)
    return model.train()


def batch(data: int | None = None) -> torch.Tensor:
    """Token ids [2, 16], others on every rank; or those of rank `data`."""
    seed = 100 + (rank() if data is None else data)
    return torch.randint(3, 131, (2, 16), generator=torch.Generator().manual_seed(seed))


def take_step(model: nn.Module, backward: Callable[[torch.Tensor], Any] | None = None, data: int | None = None) -> None:
    """One real optimiser step, long enough to change what is sampled."""
    tokens = batch(data)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    backward(loss) if backward else loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Recorder:
    """An engine in this rank's process, into which every case pushes its policy."""

    folder: Path
    llm: LLM

    def push(
        self, case: str, model: nn.Module, oracle: dict[str, torch.Tensor] | None, bucket: int = SMALL_BUCKET
    ) -> None:
        """A policy update from `model`, and what it led to. `oracle` is needed on rank 0 alone."""
        with self.llm.policy_update() as update:
            loaded = update.load(policy_tensors(model, max_bucket_bytes=bucket))
        output = self.llm.generate(PROMPT, GREEDY)[0].outputs[0]
        folder = self.folder / case
        folder.mkdir(exist_ok=True)
        result = {
            "loaded": loaded,
            "tensors": update.receipt.tensors,
            "fingerprint": update.receipt.parameters_fingerprint,
            "token_ids": output.token_ids,
            "raw_logprobs": output.raw_logprobs.tolist(),
        }
        (folder / f"rank{rank()}.json").write_text(json.dumps(result))
        if rank() == 0:
            assert oracle is not None
            _save(self.llm.engine.parameters(), folder / "engine.safetensors")
            _save(oracle, folder / "oracle.safetensors")


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


def merged_by_peft(checkpoint: Path, config: LoraConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What PEFT's own merge makes of a whole state dict; nothing where there is none (on the other ranks)."""
    if not state:
        return {}
    model = get_peft_model(trained_model(checkpoint), config)
    model.load_state_dict(state)
    return dict(model.merge_and_unload().named_parameters())  # pyright: ignore[reportCallIssue]


def measure_memory(folder: Path, model: nn.Module, shards: Iterable[torch.Tensor]) -> None:
    """The most that gathering holds beside this rank's shards, for buckets of several sizes."""
    peaks = {}
    for bucket in (1, SMALL_BUCKET, DEFAULT_BUCKET_BYTES):
        with LiveBytes(shards) as live:
            total = sum(tensor.nbytes for _, tensor in policy_tensors(model, max_bucket_bytes=bucket))
        peaks[bucket] = live.peak
    (folder / f"memory.rank{rank()}.json").write_text(json.dumps({"peaks": peaks, "total": total}))


def read_memory(folder: Path, of_rank: int) -> tuple[dict[int, int], int]:
    """What `measure_memory` wrote: bucket size -> most bytes held, and the bytes of all weights."""
    measured = json.loads((folder / f"memory.rank{of_rank}.json").read_text())
    return {int(bucket): peak for bucket, peak in measured["peaks"].items()}, measured["total"]


def push_adapter(folder: Path, case: str, model: nn.Module, oracle: Mapping[str, torch.Tensor]) -> None:
    """The adapter alone, gathered, into an engine that applies it; `oracle` has the merged weights, on rank 0."""
    (folder / case).mkdir(exist_ok=True)
    with tiny_engine(folder / "untied", enable_lora=True, max_lora_rank=4) as llm:
        with llm.policy_update() as update:
            loaded = update.load_adapter("policy", model)
        output = llm.generate(PROMPT, GREEDY, lora_request="policy")[0].outputs[0]
    result = {
        "loaded": loaded,
        "bytes": update.bytes_copied,
        "token_ids": output.token_ids,
        "raw_logprobs": output.raw_logprobs.tolist(),
    }
    (folder / case / f"rank{rank()}.json").write_text(json.dumps(result))
    if rank() == 0:
        _save(oracle, folder / case / "oracle.safetensors")


def assert_adapter_arrived(folder: Path, case: str) -> None:
    """Both ranks' engines sample as the trainer's model with its adapter does, after kilobytes have moved."""
    ranks = [json.loads((folder / case / f"rank{number}.json").read_text()) for number in (0, 1)]
    assert ranks[0] == ranks[1]
    assert len(ranks[0]["loaded"]) == 4  # modules
    assert 0 < ranks[0]["bytes"] < 32_000
    oracle = load_file(folder / case / "oracle.safetensors")
    Result(ranks, {}, oracle).assert_sampled_by_the_oracle(folder / "untied")
    before = load_file(folder / "untied" / "model.safetensors")
    assert not torch.equal(oracle["model.layers.0.mlp.down_proj.weight"], before["model.layers.0.mlp.down_proj.weight"])


def send(folder: Path, sender: Sender, address: str, model: nn.Module, oracle: Mapping[str, torch.Tensor]) -> None:
    """Pushes to an engine in the process of the test (`run_ranks_and_receive`) as policy 1, and writes down what."""
    if rank() == 0:
        _save(oracle, folder / "sent.safetensors")
        (folder / "address.tmp").write_text(address)
        (folder / "address.tmp").rename(folder / "address")  # the receiver sees it whole
    report = sender.send(1, policy_tensors(model, max_bucket_bytes=SMALL_BUCKET))
    sender.close()
    (folder / f"sent.rank{rank()}.json").write_text(json.dumps(asdict(report)))


def run_ranks_and_receive(
    function: str,
    folder: Path,
    receiver: Callable[[str], Transport],
    environment: Mapping[str, str] | None = None,
) -> None:
    """`run_ranks` of a function that calls `send` once; an engine in this process takes the policy meanwhile."""
    with ThreadPoolExecutor(1) as pool, tiny_engine(folder / "untied") as llm:
        running = pool.submit(run_ranks, function, folder, environment=environment)
        while not (folder / "address").exists():
            if running.done():
                running.result()
                raise AssertionError("the ranks have ended and sent nothing")
            time.sleep(0.1)
        with llm.policy_update(1) as update:
            update.load(receiver((folder / "address").read_text()))
        running.result()
        output = llm.generate(PROMPT, GREEDY)[0].outputs[0]
        received = {
            "fingerprint": update.receipt.parameters_fingerprint,
            "token_ids": output.token_ids,
            "raw_logprobs": output.raw_logprobs.tolist(),
        }
        (folder / "received.json").write_text(json.dumps(received))
        _save(llm.engine.parameters(), folder / "received.safetensors")


def assert_received(folder: Path) -> None:
    """The engine in the test's process holds and samples from what the ranks' own library gathered."""
    received = json.loads((folder / "received.json").read_text())
    reports = [json.loads((folder / f"sent.rank{number}.json").read_text()) for number in (0, 1)]
    oracle, engine = load_file(folder / "sent.safetensors"), load_file(folder / "received.safetensors")
    assert [report["num_tensors"] for report in reports] == [len(engine)] * 2
    assert [report["num_bytes"] > 0 for report in reports] == [True, False]  # rank 0 sends, both gather
    assert reports[0]["fingerprint"] == received["fingerprint"]
    assert reports[0]["largest_bucket"] <= SMALL_BUCKET
    assert oracle.keys() == engine.keys()
    assert [name for name in engine if not torch.equal(engine[name], oracle[name])] == []
    Result([received], engine, oracle).assert_sampled_by_the_oracle(folder / "untied")


def tiny_engine(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, kv_cache_memory="1MiB", block_size=4, max_num_batched_tokens=64, **options)


@dataclass(frozen=True)
class Result:
    """What the ranks wrote for one case."""

    ranks: list[dict[str, Any]]
    engine: dict[str, torch.Tensor]
    oracle: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path) -> Result:
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        return cls(ranks, load_file(folder / "engine.safetensors"), load_file(folder / "oracle.safetensors"))

    def assert_every_rank_holds_the_trainers_policy(
        self, checkpoint: Path, merged: bool = False, trained: Container[str] | None = None
    ) -> None:
        """Each weight came once, all engines are equal and hold the trainer's policy, which is not the checkpoint.

        Bit for bit; with `merged` up to the rounding of a float32 sum, since PEFT adds in another order. `trained`
        are the weights that were trained, all of them by default.
        """
        before = load_file(checkpoint / "model.safetensors")
        names = sorted(before)
        for one in self.ranks:
            assert sorted(one["loaded"]) == names
            for field in ("tensors", "fingerprint", "token_ids", "raw_logprobs"):
                assert one[field] == self.ranks[0][field]
        for name in names:
            expected = self.oracle[name].to(self.engine[name].dtype)
            torch.testing.assert_close(self.engine[name], expected, rtol=0, atol=1e-6 if merged else 0, msg=name)
            changed = not torch.equal(self.engine[name], before[name].to(self.engine[name].dtype))
            assert changed == (trained is None or name in trained), name

    def assert_sampled_by_the_oracle(self, checkpoint: Path, atol: float = 1e-4) -> None:
        """Tokens and logprobs are those of transformers in float32 over the oracle's weights."""
        model = load_reference(checkpoint)
        load_policy(model, self.oracle)
        token_ids = self.ranks[0]["token_ids"]
        if atol <= 1e-4:
            assert_greedy_matches(model, PROMPT, token_ids)
        expected = torch.from_numpy(sampled_reference(model, PROMPT, token_ids))
        actual = torch.tensor(self.ranks[0]["raw_logprobs"], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def load_policy(model: PreTrainedModel, policy: dict[str, torch.Tensor]) -> None:
    """Puts a whole policy into a transformers model; tied names may be missing."""
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in policy.items()}, strict=False)
    assert unexpected == []
    assert missing in ([], ["lm_head.weight"])
