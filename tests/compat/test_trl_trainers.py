"""TRL's own trainers, unmodified, with this engine in the place of vLLM (colocate mode), in one process.

The oracle is TRL's: the logprobs that its transformers model gives to the sampled tokens, which it logs beside the
sampler's. The learning rate is so high that a policy which was not pushed would differ by far.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import rollout.compat
from rollout.compat.vllm import LLM
from rollout.errors import TiedTensorError, WeightsNotLoadedError
from tests.support.tiny import make_tiny_llama
from tests.support.trl import (
    ENGINE,
    MAX_TOKENS,
    conversations,
    grpo_trainer,
    logged,
    needs_trl,
    online_dpo_trainer,
    rloo_trainer,
    spread,
)

pytestmark = [pytest.mark.slow, needs_trl, pytest.mark.usefixtures("stand_in")]

SAME = 1e-4  # nats a token: float32 sums in another order
DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("trl") / "model", vocab_size=160, tokenizer=True)


class Watch:
    """A reward function that looks, while TRL scores, at whether the engine holds the trainer's policy."""

    def __init__(self) -> None:
        self.__name__ = "watch"  # TRL names rewards by it
        self.engine: Any = None
        self.model: Any = None
        self.versions: list[int] = []
        self.texts: list[str] = []

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.versions.append(self.engine.policy_version)
        held = self.engine.engine.parameters()
        for name, parameter in self.model.named_parameters():
            assert torch.equal(held[name], parameter), name
        self.texts += [completion[0]["content"] for completion in completions]
        return spread(completion_ids)


def check_sampled_by_the_policy(trainer: Any, steps: int = 2) -> None:
    differences = logged(trainer, DIFFERENCE)
    assert len(differences) == steps
    assert max(differences) < SAME
    for name in ("min", "mean", "max"):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{name}") == pytest.approx([1.0] * steps, abs=1e-3)
    assert min(logged(trainer, "grad_norm")) > 0


@pytest.mark.parametrize("sleeps", [False, True])
def test_grpo(folder: Path, tmp_path: Path, sleeps: bool):
    trainer = grpo_trainer(folder, tmp_path, use_vllm=True, vllm_enable_sleep_mode=sleeps)
    llm = trainer.vllm_generation.llm
    assert isinstance(llm, LLM)
    trainer.train()
    check_sampled_by_the_policy(trainer)
    assert llm.policy_version == 2
    assert llm.sleeping_tags == (("weights", "kv_cache", "graphs") if sleeps else ())


def test_grpo_would_show_a_policy_that_is_not_pushed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = grpo_trainer(folder, tmp_path, use_vllm=True)
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    trainer.train()
    before, after = logged(trainer, DIFFERENCE)
    assert before < SAME < 100 * SAME < after


def test_grpo_has_the_policy_whenever_it_samples(folder: Path, tmp_path: Path):
    watch = Watch()
    trainer = grpo_trainer(
        folder, tmp_path, watch, use_vllm=True, gradient_accumulation_steps=2, steps_per_generation=1, max_steps=2
    )
    watch.engine, watch.model = trainer.vllm_generation.llm, trainer.model
    trainer.train()
    assert watch.versions == [1, 1, 2, 2]  # pushed once a step, whatever the number of generations


def test_grpo_with_lora(folder: Path, tmp_path: Path):  # case WS-11: TRL merges before it pushes
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer = grpo_trainer(folder, tmp_path, use_vllm=True, vllm_enable_sleep_mode=True, peft_config=config)
    trainer.train()
    check_sampled_by_the_policy(trainer)


def test_grpo_at_another_temperature(folder: Path, tmp_path: Path):  # case TR-06
    trainer = grpo_trainer(folder, tmp_path, use_vllm=True, temperature=0.6)
    trainer.train()
    check_sampled_by_the_policy(trainer)


def test_grpo_within_a_grammar_and_with_sampling_options(folder: Path, tmp_path: Path):
    watch = Watch()
    trainer = grpo_trainer(
        folder, tmp_path, watch, use_vllm=True, vllm_structured_outputs_regex="[ab]{3}", top_k=20, min_p=0.0
    )
    watch.engine, watch.model = trainer.vllm_generation.llm, trainer.model
    trainer.train()
    assert len(set(watch.texts)) > 1
    assert all(len(text) == 3 and set(text) <= set("ab") for text in watch.texts)


