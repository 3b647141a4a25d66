"""Each cause of a gap between sampler and trainer is really injected, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout import LLM, Cause, RequestOutput, SampleRecord, SamplingParams
from rollout.worker.worker import Worker
from tests.support.oracle import load_reference, reference_logprobs
from tests.support.policies import Policies, push_mapping, random_prompt
from tests.support.trainers import compared_without_temperature, left_padded, logprobs_of, overwrite_kv_cache

PARAMS = SamplingParams(n=2, max_tokens=24, seed=5, ignore_eos=True)
PROMPTS = [random_prompt(37, 1), random_prompt(9, 2), random_prompt(52, 3)]
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("float32"), vocab_size=300, tokenizer=True)


@pytest.fixture
def llm(policies: Policies) -> LLM:
    return policies.engine()


@pytest.fixture
def reference(policies: Policies) -> PreTrainedModel:
    return policies.reference(0)


def test_the_same_weights_on_both_sides_have_no_gap(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    for trainer in (reference, llm.shared_model(), logprobs_of(reference)):
        diagnosis = llm.diagnose(outputs, trainer)
        assert diagnosis.verdict is Cause.NONE
        assert diagnosis.causes == ()
        assert diagnosis.gap.max_abs < 1e-4
        assert diagnosis.num_tokens == 6 * 24
        assert str(diagnosis).startswith("none: no gap")


def test_a_changed_tensor_of_the_trainer_is_wrong_weights_and_is_named(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    with torch.no_grad():
        reference.get_parameter(NAME)[3] += 1.0
    diagnosis = llm.diagnose(outputs, reference)
    assert diagnosis.causes == (Cause.WRONG_WEIGHTS,)
    assert diagnosis.evidence["tensors_differ"] == [NAME]
    assert NAME in diagnosis.sentence and "1 of 20 tensors" in diagnosis.sentence
    expected = measured_gap(reference, outputs)
    assert diagnosis.gap.mean_abs == pytest.approx(expected, rel=1e-4)
    # the part is what the tensor does: the rest stays rounding
    assert diagnosis.parts[Cause.WRONG_WEIGHTS].mean_abs == pytest.approx(expected, rel=1e-3)
    assert diagnosis.parts[Cause.PRECISION].max_abs < 1e-4


def measured_gap(reference: PreTrainedModel, outputs: Sequence[RequestOutput]) -> float:
    """Mean |trainer - sampler| of the raw logprobs, by transformers alone."""
    gaps = []
    for output in outputs:
        for completion in output.outputs:
            rows = reference_logprobs(reference, output.prompt_token_ids + completion.token_ids)
            rows = rows[len(output.prompt_token_ids) - 1 : -1]
            own = rows[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
            gaps.append(np.abs(own.numpy() - completion.raw_logprobs))
    return float(np.concatenate(gaps).mean())


def test_a_trainer_that_is_a_function_is_compared_by_its_parameters(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    with torch.no_grad():
        reference.get_parameter(NAME)[3] += 1.0
    named = {f"module.{name}": tensor for name, tensor in reference.named_parameters()}
    diagnosis = llm.diagnose(outputs, logprobs_of(reference), parameters=named)
    assert diagnosis.causes == (Cause.WRONG_WEIGHTS,)
    assert diagnosis.evidence["tensors_differ"] == [NAME]
    unknown = llm.diagnose(outputs, logprobs_of(reference))
    assert unknown.causes == (Cause.WRONG_WEIGHTS,)
    assert "give parameters" in unknown.sentence


def test_the_engines_own_module_with_other_weights_is_a_trainer_too(llm: LLM, policies: Policies) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    trainer = policies.engine().shared_model()
    with torch.no_grad():
        trainer.get_parameter(NAME)[3] += 1.0
    diagnosis = llm.diagnose(outputs, trainer)
    assert diagnosis.causes == (Cause.WRONG_WEIGHTS,)
    assert diagnosis.evidence["tensors_differ"] == [NAME]
    assert (
        diagnosis.parts[Cause.PRECISION].max_abs == 0
    )  # with the engine's weights the module has the engine's very bits


@pytest.mark.parametrize("unseen", [True, False])
def test_weights_of_the_engine_that_changed_behind_its_back_are_named(
    llm: LLM, policies: Policies, unseen: bool
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    parameter = llm.shared_model().get_parameter(NAME)
    with torch.no_grad():  # the counters and probes of the guard see one of the two
        if unseen:
            parameter.data[0, 0] += 100.0
        else:
            parameter[0, 0] += 100.0
    for trainer in (policies.reference(0), llm.shared_model()):  # the one is right, the other changed along
        diagnosis = llm.diagnose(outputs, trainer)
        assert diagnosis.verdict is Cause.WRONG_WEIGHTS
        assert diagnosis.evidence["engine_changed"] == [NAME]
    assert diagnosis.gap.mean_abs > 1e-3
    assert ("engine_refuses" in diagnosis.evidence) is not unseen
    assert "not those of its receipt" in diagnosis.sentence


def test_samples_drawn_on_kv_of_something_else_are_stale_kv(llm: LLM, reference: PreTrainedModel) -> None:
    llm.generate(PROMPTS, PARAMS)
    overwrite_kv_cache(llm)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.num_cached_tokens > 0 for output in outputs)
    diagnosis = llm.diagnose(outputs, reference)
    assert diagnosis.causes == (Cause.STALE_KV,)
    assert diagnosis.evidence["cache_differs_now"] is True
    assert "reset_prefix_cache" in diagnosis.sentence
    assert llm.reset_prefix_cache()
    later = llm.diagnose(outputs, reference)
    assert later.causes == (Cause.STALE_KV,)
    assert later.evidence["cache_differs_now"] is False


TEMPERATURE = SamplingParams(n=2, max_tokens=24, seed=5, ignore_eos=True, temperature=0.6)
FILTERED = SamplingParams(n=2, max_tokens=24, seed=5, ignore_eos=True, top_k=4)


def used(reference: PreTrainedModel, outputs: Sequence[RequestOutput], temperature: float) -> list[np.ndarray]:
    """What a trainer computes that scales the logits."""
    arrays = []
    for output in outputs:
        for completion in output.outputs:
            rows = reference_logprobs(reference, output.prompt_token_ids + completion.token_ids, temperature)
            rows = rows[len(output.prompt_token_ids) - 1 : -1]
            arrays.append(rows[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)].numpy())
    return arrays


@pytest.mark.parametrize("as_function", [False, True])
def test_a_forgotten_temperature_is_told_from_logprobs_divided_by_it(
    llm: LLM, reference: PreTrainedModel, as_function: bool
) -> None:
    outputs = llm.generate(PROMPTS, TEMPERATURE)
    trainer = logprobs_of(reference) if as_function else reference
    raw = used(reference, outputs, 1.0)
    forgotten = llm.diagnose(outputs, trainer, trainer_logprobs=raw, sampling_params=TEMPERATURE)
    assert forgotten.causes == (Cause.SAMPLING_SEMANTICS,)
    assert "temperature 1" in forgotten.sentence and "0.6" in forgotten.sentence
    divided = llm.diagnose(
        outputs, trainer, trainer_logprobs=[array / 0.6 for array in raw], sampling_params=TEMPERATURE
    )
    assert divided.causes == (Cause.SAMPLING_SEMANTICS,)
    assert "divides logprobs by the temperature" in divided.sentence
    right = used(reference, outputs, 0.6)
    healthy = llm.diagnose(outputs, trainer, trainer_logprobs=right, sampling_params=TEMPERATURE)
    assert healthy.verdict is Cause.NONE


def test_without_the_parameters_a_forgotten_temperature_is_still_found(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, TEMPERATURE)
    diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=compared_without_temperature(reference, outputs))
    assert diagnosis.causes == (Cause.SAMPLING_SEMANTICS,)


def test_forgotten_filters_are_sampling_semantics(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, FILTERED)
    whole = used(reference, outputs, 1.0)
    diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=whole, sampling_params=FILTERED)
    assert diagnosis.causes == (Cause.SAMPLING_SEMANTICS,)
    assert "kept_mass" in diagnosis.sentence
    kept = [np.log(completion.kept_mass) for output in outputs for completion in output.outputs]
    right = [array - mass for array, mass in zip(whole, kept, strict=True)]
    assert llm.diagnose(outputs, reference, trainer_logprobs=right, sampling_params=FILTERED).verdict is Cause.NONE


def test_a_trainer_whose_padding_leaks_is_batch_variance(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    diagnosis = llm.diagnose(outputs, left_padded(reference), parameters=reference.named_parameters())
    assert diagnosis.causes == (Cause.BATCH_VARIANCE,)
    assert "padding" in diagnosis.sentence
    # alone, each sample is right
    assert diagnosis.parts[Cause.PRECISION].max_abs < 1e-4


@pytest.mark.parametrize("inferred", [False, True])
def test_tokens_made_of_the_text_anew_are_retokenisation(llm: LLM, reference: PreTrainedModel, inferred: bool) -> None:
    tokenizer = llm.get_tokenizer()
    # "e" and "t" were sampled one by one; the tokenizer writes the pair as one token.
    completion = [tokenizer.get_vocab()[letter] for letter in "kmxzketkzmx"]
    sampled = record(llm, PROMPTS[0], completion)
    anew = list(tokenizer(tokenizer.decode(completion), add_special_tokens=False).input_ids)
    assert anew == [*completion[:5], tokenizer.get_vocab()["et"], *completion[7:]]
    trainer_ids = None if inferred else [anew]
    numbers = logprobs_of(reference)([PROMPTS[0] + anew])[0][len(PROMPTS[0]) - 1 :]
    diagnosis = llm.diagnose(
        [sampled], reference, trainer_token_ids=trainer_ids, trainer_logprobs=[numbers] if inferred else None
    )
    assert diagnosis.causes == (Cause.RETOKENISATION,)
    assert diagnosis.evidence["retokenised"] == {0: 5}
    assert "completion token 5 of sample 0" in diagnosis.sentence
    assert diagnosis.num_tokens == len(anew)


def record(llm: LLM, prompt: list[int], completion: list[int]) -> SampleRecord:
    """A sample of these very tokens, with the engine's logprobs."""
    scores = llm.score(prompt + completion)[0].logprobs[len(prompt) - 1 :]
    return SampleRecord(prompt, completion, scores, scores, policy_version=llm.policy_version)


