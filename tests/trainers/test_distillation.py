"""On-policy distillation: its advantages against plain loops, its gradient against the KL's own by enumeration, and its
trainer end to end with the real engine on tiny random models."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rollout.platform.platform import platform_for
from rollout_trainers.distillation import add_teacher_advantages, discounted_to_go, teacher_metrics
from rollout_trainers.packing import pack, pack_micro_batches
from rollout_trainers.ranks import Ranks
from rollout_trainers.recipe import config_from_values
from rollout_trainers.run import run
from rollout_trainers.teacher import Teacher
from rollout_trainers.teacher_config import TeacherSection
from rollout_trainers.tracking import read_json_lines
from rollout_trainers.types import Example, Sample
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.samples import make_sample
from tests.support.tiny import make_tiny_llama, write_tiny_tokenizer

TRAIN = [Example(text) for text in ("abc", "hello", "what", "two and two", "q", "the end")]
TEACHER = TeacherSection("teacher")


def read_sample(ours: list[float], theirs: list[float], advantage: float = 0.0) -> Sample:
    """A sample of tokens that the policy and the teacher have made with these logprobs."""
    sample = make_sample([1], list(range(len(ours))), advantage=advantage)
    sample.sampled_logprobs = np.array(ours, np.float32)
    sample.teacher_logprobs = np.array(theirs, np.float32)
    return sample


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_discounted_sums_are_those_of_a_plain_loop(discount: float):
    values = np.random.default_rng(0).normal(size=7)
    expected = [sum(values[later] * discount ** (later - place) for later in range(place, 7)) for place in range(7)]
    np.testing.assert_allclose(discounted_to_go(values, discount), expected, rtol=1e-12)
    assert discounted_to_go(np.zeros(0), discount).shape == (0,)


@pytest.mark.parametrize("baseline", ["none", "batch_mean"])
@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_advantages_are_those_of_a_plain_loop(baseline: Any, discount: float):
    generator = np.random.default_rng(1)
    lengths, task = (3, 1, 5), (0.5, -1.0, 2.0)
    pairs = [generator.normal(-2, 1, size=(2, length)).astype(np.float32) for length in lengths]
    samples = [
        read_sample(pair[0].tolist(), pair[1].tolist(), advantage) for pair, advantage in zip(pairs, task, strict=True)
    ]
    section = TeacherSection("teacher", weight=0.3, discount=discount, baseline=baseline, reward_weight=2.0)
    add_teacher_advantages(samples, section)
    to_go = [
        [sum(float(theirs[k] - ours[k]) * discount ** (k - t) for k in range(t, len(ours))) for t in range(len(ours))]
        for ours, theirs in pairs
    ]
    mean = sum(map(sum, to_go)) / sum(lengths) if baseline == "batch_mean" else 0.0
    for sample, values, advantage in zip(samples, to_go, task, strict=True):
        assert sample.token_advantages is not None
        expected = [0.3 * (value - mean) + 2.0 * advantage for value in values]
        np.testing.assert_allclose(sample.token_advantages, expected, rtol=1e-5, atol=1e-6)
        assert sample.advantage == pytest.approx(np.mean(expected), abs=1e-6)


def test_a_teacher_that_is_the_policy_moves_nothing():
    sample = read_sample([-1.5, -0.25], [-1.5, -0.25])
    add_teacher_advantages([sample], TEACHER)
    assert not sample.has_advantage
    assert teacher_metrics([sample])["teacher/kl"] == 0.0


def test_samples_that_the_teacher_has_not_read_and_samples_without_tokens_take_no_part():
    unread, empty = make_sample([1], [5, 6], advantage=1.0), read_sample([], [])
    samples = [unread, empty, read_sample([-1.0, -2.0], [-2.0, -5.0])]
    add_teacher_advantages(samples, TeacherSection("teacher", baseline="batch_mean"))
    assert unread.token_advantages is None
    assert empty.advantage == 0.0
    assert samples[2].token_advantages is not None
    assert samples[2].token_advantages.tolist() == [1.0, -1.0]
    metrics = teacher_metrics(samples)
    assert metrics == {"teacher/kl": 2.0, "teacher/sequence_kl": 2.0, "teacher/logprob": -3.5}
    assert teacher_metrics([unread]) == teacher_metrics([empty]) == {}


class SecondOfTwo(Ranks):
    """What it is told by the first is `others`."""

    def __init__(self, others: list[Any]) -> None:
        super().__init__()
        self.others = others

    def gather_all(self, values: Sequence[Any]) -> tuple[list[Any], slice]:
        return [*self.others, *values], slice(len(self.others), None)


def test_the_baseline_is_the_mean_over_the_tokens_of_all_ranks():
    sample = read_sample([-1.0, -2.0], [-2.0, -5.0])
    ranks = SecondOfTwo([np.array([2.0, 5.0, 2.0])])
    add_teacher_advantages([sample], TeacherSection("teacher", baseline="batch_mean"), ranks)
    assert sample.token_advantages is not None
    assert sample.token_advantages.tolist() == [-2.0, -4.0]


# case TR-04 (the KL's value and gradient)
@pytest.mark.parametrize("whole_sequences", [True, False])
def test_the_expected_gradient_is_that_of_the_kl_to_the_teacher(whole_sequences: bool):
    """Two tokens of a vocabulary of four, all sixteen samples weighed by their probability. With a discount of 1 the
    KL of whole sequences; with 0 the KL of each token's distribution, the tokens before it as they are."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    policy = (first, torch.outer(torch.arange(4.0, dtype=torch.float64) - 1, second))
    teacher = (torch.randn(4, generator=generator).double(), torch.randn(4, 4, generator=generator).double())

    def logprobs(logits: tuple[torch.Tensor, torch.Tensor], tokens: tuple[int, int]) -> torch.Tensor:
        rows = torch.log_softmax(logits[0], -1), torch.log_softmax(logits[1], -1)
        return torch.stack([rows[0][tokens[0]], rows[1][tokens[0], tokens[1]]])

    pairs = [(one, other) for one in range(4) for other in range(4)]
    ours = {pair: logprobs(policy, pair) for pair in pairs}
    samples = [read_sample(ours[pair].tolist(), logprobs(teacher, pair).tolist()) for pair in pairs]
    add_teacher_advantages(samples, TeacherSection("teacher", discount=float(whole_sequences)))
    surrogate = torch.zeros((), dtype=torch.float64)
    for pair, sample in zip(pairs, samples, strict=True):
        probability = ours[pair].sum().exp().detach()
        surrogate = surrogate - probability * (torch.tensor(sample.token_advantages).double() * ours[pair]).sum()
    p, q = (torch.log_softmax(logits[0], -1) for logits in (policy, teacher))
    rows = [torch.log_softmax(logits[1], -1) for logits in (policy, teacher)]
    by_row = (rows[0].exp() * (rows[0] - rows[1])).sum(-1)  # KL of the second token after each first one
    reached = p.exp() if whole_sequences else p.exp().detach()
    kl = (p.exp() * (p - q)).sum() + (reached * by_row).sum()
    expected = torch.autograd.grad(kl, (first, second), retain_graph=True)
    for gradient, right in zip(torch.autograd.grad(surrogate, (first, second)), expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-6)
    mean = sum(
        ours[pair].sum().exp().item() * teacher_metrics([sample])["teacher/sequence_kl"]
        for pair, sample in zip(pairs, samples, strict=True)
    )
    assert mean == pytest.approx(kl.item(), rel=1e-5)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("student"), tokenizer=True)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape than the student, with the same tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    return make_tiny_llama(folder, tokenizer=True, hidden_size=32, num_layers=3, seed=7)