def test_grpo_with_tools_goes_on_after_what_they_returned(tmp_path: Path):
    """The grammar lets every turn be a call; TRL makes it, and asks for the next turn with its result behind it."""
    import trl

    rollout.compat.install(**ENGINE | {"kv_cache_memory": "16MiB"})
    folder = make_tiny_llama(tmp_path / "model", vocab_size=160, tokenizer=True, max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    template = Path(str(trl.__file__)).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text()
    calls: list[tuple[int, int]] = []

    def add(a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        calls.append((a, b))
        return a + b

    call = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}\n</tool_call>'
    trainer = grpo_trainer(
        folder, tmp_path, use_vllm=True, vllm_structured_outputs_regex=call, tools=[add], processing_class=tokenizer,
        vllm_importance_sampling_correction=False, max_tool_calling_iterations=1, max_completion_length=200,
        per_device_train_batch_size=4, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert len(calls) == 4
    assert len(set(calls)) > 1
    assert logged(trainer, "tools/call_frequency") == [1.0]
    assert logged(trainer, "tools/failure_frequency") == [0.0]
    assert min(logged(trainer, "grad_norm")) > 0


def test_grpo_evaluates_with_the_policy_of_the_moment(folder: Path, tmp_path: Path):
    data = conversations().select(range(2))
    trainer = grpo_trainer(
        folder, tmp_path, use_vllm=True, eval_strategy="steps", eval_steps=1, eval_dataset=data,
        per_device_eval_batch_size=8,
    )  # fmt: skip
    trainer.train()
    assert max(logged(trainer, f"eval_{DIFFERENCE}")) < SAME
    assert len(logged(trainer, f"eval_{DIFFERENCE}")) == 2


def test_rloo(folder: Path, tmp_path: Path):
    watch = Watch()
    trainer = rloo_trainer(folder, tmp_path, watch, use_vllm=True)
    watch.engine, watch.model = trainer.vllm_generation.llm, trainer.model
    trainer.train()
    assert watch.versions == [1, 2]
    assert min(logged(trainer, "grad_norm")) > 0


@pytest.mark.parametrize("sleeps", [False, True])
def test_online_dpo(folder: Path, tmp_path: Path, sleeps: bool):
    lengths: list[int] = []

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        lengths.extend(len(completion[0]["content"]) for completion in completions)
        return [float(len(set(completion[0]["content"]))) for completion in completions]

    trainer = online_dpo_trainer(
        folder, tmp_path, reward, use_vllm=True, per_device_train_batch_size=2, vllm_enable_sleep_mode=sleeps
    )
    trainer.train()
    assert trainer.llm.policy_version == 2
    assert len(lengths) == 2 * 2 * 2  # steps, prompts, samples
    assert max(lengths) <= 2 * MAX_TOKENS  # a token is one or two letters
    assert min(logged(trainer, "grad_norm")) > 0


def test_online_dpo_that_samples_twice_a_push_finds_no_weights_after_sleep(folder: Path, tmp_path: Path):
    options = {"vllm_enable_sleep_mode": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = online_dpo_trainer(
        folder, tmp_path, lambda completions, **_: [1.0] * len(completions), use_vllm=True, **options
    )
    with pytest.raises(WeightsNotLoadedError, match="policy_update"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_model_impl": "transformers"}, "model_impl='transformers'"),
        ({"vllm_max_model_length": 4096}, "max_model_len=4096"),
        ({"generation_kwargs": {"top_p": 0.0}}, "top_p=0.0"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        grpo_trainer(folder, tmp_path, use_vllm=True, **options).train()


def test_without_the_stand_in_trl_says_that_there_is_no_vllm(folder: Path, tmp_path: Path):
    rollout.compat.uninstall()
    assert "vllm" not in sys.modules
    with pytest.raises(ImportError, match="vLLM is not available"):
        grpo_trainer(folder, tmp_path, use_vllm=True)


@pytest.mark.parametrize("sleeps", [False, True])
def test_rollout_func_with_the_engine_of_trl_is_corrected_by_trl(folder: Path, tmp_path: Path, sleeps: bool):
    function = rollout.compat.make_rollout_func()
    trainer = grpo_trainer(
        folder, tmp_path, use_vllm=True, rollout_func=function, vllm_enable_sleep_mode=sleeps,
        gradient_accumulation_steps=2, steps_per_generation=1,
    )  # fmt: skip
    trainer.train()
    check_sampled_by_the_policy(trainer)


def test_rollout_func_with_an_engine_of_its_own(folder: Path, tmp_path: Path):
    watch = Watch()
    samples: list[Any] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        assert columns["answer"]  # the data set's own columns are there too
        assert [sample.token_ids for sample in columns["rollout_sample"]] == completion_ids
        samples.extend(columns["rollout_sample"])
        return watch(completions, completion_ids)

    with rollout.LLM(folder, **ENGINE) as llm:
        function = rollout.compat.make_rollout_func(llm)
        trainer = grpo_trainer(folder, tmp_path, reward, rollout_func=function, off_policy_mask_threshold=1e-3)
        watch.engine, watch.model = llm, trainer.model
        trainer.train()
        assert watch.versions == [1, 2]
        assert [sample.policy_versions[0].version for sample in samples] == [1] * 8 + [2] * 8
        assert len({tuple(sample.token_ids) for sample in samples}) > 8
        assert logged(trainer, DIFFERENCE) == []  # TRL corrects a sampler of its own only
        assert min(logged(trainer, "grad_norm")) > 0  # no sequence was masked as off policy
        trainer = grpo_trainer(folder, tmp_path, reward, rollout_func=function)  # begins with the checkpoint again
        watch.model = trainer.model
        llm.sleep(level=2)
        trainer.train()
        assert watch.versions == [1, 2, 3, 4]


def test_lora_on_a_tied_embedding_is_not_taken_for_another_policy(folder: Path, tmp_path: Path):
    """Merged, embedding and head are two matrices, of which the engine's model has one."""
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False)
    with rollout.LLM(folder, **ENGINE) as llm:
        function = rollout.compat.make_rollout_func(llm)
        trainer = grpo_trainer(folder, tmp_path, rollout_func=function, peft_config=config)
        with pytest.raises(TiedTensorError, match="embed_tokens"):
            trainer.train()


def test_rollout_func_refuses_what_it_does_not_do(folder: Path, tmp_path: Path):
    trainer = grpo_trainer(folder, tmp_path, rollout_func=rollout.compat.make_rollout_func())
    with pytest.raises(ValueError, match="use_vllm=True"):
        trainer.train()
    parts = [[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]]
    with rollout.LLM(folder, **ENGINE) as llm:
        function = rollout.compat.make_rollout_func(llm)
        with pytest.raises(ValueError, match="content is text"):
            function(parts, trainer)
        trainer.tools = [spread]
        with pytest.raises(ValueError, match="has no tools"):
            function([[{"role": "user", "content": "hi"}]], trainer)