def test_samples_of_an_older_policy_are_policy_lag(llm: LLM, policies: Policies) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    push_mapping(llm, policies.weights(1))
    push_mapping(llm, policies.weights(2))
    diagnosis = llm.diagnose(outputs, policies.reference(2))
    assert diagnosis.causes == (Cause.POLICY_LAG,)
    assert diagnosis.evidence["sample_versions"] == [0]
    assert "lag of up to 2 versions" in diagnosis.sentence


def test_a_trainer_that_is_ahead_is_policy_lag_and_not_wrong_weights(llm: LLM, policies: Policies) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    ahead = policies.reference(1)
    diagnosis = llm.diagnose(outputs, ahead, trainer_version=3)
    assert diagnosis.causes == (Cause.POLICY_LAG,)
    assert "engine 0, trainer 3" in diagnosis.sentence
    assert llm.diagnose(outputs, ahead).causes == (Cause.WRONG_WEIGHTS,)


def test_a_trainer_that_computes_something_else_is_another_implementation(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    reference.get_buffer("model.rotary_emb.inv_freq").mul_(0.5)
    diagnosis = llm.diagnose(outputs, reference)
    assert diagnosis.causes == (Cause.IMPLEMENTATION,)
    assert diagnosis.evidence["tensors_differ"] == []


def test_numbers_that_the_trainer_does_not_compute_any_more_are_unexplained(
    llm: LLM, reference: PreTrainedModel
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    shifted = [np.roll(array, 1) for array in used(reference, outputs, 1.0)]  # off by one
    diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=shifted)
    assert diagnosis.causes == (Cause.UNEXPLAINED,)


def one_bad_answer(kind: str) -> Callable[[list[list[int]]], list[list[float]]]:
    def answer(sequences: list[list[int]]) -> list[list[float]]:
        return [[0.0] * len(sequence) for sequence in sequences][: 1 if kind == "few" else None]

    return answer


def test_bad_input_names_the_argument_and_changes_nothing(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match=r"max_samples=0 is not valid"):
        llm.diagnose(outputs, reference, max_samples=0)
    with pytest.raises(ValueError, match=r"tolerance=-1 is not valid"):
        llm.diagnose(outputs, reference, tolerance=-1)
    with pytest.raises(ValueError, match=r"trainer='gpt' is not valid"):
        llm.diagnose(outputs, "gpt")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"hold no sampled token"):
        llm.diagnose([], reference)
    with pytest.raises(ValueError, match=r"trainer_logprobs has 1 entries for 6 samples"):
        llm.diagnose(outputs, reference, trainer_logprobs=[[0.0]])
    with pytest.raises(ValueError, match=r"trainer_logprobs\[0\] has 3 values for 24 tokens"):
        llm.diagnose(outputs, reference, trainer_logprobs=[[0.0] * 3] * 6)
    with pytest.raises(ValueError, match=r"sampling_params has 2 entries for 3 samples"):
        llm.diagnose(outputs, reference, sampling_params=[PARAMS, PARAMS])
    with pytest.raises(ValueError, match=r"returned shape \(61,\) for sequence 0 of 61 tokens"):
        llm.diagnose(outputs, one_bad_answer("long"))