# case TR-06
@pytest.mark.parametrize("sleep", [True, False])
def test_a_teachers_logprobs_are_those_of_transformers_at_the_sampling_temperature(sleep: bool, teacher: Path):
    generator = np.random.default_rng(2)
    samples = [make_sample([4, 5, 6], generator.integers(3, 131, size).tolist()) for size in (5, 1, 9)]
    samples[2].loss_mask = np.arange(9) % 3 != 1  # what an environment has answered is read and not scored
    samples[2].sampled_logprobs = samples[2].sampled_logprobs[samples[2].loss_mask]
    reading = Teacher(teacher, "auto", platform_for("cpu"), 0.7, sleep)
    oracle = load_reference(teacher)
    for _ in range(2):  # asleep in between
        assert (reading.memory.resident_bytes() == 0) == sleep
        found = reading.logprobs(pack_micro_batches(samples, 16))
        for own, sample in zip(torch.cat(found).split([s.num_tokens for s in samples]), samples, strict=True):
            rows = reference_logprobs(oracle, sample.prompt_token_ids + sample.completion_token_ids).double()
            tempered = torch.log_softmax(rows[2:-1] / 0.7, -1)
            right = tempered[torch.arange(len(tempered)), torch.tensor(sample.completion_token_ids)]
            if sample.loss_mask is not None:
                right = right[torch.from_numpy(sample.loss_mask)]
            np.testing.assert_allclose(own.numpy(), right.numpy(), atol=1e-4)
    assert reading.logprobs([]) == []


