"""Rollouts: examples in, samples out, by the engine that holds the policy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rollout.lora.request import LoRARequest
from rollout.outputs import CompletionOutput, RequestOutput
from rollout.prompts import encode_prompt
from rollout.sampling_params import SamplingParams
from rollout.worker.ledger import LedgerReport
from rollout_trainers.types import Example, Sample


class Engine(Protocol):
    """What the trainers ask of an engine; `rollout.LLM` is one."""

    @property
    def policy_version(self) -> int: ...

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True, lora_request: Any = None
    ) -> list[RequestOutput]: ...

    def get_tokenizer(self) -> Any: ...

    def sleep(self, level: int = 1) -> Any: ...

    def wake_up(self, tags: Any = None) -> Any: ...

    def policy_update(self, version: int) -> Any: ...

    def get_metrics(self) -> dict[str, float]: ...

    def memory_ledger(self) -> LedgerReport: ...

    def diagnose(self, samples: Any, trainer: Any, *, trainer_logprobs: Any = None) -> Any: ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of `parts`, so that a resumed run draws what an unbroken one would have."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def select_examples(examples: Sequence[Example], step: int, count: int, seed: int) -> list[Example]:
    """The `count` examples of 1-based step `step`: a pure function of the arguments.

    The steps walk through one shuffle of all examples after the other, each a function of (seed, its number).
    """
    return [examples[index] for index in _walk(len(examples), (step - 1) * count, count, (seed, "order"))]


def select_further_examples(
    examples: Sequence[Example], step: int, per_step: int, first: int, count: int, seed: int
) -> list[Example]:
    """`count` examples that step `step` takes beside its own `per_step`, of which it has taken `first` already: a pure
    function of the arguments.

    They come from shuffles, one after the other, of the examples that are not the step's own (of all where all are).
    """
    own = set(_walk(len(examples), (step - 1) * per_step, per_step, (seed, "order")))
    others = [index for index in range(len(examples)) if index not in own] or [*range(len(examples))]
    return [examples[others[index]] for index in _walk(len(others), first, count, (seed, "further", step))]


def _walk(num: int, first: int, count: int, seed: tuple[int | str, ...]) -> list[int]:
    """`count` indices below `num` from place `first` on of an endless walk, in which every `num` places are a shuffle
    of their own."""
    orders: dict[int, np.ndarray] = {}
    chosen = []
    for place in range(first, first + count):
        epoch, offset = divmod(place, num)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng(derive_seed(*seed, epoch)).permutation(num)
        chosen.append(int(orders[epoch][offset]))
    return chosen


class Producer(Protocol):
    """What the trainers ask for samples: `RolloutProducer`, or `EpisodeProducer` where an environment answers."""

    @property
    def engine(self) -> Engine: ...

    @property
    def max_completion_tokens(self) -> int: ...  # of the policy's, in a sample that is trained on

    def produce(
        self, step: int, examples: Sequence[Example], group_size: int, first_place: int = 0
    ) -> list[Sample]: ...

    def evaluate(
        self, examples: Sequence[Example], temperature: float, max_tokens: int, first_place: int = 0
    ) -> list[Sample]: ...


_LARGEST_DIFFERENCE = 1e-3  # nats, between logprobs of one token that are the same but for rounding


class RolloutProducer:
    """Samples groups of completions for training, and one completion per example for evaluation.

    With an `adapter`, one that the engine applies, all are sampled with it.
    """

    def __init__(
        self, engine: Engine, temperature: float, max_tokens: int, seed: int, adapter: LoRARequest | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.get_tokenizer()
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.seed = seed
        self.adapter = adapter

    @property
    def max_completion_tokens(self) -> int:
        return self.max_tokens

    def produce(self, step: int, examples: Sequence[Example], group_size: int, first_place: int = 0) -> list[Sample]:
        """`group_size` samples of each example, group after group; a group's seed follows from (seed, step, place),
        where places count from `first_place` on.

        Raises `ValueError` for samples whose logprobs a trainer cannot reproduce from logits and temperature, since
        their importance ratios would be wrong: an engine that filters, masks, or changes logits of its own accord.
        """
        params = [
            SamplingParams(
                n=group_size,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                seed=derive_seed(self.seed, "rollout", step, place),
            )
            for place in range(first_place, first_place + len(examples))
        ]
        return self._generate(examples, params, is_trained_on=True, first_place=first_place)

    def evaluate(
        self, examples: Sequence[Example], temperature: float, max_tokens: int, first_place: int = 0
    ) -> list[Sample]:
        """One sample of each example; the seeds are the same whenever it is called, and follow from the examples'
        places, counted from `first_place` on."""
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=derive_seed(self.seed, "evaluation", place)
            )
            for place in range(first_place, first_place + len(examples))
        ]
        return self._generate(examples, params, first_place=first_place)

    def _generate(
        self,
        examples: Sequence[Example],
        params: Sequence[SamplingParams],
        is_trained_on: bool = False,
        first_place: int = 0,
    ) -> list[Sample]:
        prompts = [encode_prompt(example.prompt, self.tokenizer).token_ids for example in examples]
        version = self.engine.policy_version
        outputs = self.engine.generate(prompts, list(params), use_tqdm=False, lora_request=self.adapter)
        if is_trained_on:
            for output in outputs:
                check_reproducible(output, self.temperature)
        for completion in (completion for output in outputs for completion in output.outputs):
            check_version(completion, version)
        return [
            sample
            for group, (example, output) in enumerate(zip(examples, outputs, strict=True), first_place)
            for sample in samples_of(example, group, output)
        ]


def check_reproducible(output: RequestOutput, temperature: float) -> None:
    """Raises `ValueError` where tokens were drawn from another distribution than that of logits and temperature.

    Filters and masks show in the kept mass. Penalties, biases and processors show where temperature 1 should have made
    both logprobs the same; at other temperatures the trainer's own logprobs tell (`sampling/logp_difference`).
    """
    for completion in output.outputs:
        if (completion.kept_mass != 1).any():
            place = int((completion.kept_mass != 1).argmax())
            raise ValueError(
                f"request {output.request_id}, token {place}: filters or masks have left "
                f"{completion.kept_mass[place]:.3g} of the distribution, which the trainer does not know of"
            )
        difference = np.abs(completion.sampled_logprobs - completion.raw_logprobs)
        if temperature == 1 and difference.max(initial=0) > _LARGEST_DIFFERENCE:
            raise ValueError(
                f"request {output.request_id}, token {int(difference.argmax())}: a penalty, a bias or a logits "
                f"processor has changed its logprob by {difference.max():.3g}, which the trainer does not know of"
            )


def check_version(completion: CompletionOutput, version: int) -> None:
    """Raises `ValueError` for tokens that another policy has sampled."""
    stale = [span for span in completion.policy_versions if span.version != version]
    if stale:
        raise ValueError(f"tokens {stale[0].start}:{stale[0].end} are of policy {stale[0].version}, not {version}")


def samples_of(example: Example, group: int, output: RequestOutput) -> list[Sample]:
    """The samples of an example's output, of the policies that it names. Raises `ValueError` for one that was cut
    short by something else than the model or its limit."""
    return [_sample(example, group, output, completion) for completion in output.outputs]


def _sample(example: Example, group: int, output: RequestOutput, completion: CompletionOutput) -> Sample:
    if completion.finish_reason in (None, "error", "abort"):
        raise ValueError(f"request {output.request_id} ended with {completion.finish_reason!r}: it can't be trained on")
    versions = tuple(completion.policy_versions)
    newest = max((span.version for span in versions), default=output.policy_version)
    return Sample(
        example=example,
        group=group,
        prompt_token_ids=output.prompt_token_ids,
        completion_token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason,
        sampled_logprobs=completion.sampled_logprobs,
        raw_logprobs=completion.raw_logprobs,
        entropy=completion.entropy,
        seed=completion.seed,
        sample_index=completion.sample_index,
        policy_version=newest,
        receipt_id=output.receipt_ids.get(newest, output.receipt_id),
        versions=versions if len(versions) > 1 else (),
    )