def test_a_sharded_trainer_is_refused_with_what_to_give_instead(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    reference.get_parameter(NAME).data = torch.empty(0)  # as ZeRO-3 leaves it on every rank
    with pytest.raises(ValueError, match=r"holds shards of its parameters .* the gathered tensors as parameters"):
        llm.diagnose(outputs, reference)


def test_diagnosing_leaves_engine_and_trainer_as_they_were(llm: LLM, reference: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in reference.named_parameters()}
    with torch.no_grad():
        reference.get_parameter(NAME)[3] += 1.0
        before[NAME][3] += 1.0
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.diagnose(outputs, reference)
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.named_parameters())
    assert not any(parameter.grad is not None for parameter in reference.parameters())
    again = llm.generate(PROMPTS, PARAMS)
    assert [c.token_ids for o in again for c in o.outputs] == [c.token_ids for o in outputs for c in o.outputs]
    assert llm.verify().id == outputs[0].receipt_id


def test_few_samples_of_many_are_scored_the_worst_first(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    numbers = used(reference, outputs, 1.0)
    numbers[4] = numbers[4] - 0.5
    diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=numbers, max_samples=1)
    assert diagnosis.evidence["samples"] == [4]
    assert llm.diagnose(outputs, reference, max_samples=2).evidence["samples"] == [0, 5]


