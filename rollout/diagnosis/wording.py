"""A diagnosis in words: what is wrong, with the numbers that show it, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollout.diagnosis.causes import Cause, Part
from rollout.diagnosis.semantics import Quantity
from rollout.diagnosis.split import Findings, Splitter


def sentence(
    causes: Sequence[Cause], parts: Mapping[Cause, Part], gap: Part, found: Findings, splitter: Splitter
) -> str:
    """The main cause in a sentence, the others after it."""
    if not causes:
        return (
            f"no gap: the trainer's logprobs are the sampler's to within {max(gap.max_abs, 0.0):.2g} nats on every "
            "token that was compared" + _other_version(found, splitter)
        )
    main, *others = causes
    text = _SENTENCES[main](found, splitter)
    if main in parts:
        text += f" ({parts[main].mean_abs:.3g} nats per token, {parts[main].share:.0%})"
    if others:
        text += "; also " + ", and ".join(
            f"{cause.value}{_size(cause, parts)}: {_SENTENCES[cause](found, splitter)}" for cause in others
        )
    if "changes_from_call_to_call" in found.evidence:
        noise = found.evidence["changes_from_call_to_call"]
        text += (
            f". The trainer's own logprobs change from call to call, by {noise:.3g} nats per token: dropout? Call "
            "eval() for logprobs"
        )
    return text


def _size(cause: Cause, parts: Mapping[Cause, Part]) -> str:
    return f" ({parts[cause].mean_abs:.3g})" if cause in parts else ""


def _other_version(found: Findings, splitter: Splitter) -> str:
    if not found.other_version:
        return ""
    versions = _range(found.evidence["sample_versions"])
    return (
        f" (the samples are of policy {versions}, the trainer is at {splitter.trainer_version}, the engine at "
        f"{splitter.version})"
    )


def _not_compared(found: Findings) -> str:
    if not found.not_compared:
        return ""
    return f"; {len(found.not_compared)} of the engine's tensors were not compared ({_some(found.not_compared)})"


def _not_finite(found: Findings, splitter: Splitter) -> str:
    first = found.not_finite
    assert first is not None
    text = (
        f"{first.whose} are not finite: {first.value} at completion token {first.token} of sample {first.sample}, and "
        f"in {first.num_tokens} of {first.num_compared} tokens in all"
    )
    tensors = found.evidence.get("tensors_not_finite")
    if tensors:
        text += f"; the trainer's weights are not finite either ({_some(tensors)})"
    compared = sum(case.num_tokens for case in splitter.cases)
    return text + (f". Only the {compared} tokens before such values were compared" if compared else "")


def _wrong_weights(found: Findings, splitter: Splitter) -> str:
    if found.engine_changed:
        text = f"the engine's weights are not those of its receipt: {_some(found.engine_changed)} changed since"
        return text + ". Change weights in a policy_update only"
    if found.tensors_differ:
        return (
            f"the trainer's weights are not the engine's policy {splitter.version}: {len(found.tensors_differ)} of "
            f"{found.evidence['tensors_compared']} tensors differ ({_some(found.tensors_differ)})"
            f"{_not_compared(found)}. Run a policy_update "
            "with the trainer's parameters before sampling"
        )
    if found.tensors_differ is None and found.other_version:
        return (
            f"the trainer is said to be policy {splitter.trainer_version}, which drew the samples, but differs from "
            "their logprobs by more than rounding can explain"
        )
    if found.not_compared:
        return (
            f"the trainer differs from the engine by more than rounding can explain{_not_compared(found)}, so those "
            "probably differ: give all parameters"
        )
    if found.tensors_differ is None:
        return (
            "the trainer differs from the engine by more than rounding can explain, so their weights probably differ: "
            "give parameters to name the tensors"
        )
    return "the engine's weights were replaced after the samples were drawn, under the same policy version"


def _stale_kv(found: Findings, splitter: Splitter) -> str:
    now = found.evidence.get("cache_differs_now")
    where = "the prefix cache still holds such blocks: call reset_prefix_cache()" if now else "they are not cached now"
    return (
        "the samples were drawn on KV that the engine's weights do not give: a fresh pass without the cache has other "
        f"logprobs, although the weights are those of receipt {_receipt(splitter)}; {where}"
    )


def _semantics(found: Findings, splitter: Splitter) -> str:
    temperatures = sorted({case.record.temperature for case in splitter.cases if case.record.temperature is not None})
    values = " or ".join(f"{value:g}" for value in temperatures)
    at = f"temperature {values}" if values else "the sampling temperature"
    if found.quantity is Quantity.DIVIDED:
        return (
            f"the trainer divides logprobs by the temperature{f' ({values})' if values else ''}, which is no "
            "distribution: divide the logits, then take the log-softmax"
        )
    if found.quantity is Quantity.TEMPERED:
        return (
            "the trainer compares logprobs over the whole vocabulary with sampled_logprobs, which are of the filtered "
            "distribution (top-k, top-p, min-p): compare with sampled_logprobs + log(kept_mass)"
        )
    return (
        f"the trainer compares logprobs at temperature 1 with sampled_logprobs, which are of what was drawn from (at "
        f"{at}, filters included): divide its logits by the temperature, or compare with raw_logprobs"
    )


def _batch_variance(found: Findings, splitter: Splitter) -> str:
    return (
        "the trainer's logprobs of a sample change with what else is in the batch: look at padding, attention mask and "
        "position ids"
    )


def _precision(found: Findings, splitter: Splitter) -> str:
    if found.tensors_differ is None and found.other_version:
        return "the trainer differs from the sampler as little as rounding does" + _other_version(found, splitter)
    if found.not_compared:
        compared = found.evidence["tensors_compared"]
        return (
            f"the trainer differs from the engine as little as rounding does; {compared} tensors were compared, but "
            f"not the engine's other {len(found.not_compared)} ({_some(found.not_compared)}): give all parameters to "
            "tell rounding from a small change"
        )
    if found.tensors_differ is None:
        return "the trainer differs from the engine as little as rounding does; its parameters were not compared"
    rounding = found.evidence.get("rounding")
    sizes = ""
    if rounding is not None:
        sizes = (
            f": {rounding['engine']:.2g} nats by the engine, {rounding['trainer']:.2g} by the trainer, "
            f"{rounding['left_in_float32']:.2g} left in float32"
        )
    quantized = " (the engine computes with int8 copies)" if splitter.llm.config.quantization else ""
    text = f"the weights are the same and the logprobs differ by rounding{sizes}{quantized}"
    if found.size(Cause.IMPLEMENTATION) > 0.05 * found.size(Cause.PRECISION):
        return text + ". What is left in float32 is no rounding"
    return text + ". Correct for it, or ignore it"


def _retokenisation(found: Findings, splitter: Splitter) -> str:
    changed = [case for case in splitter.cases if case.is_retokenised]
    first = changed[0]
    place = first.first_difference()
    mine = first.record.token_ids[place : place + 1]
    theirs = first.trainer_token_ids[place : place + 1]
    return (
        f"the trainer's token ids are not the sampled ones in {len(changed)} of {len(splitter.cases)} samples, first "
        f"at completion token {place} of sample {first.index} (sampled {mine or 'nothing'}, trainer "
        f"{theirs or 'nothing'}): train on token_ids as sampled, never on ids made of the text"
    )


def _policy_lag(found: Findings, splitter: Splitter) -> str:
    versions = [int(version) for version in found.evidence.get("sample_versions", [splitter.version])]
    now = max(splitter.version, splitter.trainer_version)
    lag = now - min(versions)
    what = "the engine" if splitter.version == now else "the trainer"
    return (
        f"the samples are of policy {_range(versions)} and {what} is at {now}: a lag of up to {lag} "
        f"version{'s' if lag != 1 else ''}, which is true off-policy data and no fault"
        + (
            ""
            if splitter.trainer_version == splitter.version
            else f" (engine {splitter.version}, trainer {splitter.trainer_version})"
        )
    )


def _implementation(found: Findings, splitter: Splitter) -> str:
    if found.tensors_differ is None or found.not_compared:
        return "the trainer computes something else at each call, so its weights cannot be told from these numbers"
    same = "with the same weights" if found.tensors_differ else "the weights are the same, but"
    return (
        f"{same} the trainer computes something else, also in float32: look at its attention, rotary embedding, dropout"
        " and mode (train or eval)"
    )


def _unexplained(found: Findings, splitter: Splitter) -> str:
    return (
        "the numbers that the trainer used are not what it computes now from the same tokens: look at how "
        "trainer_logprobs are made and aligned, and whether its weights have changed since"
    )


_SENTENCES: dict[Cause, Callable[[Findings, Splitter], str]] = {
    Cause.WRONG_WEIGHTS: _wrong_weights,
    Cause.STALE_KV: _stale_kv,
    Cause.SAMPLING_SEMANTICS: _semantics,
    Cause.BATCH_VARIANCE: _batch_variance,
    Cause.PRECISION: _precision,
    Cause.RETOKENISATION: _retokenisation,
    Cause.POLICY_LAG: _policy_lag,
    Cause.IMPLEMENTATION: _implementation,
    Cause.UNEXPLAINED: _unexplained,
    Cause.NOT_FINITE: _not_finite,
}


def _receipt(splitter: Splitter) -> str:
    receipt = splitter.llm.receipt
    return "none" if receipt is None else receipt.id


def _range(versions: Sequence[int]) -> str:
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"


def _some(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