def test_a_token_that_the_teacher_does_not_know_is_refused(teacher: Path):
    reading = Teacher(teacher, "auto", platform_for("cpu"), 1.0, True)
    with pytest.raises(ValueError, match="its teacher, with 131, does not know"):
        reading.logprobs([pack([make_sample([4], [131])], [0])])
    assert reading.memory.resident_bytes() == 0


def train(student: Path, teacher: Path, output: Path, *overrides: str, **options: Any) -> list[dict[str, Any]]:
    """The metrics of each step."""
    values = {
        "model": str(student),
        "output_dir": str(output),
        "steps": 2,
        "engine": {"max_model_len": 64, "kv_cache_memory": "2 MiB"},
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 1, "prompts_per_step": 6, "micro_batch_tokens": 40},
        "teacher": {"model": str(teacher)},
        "optimizer": {"learning_rate": 5e-3},
        "tracking": {"wandb": "disabled", "diagnose_above": None},
    }
    run(config_from_values(values, overrides), train=TRAIN, **options)
    return [row for row in read_json_lines(output / "metrics.jsonl") if "reward" in row]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def test_the_policy_comes_near_to_its_teacher_without_a_reward_function(student: Path, teacher: Path, tmp_path: Path):
    options = ("steps=8", "algorithm.prompts_per_step=24", "algorithm.minibatches=4", "optimizer.learning_rate=1e-2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing complains of the missing rewards
        rows = train(student, teacher, tmp_path, *options, "sampling.max_tokens=16")
    assert all(row["sampling/logp_difference/max"] == 0.0 for row in rows)
    assert rows[0]["teacher/kl"] > 1.7
    assert rows[-1]["teacher/kl"] < 1.45
    assert rows[-1]["teacher/logprob"] > rows[0]["teacher/logprob"]


def test_a_policy_that_is_its_own_teacher_stays_as_it_is_bit_for_bit(student: Path, tmp_path: Path):
    rows = train(student, student, tmp_path)
    assert [row["teacher/kl"] for row in rows] == [0.0, 0.0]
    original = load_file(student / "model.safetensors")
    assert all(torch.equal(tensor, original[name]) for name, tensor in weights(tmp_path).items())


def share_of_low_ids(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(token < 60 for token in ids) / len(ids) for ids in completion_ids]


def test_rewards_count_by_their_weight(student: Path, teacher: Path, tmp_path: Path):
    """With weight 0 they change nothing; beside a teacher that is the policy they are plain GRPO."""
    groups = ("algorithm.group_size=4", "steps=1")
    rewards = {"reward_functions": [share_of_low_ids]}
    train(student, teacher, tmp_path / "none", *groups)
    logged = train(student, teacher, tmp_path / "logged", *groups, **rewards)
    assert logged[0]["reward"] > 0
    assert same(tmp_path / "none", tmp_path / "logged")
    train(student, teacher, tmp_path / "mixed", *groups, "teacher.reward_weight=1", **rewards)
    assert not same(tmp_path / "none", tmp_path / "mixed")
    train(student, student, tmp_path / "own", *groups, "teacher.reward_weight=1", **rewards)
    train(student, student, tmp_path / "plain", *groups, "teacher=null", **rewards)
    assert same(tmp_path / "own", tmp_path / "plain")


def same(one: Path, other: Path) -> bool:
    return all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())


def test_old_logprobs_of_the_trainer_are_what_the_teacher_is_compared_with(
    student: Path, teacher: Path, tmp_path: Path
):
    int8 = ("engine.quantization=int8", "algorithm.recompute_logprobs=true", "steps=1", "algorithm.epochs=2")
    row = train(student, teacher, tmp_path, *int8)[0]
    assert row["sampling/logp_difference/max"] > 0
    assert row["teacher/kl"] > 0
    assert row["grad_norm"] > 0


def test_the_engine_may_sample_ahead(student: Path, teacher: Path, tmp_path: Path):
    rows = train(student, teacher, tmp_path, "asynchrony.mode=one_step_off", "engine.sleep=false", "steps=3")
    assert all(row["teacher/kl"] > 0 < row["grad_norm"] for row in rows)
    assert rows[-1]["staleness/max"] == 1