def test_a_sample_finished_under_a_new_policy_is_lag_from_its_first_old_token_on(llm: LLM, policies: Policies) -> None:
    """As the mode "keep" of a policy update leaves it: the first tokens, and all KV before them, of the old policy."""
    from rollout.outputs import PolicyVersionSpan

    sample = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))[0].outputs[0]
    push_mapping(llm, policies.weights(1))
    mixed = SampleRecord(
        PROMPTS[0],
        sample.token_ids,
        sample.raw_logprobs,
        sample.sampled_logprobs,
        policy_versions=[PolicyVersionSpan(0, 0, 5), PolicyVersionSpan(1, 5, 12)],
    )
    diagnosis = llm.diagnose([mixed], policies.reference(1))
    assert diagnosis.causes == (Cause.POLICY_LAG,)
    assert diagnosis.evidence["sample_versions"] == [0, 1]


def worker_dtype(worker: Worker) -> torch.dtype:
    return worker.dtype


def test_int8_weights_and_int8_kv_are_precision(policies: Policies, reference: PreTrainedModel) -> None:
    for name in ("quantization", "kv_cache_dtype"):
        llm = policies.engine(0, **{name: "int8"})
        assert llm.collective_rpc(worker_dtype) == [torch.float32]
        outputs = llm.generate(PROMPTS, PARAMS)
        for trainer in (reference, llm.shared_model()):
            diagnosis = llm.diagnose(outputs, trainer)
            assert diagnosis.causes == (Cause.PRECISION,), name
            assert diagnosis.evidence["rounding"]["left_in_float32"] < 1e-4


