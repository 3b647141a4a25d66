"""LLM: the embedded engine as users see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from rollout.beam_search import BeamSearchOutput, BeamSearchParams, make_searches, search_output
from rollout.byte_sizes import parse_bytes
from rollout.config import EngineConfig
from rollout.diagnosis import Diagnosis, SampleRecord, Trainer, diagnose
from rollout.engine.admission import Admission, LoRAChoice, OnInvalid, params_each, priorities_each
from rollout.engine.collect import Group, is_unfinished
from rollout.engine.core import EngineCore
from rollout.engine.delivery import Delivery
from rollout.engine.forks import Forks
from rollout.engine.interface import Engine, make_engine
from rollout.engine.profile import StepProfile
from rollout.engine.resume import resume
from rollout.engine.scoring import score_output, submit_scores
from rollout.engine.stream import stream
from rollout.errors import WorkerDiedError
from rollout.lora.request import LoRARequest, one_each
from rollout.metrics import engine_metrics
from rollout.models.causal_lm import CausalLM
from rollout.models.generation_config import read_generation_defaults
from rollout.models.loader import iterate_checkpoint
from rollout.models.pretrained import resolve_model
from rollout.models.tokenizer import find_eos_token_ids, find_tokenizer
from rollout.outputs import RequestOutput, ScoreOutput, outputs_each
from rollout.prompts import Message, Prompt, PromptLike, encode_chat, encode_prompt, encode_token_ids, split_prompts
from rollout.sampling_params import SamplingParams
from rollout.session import Session
from rollout.speculation.with_weights import drafter_checkpoint
from rollout.weights.receipt import Receipt
from rollout.weights.target import InFlightMode
from rollout.weights.transaction import PolicyUpdate
from rollout.worker.ledger import LedgerReport, SleepReport, WakeReport


class LLM:
    """A model with its own engine in this process, or several in processes of their own (`data_parallel_size`).

        rollout = LLM("path/or/name")
        outputs = rollout.generate(prompts, SamplingParams(n=8, temperature=1.0, max_tokens=256))

    Keyword arguments are the fields of `EngineConfig`. Calls from several threads are served together: whoever waits
    for outputs steps the engine for all. Raises `ValueError` for a configuration or a model that cannot be used.
    """

    def __init__(self, model: str | Path, *, show_progress: bool | None = None, **config: Any) -> None:
        folder = resolve_model(str(model))
        self.config = EngineConfig(model=str(model), **config)
        self._defaults = read_generation_defaults(self.config.generation_config, folder).params
        with _progress("Loading weights", None, "tensor", show_progress) as bar:
            self._engine: Engine = make_engine(self.config, folder, on_tensor=lambda _: _advance(bar))
        self._folder = folder
        self._lock = self._engine.lock
        self._delivery = Delivery(self._engine)
        self._enqueued: dict[str, Group] = {}
        try:
            self._tokenizer = find_tokenizer(self.config.tokenizer, folder)
            eos_token_ids = find_eos_token_ids(folder, self._tokenizer, self._engine.vocab_size)
        except BaseException:
            self._engine.close()
            raise
        self._admission = Admission(self._engine, self._delivery, self._tokenizer, eos_token_ids)
        self._forks = Forks(self._engine, self._admission, self._delivery)

    @property
    def engine(self) -> EngineCore:
        """The engine itself. Raises `ValueError` where there are several, in other processes."""
        if not isinstance(self._engine, EngineCore):
            raise ValueError(f"data_parallel_size={self.config.data_parallel_size}: the engines are in other processes")
        return self._engine

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        on_invalid: OnInvalid = "raise",
    ) -> list[RequestOutput]:
        """Samples completions; outputs come in the order of the prompts.

        A prompt is text, a list of token ids, a conversation (a list of messages), or a dict with "prompt",
        "prompt_token_ids" or "messages". `sampling_params` is one for all or one a prompt. `priority` (lower first)
        counts under the priority policy. `lora_request`, one for all or one a prompt, is the LoRA adapter to sample
        with: a `LoRARequest`, or the name of an adapter in memory. `use_tqdm` of None shows progress on a terminal.

        Every prompt is checked before any is scheduled. A bad one raises `ValueError` naming its index; with
        `on_invalid="return"` it yields an output with `error` set and the others run. An adapter that is not known or
        cannot be applied raises `ValueError` in any case. Raises `EngineAsleepError`,
        `WeightsNotLoadedError`, `StaleWeightsError` or `EngineUnusableError` where the engine cannot run.

        An interruption (Ctrl-C) aborts the prompts, and their samples are lost: `enqueue` and `wait_for_completion`
        keep them.
        """
        items = split_prompts(prompts)
        params = self._params_each(sampling_params, len(items))
        priorities = priorities_each(priority, len(items), self.config.scheduling_policy)
        encoded = self._encode(items, lambda item: encode_prompt(item, self._tokenizer))
        return self._run(encoded, params, priorities, one_each(lora_request, len(items)), use_tqdm, on_invalid)

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        on_invalid: OnInvalid = "raise",
    ) -> Generator[RequestOutput, None, None]:
        """Samples like `generate`, and yields outputs as tokens come: of each prompt in turn, one after every step.

        What they hold is chosen by `SamplingParams.output_kind`: all that the samples have so far (CUMULATIVE, the
        default), only the samples and tokens that are new (DELTA), or one output a prompt, at its end (FINAL_ONLY).
        Text that was shown is never taken back. Which prompt an output belongs to is told by `request_id`, which counts
        up in the order of the prompts. To close the iterator, or to leave its loop, aborts what is unfinished.

        Prompts are checked when the first output is asked for. Raises as `generate` does. See `docs/text.md`.
        """
        items = split_prompts(prompts)
        params = self._params_each(sampling_params, len(items))
        priorities = priorities_each(priority, len(items), self.config.scheduling_policy)
        choices = one_each(lora_request, len(items))
        encoded = self._encode(items, lambda item: encode_prompt(item, self._tokenizer))
        return self._stream(encoded, params, priorities, choices, on_invalid)

    def _stream(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        choices: Sequence[LoRAChoice],
        on_invalid: OnInvalid,
    ) -> Generator[RequestOutput, None, None]:
        with self._lock:
            admitted, refused = self._admission.admit(prompts, params, priorities, choices, on_invalid, streams=True)
        groups = list(admitted.values())
        with self._outputs_in_errors(groups):
            yield from stream(self._engine, self._delivery, groups, refused.values(), self._tokenizer)

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
    ) -> list[str]:
        """Queues prompts like `generate` and returns their request ids at once. `step` or `wait_for_completion` runs
        them."""
        items = split_prompts(prompts)
        params = self._params_each(sampling_params, len(items))
        priorities = priorities_each(priority, len(items), self.config.scheduling_policy)
        encoded = self._encode(items, lambda item: encode_prompt(item, self._tokenizer))
        with self._lock:
            groups, _ = self._admission.admit(encoded, params, priorities, one_each(lora_request, len(items)), "raise")
            self._enqueued.update((group.group_id, group) for group in groups.values())
            return [group.group_id for group in groups.values()]

    def resume(
        self,
        outputs: RequestOutput | Sequence[RequestOutput],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Lets unfinished samples (finish reason "abort", or None) go on to what they would have been uninterrupted.

        `sampling_params` are those of the interrupted call, one for all or one an output, with `n` the number of
        samples in it: `max_tokens`, `min_tokens`, penalties and stop strings count all of the output. Returns whole
        outputs, with the old tokens and the new, in the same order; samples that had ended, and outputs that have no
        others, pass through as they are. What was sampled by which policy is told by `policy_versions`. See
        `docs/trees.md`.

        Raises `ValueError`, before anything is scheduled, for outputs and parameters that do not belong together, and
        as `generate` does.
        """
        outputs = outputs_each(outputs)
        params = params_each(sampling_params, len(outputs))
        priorities = priorities_each(priority, len(outputs), self.config.scheduling_policy)
        with self._lock:
            groups = resume(self._engine, self._admission, outputs, params, priorities)
        with self._outputs_in_errors(groups.values()):
            self._wait(list(groups.values()), use_tqdm, "Resuming")
        resumed = {index: group.output(self._tokenizer) for index, group in groups.items()}
        return [resumed.get(index, output) for index, output in enumerate(outputs)]

    def enqueue_resume(
        self,
        outputs: RequestOutput | Sequence[RequestOutput],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queues what `resume` would run, and returns an id for each output at once, as `enqueue` does. The output that
        `step` or `wait_for_completion` returns has the request id of the one that was given, and `abort` knows it by
        that: give outputs ids of your own (`dataclasses.replace`).

        Raises as `resume` does, and `ValueError` for an output in which no sample is unfinished.
        """
        outputs = outputs_each(outputs)
        params = params_each(sampling_params, len(outputs))
        priorities = priorities_each(priority, len(outputs), self.config.scheduling_policy)
        for index, output in enumerate(outputs):
            if not any(map(is_unfinished, output.outputs)):
                raise ValueError(f"outputs[{index}] has no sample that is unfinished: there is nothing to resume")
        with self._lock:
            groups = resume(self._engine, self._admission, outputs, params, priorities)
            self._enqueued.update((group.group_id, group) for group in groups.values())
            return [groups[index].group_id for index in range(len(outputs))]

    def peek(self, request_ids: Collection[str]) -> list[RequestOutput]:
        """The outputs of enqueued prompts as they stand, in order of the ids; unfinished samples have no finish reason,
        and go on. `resume` takes such outputs, in another process, say. Raises `ValueError` for an unknown id."""
        with self._lock:
            return [group.output(self._tokenizer) for group in self._enqueued_groups(request_ids)]

    def num_output_tokens(self, request_ids: Collection[str]) -> list[list[int]]:
        """How many tokens each sample of these enqueued prompts has by now."""
        with self._lock:
            return [group.num_output_tokens() for group in self._enqueued_groups(request_ids)]

    def _enqueued_groups(self, request_ids: Collection[str]) -> list[Group]:
        for unknown in set(request_ids) - self._enqueued.keys():
            raise ValueError(f"request_ids holds {unknown!r}, which is no prompt that is enqueued")
        return [self._enqueued[request_id] for request_id in request_ids]

    def fork(
        self,
        request: str | RequestOutput,
        at: int | None = None,
        n: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        sample: int = 0,
        priority: int | None = None,
    ) -> str:
        """Queues `n` new samples that begin with the first `at` output tokens of another one, and returns the id of
        their request at once, as `enqueue` does. `step` or `wait_for_completion` runs them.

        `request` is the id of a request in flight, of which sample number `sample` is meant, or an output; `at=None` is
        where the sample stands. Forks have the tokens, the arrays and the seed of their parent, and sample indices that
        no other sample of the tree has. They share the KV of a parent that still runs, and find that of one that has
        ended in the prefix cache, as far as it is still there.

        `sampling_params` are the parent's, unless given (an output does not hold them, so that they must be given with
        one). `max_tokens` and `min_tokens` count the tokens from the parent too. With `forced_token_ids`, which must
        begin with these tokens, a fork goes on along others than its parent. See `docs/trees.md`.

        Raises `ValueError`, before anything is scheduled, for a place or parameters that are not valid.
        """
        if priority is not None:
            priorities_each([priority], 1, self.config.scheduling_policy)
        with self._lock:
            group = self._forks.fork(request, sample, at, n, sampling_params, priority)
            self._enqueued[group.group_id] = group
            return group.group_id

    def step(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """One step of the engine. Returns the outputs of enqueued prompts whose samples have all ended.

        With `request_ids`, of these alone: others stay for a later call. Where some of them have ended already, they
        are returned without a step.

        While a policy update is open or the engine sleeps, and requests are held, there is no step: returns what has
        ended (was aborted), or raises the error that says why there is nothing.
        """
        with self._lock:
            wanted = self._enqueued if request_ids is None else self._enqueued.keys() & set(request_ids)
            has_ended = any(self._enqueued[group_id].num_unfinished == 0 for group_id in wanted)
            if not (has_ended and (self._engine.is_held or request_ids is not None)):
                self._delivery.step()
            done = [
                group for group_id, group in self._enqueued.items() if group.num_unfinished == 0 and group_id in wanted
            ]
            outputs = [group.output(self._tokenizer) for group in done]
            for group in done:
                self._delivery.groups.pop(group.group_id, None)  # it is not there after an interruption
                del self._enqueued[group.group_id]
        return outputs

    def wait_for_completion(self, *, use_tqdm: bool | None = None) -> list[RequestOutput]:
        """Runs every enqueued prompt to its end. Returns their outputs in the order in which they were enqueued.

        Raises as `step` does, before anything is waited for. An interruption (Ctrl-C) or an error meanwhile aborts what
        is unfinished, and loses nothing: all outputs, those with finish reason "abort" among them, come from the next
        `wait_for_completion` or `step`. (With `WorkerDiedError` they come in the error.)
        """
        with self._lock:
            if any(group.num_unfinished for group in self._enqueued.values()):
                self._engine.check_running()
            groups, self._enqueued = list(self._enqueued.values()), {}
        try:
            with self._outputs_in_errors(groups):
                self._wait(groups, use_tqdm, "Generating")
            return [group.output(self._tokenizer) for group in groups]
        except WorkerDiedError:
            raise
        except BaseException:
            with self._lock:
                self._enqueued = {group.group_id: group for group in groups} | self._enqueued
            raise

    @property
    def num_unfinished(self) -> int:
        """Samples that are queued or running."""
        return sum(group.num_unfinished for group in list(self._delivery.groups.values()))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        on_invalid: OnInvalid = "raise",
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, with the options of the chat template."""
        items = split_prompts(messages)
        params = self._params_each(sampling_params, len(items))

        def encode(item: Any) -> Prompt:
            ids = encode_chat(
                item,
                self._tokenizer,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            return Prompt(ids)

        adapters = one_each(lora_request, len(items))
        return self._run(self._encode(items, encode), params, [0] * len(items), adapters, use_tqdm, on_invalid)

    def session(self, messages: Sequence[Message] | None = None, **options: Any) -> Session:
        """A conversation of several turns that is never tokenised again; see `rollout.session.Session`."""
        return Session(self, messages, **options)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
        use_tqdm: bool | None = False,
    ) -> list[BeamSearchOutput]:
        """Looks for the most likely completions, `params.beam_width` of each prompt; outputs in the prompts' order.

        Prompts and adapters are those of `generate`. Beams share the KV blocks of what they have in common, and run
        beside other requests. Raises `ValueError` for a prompt that cannot be run, before any is scheduled, and the
        errors of `generate` where the engine cannot run. A search that a policy update, `sleep` or `abort` ends, or
        whose logits are not numbers, has the best sequences so far and says so in `error`.
        """
        items = split_prompts(prompts)
        encoded = self._encode(items, lambda item: encode_prompt(item, self._tokenizer))
        choices = one_each(lora_request, len(items))
        with self._lock:
            groups = self._admission.submit(make_searches(self._admission, self._engine, encoded, params, choices))
        self._wait(groups, use_tqdm, "Searching")
        return [search_output(group, params, self._tokenizer) for group in groups]

    def score(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]] | Sequence[Mapping[str, Any]],
        *,
        prompt_logprobs: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRAChoice | Sequence[LoRAChoice] = None,
    ) -> list[ScoreOutput]:
        """Log-probabilities of given tokens, each given those before it: raw, temperature 1.

        With `prompt_logprobs=k` the ranks of the tokens and the k most likely ones beside them come too, in
        `ScoreOutput.prompt_logprobs` (-1: the whole vocabulary). A sequence may be a dict with "prompt_token_ids" and a
        "cache_salt": no KV is then shared with other salts.

        Raises `ValueError` for an empty sequence, one longer than `max_model_len`, an id outside the vocabulary, or
        more logprobs than `max_logprobs`, and `RuntimeError` where the model's logits are not numbers, or the engine is
        put to sleep meanwhile.
        """
        items = split_prompts(token_ids)
        prompts = self._encode(items, lambda item: encode_token_ids(item, "score"))
        choices = one_each(lora_request, len(items))
        params = SamplingParams(prompt_logprobs=prompt_logprobs)
        too_many = self._admission.too_many_logprobs(params)
        if too_many is not None:
            raise ValueError(too_many)
        with self._lock:
            groups = submit_scores(self._engine, self._admission, prompts, params, choices)
        self._wait(groups, use_tqdm, "Scoring")
        return [score_output(group, self._tokenizer) for group in groups]

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its output may have together."""
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids go from 0 to `vocab_size - 1`."""
        return self._engine.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means; `generation_config` may have changed it."""
        return self._defaults

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises `ValueError` where its folder has none."""
        if self._tokenizer is None:
            raise ValueError(f"model={self.config.model!r} has no tokenizer in its folder")
        return self._tokenizer

    def sleep(self, level: int = 1, mode: InFlightMode = "abort", timeout: float | None = None) -> SleepReport:
        """Stops, gives memory back to the operating system and says how much each owner gave.

        Level 0: stops only; level 1: the KV pool, the workspace and unused heap; level 2: the weights too (kept where
        a trainer shares them). With `quantization="int8"` level 2 gives back the int8 copies too, also of shared
        weights: they come back with the next policy update.

        Requests in flight end with finish reason "abort" and the tokens they have (`mode="abort"`); run to their end
        first ("wait", at most `timeout` seconds, then `TimeoutError` and no sleep); or stay, and a `generate` that
        waits for them goes on waiting until the engine runs again: with their KV ("keep", level 0 only), or computing
        it anew ("recompute").
        """
        return self._engine.sleep(level, mode, timeout)

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        """Ends the sleep of everything, or of `tags`: "weights", "kv_cache" (with "graphs"), "graphs", "scheduling"
        (level 0); a string is one tag. After level 2 the weights still need a policy update, or `reload_weights`,
        before `generate` runs."""
        with self._lock:
            return self._engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps; `sleeping_tags` says what."""
        return self._engine.is_sleeping

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        return self._engine.sleeping_tags

    @property
    def policy_version(self) -> int:
        """Version of the policy in the weights; 0 is the checkpoint."""
        return self._engine.policy_version

    @property
    def receipt(self) -> Receipt | None:
        """Proof of what the weights held when they were last loaded."""
        return self._engine.receipt

    def policy_update(
        self,
        version: int | None = None,
        *,
        in_flight: InFlightMode = "abort",
        timeout: float | None = None,
        roll_back: bool = False,
    ) -> PolicyUpdate:
        """One transaction that replaces the policy:

            with rollout.policy_update(version=step) as update:
                update.load(policy.named_parameters())
            print(update.receipt)

        `update.load_adapter(name, peft_model)` replaces a LoRA adapter alone.

        See `PolicyUpdate` for the modes and for `roll_back`. While it lasts, `generate` raises `EngineAsleepError`; one
        that waits for requests which the update keeps goes on waiting.
        """
        return self._engine.policy_update(version, in_flight, timeout, roll_back)

    def reload_weights(self, *, in_flight: InFlightMode = "abort") -> Receipt:
        """A policy update from the checkpoint on disk, and from that of a drafter, read anew."""
        speculative = self.config.speculative_config
        with self.policy_update(in_flight=in_flight) as update:
            update.load(iterate_checkpoint(self._folder))
            if speculative is not None and speculative.has_weights:
                update.load(drafter_checkpoint(speculative))
        return update.receipt

    def verify(self) -> Receipt:
        """Fingerprints every tensor that the kernels read. Raises `StaleWeightsError` naming those that changed since
        the last receipt."""
        with self._lock:
            return self._engine.verify()

    def diagnose(self, samples: Sequence[RequestOutput | SampleRecord], trainer: Trainer, **options: Any) -> Diagnosis:
        """Says why a trainer's logprobs of sampled tokens are not the sampler's: `print(llm.diagnose(outputs, model))`.

        `trainer` is a causal language model (of transformers, or `shared_model()`), or a function from lists of token
        ids to the raw logprobs of all tokens after the first. A few samples are scored again on a chain of paths, each
        one change away from the last, which splits the gap into wrong weights, stale KV, sampling semantics, batch
        variance, precision, re-tokenisation and policy lag, in nats per token.

        Options: `parameters`, the trainer's named tensors where it is a function; `trainer_logprobs`, the numbers that
        the trainer compared with `sampled_logprobs`, an array a sample; `trainer_token_ids`, the completions as the
        trainer had them; `trainer_version`, the policy version of its weights (the engine's by default);
        `sampling_params`, as given to `generate`; `max_samples` (8); `tolerance` (1e-4 nats), below which no token
        differs. See `docs/diagnose.md`.

        The engine must be awake. A float32 copy of the weights is made where rounding has to be told from faults.
        Raises `ValueError` for what does not belong together.
        """
        return diagnose(self, samples, trainer, **options)

    def shared_model(self) -> CausalLM:
        """The module that the engine runs, for a trainer that owns the very tensors which the sampler reads.

        After an optimiser step, run a policy update with its `named_parameters()`: zero bytes move, the fingerprint is
        taken and cached blocks become unreachable. Until then `generate` raises `StaleWeightsError` (changes through
        `tensor.data` may go unseen: `verify()` reads every byte). Change parameters in place: one that is replaced, or
        given other memory, is refused by `generate`, `verify` and `policy_update`, since the kernels know the memory.
        LoRA adapters are not part of this module: its own forward pass computes the policy without any.
        """
        with self._lock:
            return self._engine.shared_model()

    def shared_drafter(self) -> nn.Module:
        """The module of a drafter with weights, likewise; its parameters' names in updates begin with "drafter.".

        `sleep(level=2)` keeps or gives back the weights of model and drafter together: from now on it keeps both, also
        where `shared_model()` was never called; and after `shared_model()` it keeps the drafter's. Raises `ValueError`
        where there is no drafter with weights, and with `data_parallel_size`.
        """
        with self._lock:
            return self._engine.shared_drafter()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block. False, with nothing changed, while requests are in flight."""
        with self._lock:
            return self._engine.reset_prefix_cache()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of every worker, or a callable that gets the worker first; results in rank order.

        An error of a worker is raised here. With `data_parallel_size` above 1 what is called, its arguments and its
        results are pickled, so that a callable stands at the top of a module; after `timeout` seconds `TimeoutError`
        names the ranks that have not answered, which go on. A worker in this process takes no `timeout`.
        """
        with self._lock:
            return self._engine.collective_rpc(method, timeout, args, kwargs or {})

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads a LoRA adapter from its folder into memory, anew where it is there; returns whether it was not.

        Raises `ValueError` for a folder that cannot be applied, where there is no room, and while it is in use.
        """
        with self._lock:
            return self.engine.add_lora(lora_request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets an adapter; False where there is none of this number. Raises `ValueError` while it is in use."""
        with self._lock:
            return self.engine.remove_lora(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keeps an adapter from making room for others. Raises `ValueError` where there is none of this number."""
        with self._lock:
            return self.engine.pin_lora(lora_int_id)

    def list_loras(self) -> set[int]:
        """Numbers of the adapters in memory."""
        with self._lock:
            return self.engine.list_loras()

    def resize_kv_cache(self, num_bytes: int | str) -> int:
        """Gives the KV pool another size ("4GiB"), asleep or awake. Cached blocks are forgotten; samples are the same
        whatever the size. Returns the bytes of the pool's blocks.

        Raises `EngineBusyError` while requests are in flight, and `ValueError` where not even one block fits. A
        `MemoryTreaty` calls it with what a budget leaves.
        """
        count = parse_bytes(num_bytes, "num_bytes")
        with self._lock:
            return self.engine.resize_kv_cache(count)

    def memory_ledger(self) -> LedgerReport:
        """Who holds which bytes."""
        with self._lock:
            return self._engine.memory_ledger()

    def get_metrics(self) -> dict[str, float]:
        """Gauges and counters of the engine, see `rollout.metrics`."""
        with self._lock:
            return engine_metrics(self._engine.snapshots())

    def profile(self) -> AbstractContextManager[list[StepProfile]]:
        """Measures where the time goes inside a `with` block (see `rollout.engine.profile.profile`)."""
        return self._engine.profile()

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests in flight by their ids (a string is one id), keeping what they sampled; unknown ids are
        ignored. What `resume` runs has the ids of the outputs that it was given; where a request of this engine has the
        same id, as outputs of another engine may, that one is meant."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with self._lock:
            self._engine.abort(self._delivery.engine_ids(ids))
            self._engine.flush()

    def close(self) -> None:
        """Ends requests in flight and gives the memory back, as `sleep(level=2)` does; worker processes are ended."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        return params_each(self._defaults if sampling_params is None else sampling_params, count)

    def _encode(self, items: list[PromptLike], encode: Callable[[PromptLike], Prompt]) -> list[Prompt]:
        prompts = []
        for item in items:
            try:
                prompts.append(encode(item))
            except ValueError as error:
                prompts.append(Prompt([], error=str(error)))
        return prompts

    def _run(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        choices: Sequence[LoRAChoice],
        use_tqdm: bool | None,
        on_invalid: OnInvalid,
    ) -> list[RequestOutput]:
        with self._lock:
            groups, refused = self._admission.admit(prompts, params, priorities, choices, on_invalid)
        with self._outputs_in_errors(groups.values()):
            self._wait(list(groups.values()), use_tqdm, "Generating")
        outputs = refused | {index: group.output(self._tokenizer) for index, group in groups.items()}
        return [outputs[index] for index in range(len(prompts))]

    @contextmanager
    def _outputs_in_errors(self, groups: Iterable[Group]) -> Iterator[None]:
        """What the prompts have goes along with the error that a worker has died."""
        try:
            yield
        except WorkerDiedError as error:
            error.outputs = [group.output(self._tokenizer) for group in groups]
            raise

    def _wait(self, groups: list[Group], use_tqdm: bool | None, label: str) -> None:
        with _progress(label, sum(group.num_unfinished for group in groups), "sample", use_tqdm) as bar:
            self._delivery.wait(groups, bar.update)


def generate(
    model: str | Path,
    prompts: PromptLike | Sequence[PromptLike],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **config: Any,
) -> list[RequestOutput]:
    """For one-off use: loads the model, generates, and gives the memory back. See `LLM` and `LLM.generate`."""
    with LLM(model, **config) as llm:
        return llm.generate(prompts, sampling_params)


def _progress(label: str, total: int | None, unit: str, show: bool | None) -> tqdm:
    """A progress bar on the terminal; `show` of None means where there is one."""
    return tqdm(total=total, desc=label, unit=unit, disable=None if show is None else not show, leave=False)


def _advance(bar: tqdm) -> None:
    bar.update()