def test_a_resumed_run_is_the_unbroken_one(student: Path, teacher: Path, tmp_path: Path):
    options = ("teacher.discount=0.9", "teacher.baseline=batch_mean", "checkpoint.every=2")
    train(student, teacher, tmp_path / "whole", *options, "steps=4")
    train(student, teacher, tmp_path / "broken", *options, "steps=2")
    train(student, teacher, tmp_path / "broken", *options, "steps=4", "resume=true", "teacher.sleep=false")
    assert same(tmp_path / "whole", tmp_path / "broken")
    with pytest.raises(ValueError, match=r"teacher\.discount was 0\.9, is 0\.0"):
        train(student, teacher, tmp_path / "broken", "checkpoint.every=2", "steps=4", "resume=true")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.weight=0"], r"teacher\.weight=0"),
        (["teacher.discount=1.5"], r"teacher\.discount=1\.5 .* at most 1"),
        (["teacher.baseline=group_mean"], r"teacher\.baseline='group_mean'"),
        (["teacher.model=null", "teacher.weight=2"], r"teacher\.model=None .* a folder where weight is given"),
        (["loss.algorithm=gspo"], r"loss\.ratio='geometric_mean' .* with teacher\.model"),
        (["loss.algorithm=dapo"], r"loss\.dynamic_sampling=True .* false with teacher\.model"),
        (["loss.algorithm=ppo"], r"loss\.baseline='critic' .* with teacher\.model"),
        (["loss.advantage_scale=none"], r"loss\.advantage_scale='none' .* teacher\.reward_weight is 0"),
        (["loss.overlong_buffer=0.2"], r"loss\.overlong_buffer=0\.2 .* teacher\.reward_weight is 0"),
        (["loss.kl_coefficient=0.1", "loss.kl_placement=reward"], r"loss\.kl_placement='reward'"),
        (["teacher.reward_weight=1"], r"algorithm\.group_size=1"),
    ],
)
def test_what_makes_no_sense_with_a_teacher_is_refused(overrides: list[str], message: str):
    values = {"model": "m", "teacher": {"model": "t"}, "algorithm": {"group_size": 1, "prompts_per_step": 4}}
    with pytest.raises(ValueError, match=message):
        config_from_values(values, overrides)


def test_teachers_that_cannot_read_what_the_policy_writes_are_refused_by_name(student: Path, tmp_path: Path):
    def refused(folder: Path, message: str, *overrides: str) -> None:
        with pytest.raises(ValueError, match=message):
            train(student, folder, tmp_path / "run", *overrides)

    other = make_tiny_llama(tmp_path / "other")
    write_tiny_tokenizer(other, 130)
    refused(other, r"teacher\.model='.*other' is not valid: it has other tokens than the policy, whose .* is 130")
    small = make_tiny_llama(tmp_path / "small", vocab_size=128)
    refused(small, r"its vocabulary has 128 tokens, the policy's 131")
    short = make_tiny_llama(tmp_path / "short", tokenizer=True, max_position_embeddings=32)
    refused(short, r"reads at most 32 tokens, and engine\.max_model_len is 64")
    refused(tmp_path / "nowhere", r"teacher\.model is not valid: .*nowhere' is not a folder")
    unknown = make_tiny_llama(tmp_path / "unknown")
    config = unknown / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("LlamaForCausalLM", "OtherForCausalLM"))
    refused(unknown, r"teacher\.model is not valid: .*OtherForCausalLM.* is not supported")
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_a_teacher_may_have_more_tokens_than_the_tokenizer_names(student: Path, tmp_path: Path):
    padded = make_tiny_llama(tmp_path / "padded", vocab_size=160, seed=3)
    write_tiny_tokenizer(padded, 131)
    assert train(student, padded, tmp_path / "run", "steps=1")[0]["teacher/kl"] > 0


def test_examples_for_evaluation_need_a_reward(student: Path, teacher: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="the evaluation examples need one"):
        train(student, teacher, tmp_path, evaluation=TRAIN[:1])


def test_the_pages_code_runs(student: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(
        compile(code, "distillation.md", "exec"),
        {"MODEL": str(student), "TEACHER": str(teacher), "OUTPUT": str(tmp_path)},
    )
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert (tmp_path / "model" / "config.json").is_file()
    section = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    assert config_from_values({"model": "m", **section}).teacher.model == "path/to/the/teacher"
    options = {name for line in page.splitlines() for name in re.findall(r"^\| `(\w+)` \|", line)}
    assert options - {"teacher"} == {field.name for field in fields(TeacherSection)}