def test_the_reference_of_another_folder_is_named_by_many_tensors(llm: LLM, policies: Policies, tmp_path: Path) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    diagnosis = llm.diagnose(outputs, load_reference(policies.folders[1]))
    assert diagnosis.causes == (Cause.WRONG_WEIGHTS,)
    assert len(diagnosis.evidence["tensors_differ"]) == 20
    assert "and 17 more" in diagnosis.sentence


def test_some_of_the_trainers_tensors_do_not_prove_that_the_weights_are_the_same(
    llm: LLM, reference: PreTrainedModel
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    some = [(name, tensor) for name, tensor in reference.named_parameters() if name != NAME][:3]
    for change, cause in ((0.01, Cause.PRECISION), (30.0, Cause.WRONG_WEIGHTS)):
        with torch.no_grad():
            reference.get_parameter(NAME)[3] += change
        diagnosis = llm.diagnose(outputs, logprobs_of(reference), parameters=some)
        assert diagnosis.causes == (cause,)
        assert "weights are the same" not in diagnosis.sentence
        assert "give all parameters" in diagnosis.sentence
        assert NAME in diagnosis.evidence["tensors_not_compared"]
        assert diagnosis.evidence["tensors_compared"] == 3
    whole = llm.diagnose(outputs, logprobs_of(reference), parameters=reference.named_parameters())
    assert whole.evidence["tensors_not_compared"] == []  # the tied head is there under its other name


def test_a_trainer_of_the_policy_that_sampled_has_no_gap_while_the_engine_is_ahead(
    llm: LLM, policies: Policies
) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    push_mapping(llm, policies.weights(1))
    for trainer in (policies.reference(0), logprobs_of(policies.reference(0))):
        diagnosis = llm.diagnose(outputs, trainer, trainer_version=0)
        assert diagnosis.causes == ()
        assert "the samples are of policy 0, the trainer is at 0, the engine at 1" in diagnosis.sentence
    rounded = llm.diagnose(outputs, load_reference(policies.folders[0], torch.bfloat16), trainer_version=0)
    assert rounded.causes == (Cause.PRECISION,)
    other = llm.diagnose(outputs, policies.reference(2), trainer_version=0)
    assert other.causes == (Cause.WRONG_WEIGHTS,)
    assert "said to be policy 0, which drew the samples" in other.sentence


def test_what_is_no_sample_and_no_version_is_refused(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    for version in (-1, True, 1.5):
        with pytest.raises(ValueError, match=rf"trainer_version={version} is not valid: it must be an integer"):
            llm.diagnose(outputs, reference, trainer_version=version)
    with pytest.raises(TypeError, match=r"sequence of RequestOutput.* or of SampleRecord: samples\[0\] is 1"):
        llm.diagnose([1], reference)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"or of SampleRecord, not RequestOutput"):
        llm.diagnose(outputs[0], reference)  # pyright: ignore[reportArgumentType]


def test_without_the_parameters_no_temperature_is_named(llm: LLM, reference: PreTrainedModel) -> None:
    outputs = llm.generate(PROMPTS, TEMPERATURE)
    diagnosis = llm.diagnose(outputs, reference, trainer_logprobs=compared_without_temperature(reference, outputs))
    assert "(at the sampling temperature, filters included)" in diagnosis.sentence
