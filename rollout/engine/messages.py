"""What an engine and its worker processes say to each other: msgpack, with arrays as raw bytes.

    engine ──── Start, Add, Call, ... ────►  worker process, which answers each numbered message with one `Reply`
           ◄── Reply, StepOutputs, ... ────  and sends what its steps sampled, without being asked

All messages of a pair travel in order. Python objects are pickled only where the user hands them over: arguments and
results of `collective_rpc`, transports, model classes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollout.config import EngineConfig
from rollout.core.beam import BeamOptions, BeamResult
from rollout.core.planner import SchedulerConfig
from rollout.engine.faults import Fault
from rollout.sampling_params import SamplingParams
from rollout.weights.receipt import Receipt
from rollout.weights.target import InFlightMode


class Numbered(msgspec.Struct, frozen=True):
    """A message that is answered by the `Reply` with its number."""

    number: int


class Start(Numbered, frozen=True, tag="start"):
    """The first message: makes the engine. Answered with `Ready`."""

    config: EngineConfig
    folder: str
    rank: int
    architectures: bytes  # pickled: name -> class, what the model registry has for this model


class Ready(msgspec.Struct, frozen=True):
    """What the other side has to know of an engine that has started."""

    vocab_size: int
    limits: SchedulerConfig
    receipt: Receipt


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What distinguishes one sample of a prompt from the others."""

    handle: int  # the number by which outputs name it
    request_id: str
    sample_index: int


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A `Request` with its siblings: `samples[0]` leads."""

    group_id: str
    prompt_token_ids: bytes  # int32
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: list[int]
    stop_token_ids: list[int]
    priority: int
    arrival: int
    cache_salt: str | None
    scores_prompt: bool
    processors: bytes | None  # pickled: `params.logits_processors`, which `params` then lacks
    samples: list[Sample]
    beam_options: BeamOptions | None = None
    output_token_ids: bytes = b""  # int32: what their output begins with
    policy_spans: list[tuple[int, int]] = []  # of these tokens
    branch_position: int = 0
    forked_from: int | None = None  # handle of the request whose KV they may share


class Add(Numbered, frozen=True, tag="add"):
    """Queues requests, all or none."""

    families: list[Family]


class Abort(Numbered, frozen=True, tag="abort"):
    """Ends requests; what they have is sent before the reply."""

    handles: list[int]


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Ends a request of which nobody wants to hear more: a stop string was found in its text. No reply."""

    handle: int


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """Makes steps again after a `StepFailed`. No reply."""


class Call(Numbered, frozen=True, tag="call"):
    """Calls one of the engine's own methods (`worker_process.METHODS`) with plain values."""

    method: str
    arguments: list[Any] = msgspec.field(default_factory=list)


class BucketTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the shared bucket: a parameter's Hugging Face name, and where its bytes lie."""

    name: str
    dtype: str  # as torch calls it: "bfloat16"
    shape: tuple[int, ...]
    offset: int


class OpenUpdate(Numbered, frozen=True, tag="open_update"):
    """Begins a policy update and pauses the engine. Further messages, in order, lead it to its end."""

    version: int
    in_flight: InFlightMode
    timeout: float | None  # seconds, as the user gave it
    spent: float  # seconds of it, so far
    roll_back: bool


class LoadBucket(Numbered, frozen=True, tag="load_bucket"):
    """Loads what lies in the shared bucket, which may be overwritten after the reply."""

    num_bytes: int  # of the bucket
    tensors: list[BucketTensor]


class LoadTransport(Numbered, frozen=True, tag="load_transport"):
    """Loads what a transport brings. Answered with `Arrived`."""

    transport: bytes  # pickled


class Arrived(msgspec.Struct, frozen=True):
    """What a transport has brought."""

    names: list[str]
    fingerprints: dict[str, int]  # of the engine's tensors, by their own names
    num_bytes: int


class UpdateStep(Numbered, frozen=True, tag="update_step"):
    """One of the steps that take no arguments. "wake" is answered with `Layout`, "verify" with the receipt."""

    step: Literal["wake", "post_process", "verify", "invalidate", "resume"]


class Layout(msgspec.Struct, frozen=True):
    """An engine's parameters: name -> dtype and shape; further names of tied ones."""

    parameters: dict[str, tuple[str, tuple[int, ...]]]
    tied: dict[str, str]


class GiveUp(Numbered, frozen=True, tag="give_up"):
    """Ends the policy update because of an error, on this rank or elsewhere. Answered with its outcome."""

    reason: str


class Rpc(Numbered, frozen=True, tag="rpc"):
    """`collective_rpc`: pickled (method or callable, args, kwargs). Answered with the pickled result."""

    payload: bytes


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Ends the process. No reply."""


Update = OpenUpdate | LoadBucket | LoadTransport | UpdateStep | GiveUp
Command = Start | Add | Abort | Finish | Proceed | Call | Rpc | Update | Stop


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """What may be asked of an engine at any time, so that it comes with every reply."""

    policy_version: int = 0
    sleeping_tags: tuple[str, ...] = ()
    is_held: bool = False
    holds_policy: bool = True


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to the message of this number: a value, or what went wrong."""

    number: int
    state: EngineState
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack's nil
    fault: Fault | None = None


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A tensor of the checkpoint has been read, for the progress bar."""

    name: str


class TopRows(msgspec.Struct, frozen=True, array_like=True):
    """The most likely tokens at consecutive positions, as `TopLogprobs` has them."""

    num_top: int
    num_chosen: int
    packed: bytes  # int32 [positions, width]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """News of a request apart from its tokens: it began, goes on under another policy, or ended."""

    index: int  # of the update in `StepOutputs`
    num_cached_tokens: int
    policy_version: int
    policy_spans: list[tuple[int, int]]
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: bytes  # float32: all of them, once, with its first token or when it has ended
    prompt_top_logprobs: TopRows | None = None  # with these
    beam_result: BeamResult | None = None  # of a beam search that has ended


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The updates of one step, in order; the tokens of all updates stand behind each other in the columns."""

    handles: bytes  # int64 [updates]
    counts: bytes  # int32 [updates], tokens of each update
    token_ids: bytes  # int32 [tokens]
    columns: bytes  # float32 [4, tokens]: raw and sampled logprobs, kept mass, entropy
    changes: list[Change]
    top_logprobs: dict[int, TopRows] = msgspec.field(default_factory=dict)  # by the update, of those that ask


class StepFailed(msgspec.Struct, frozen=True, tag="step_failed"):
    """A step raised. No token is lost; the worker makes no further step before `Proceed`."""

    fault: Fault


Answer = Reply | Loaded | StepOutputs | StepFailed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
