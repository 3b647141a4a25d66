"""Only the values that changed since the last policy, over any other transport.

    SparseDeltaSender(carrier).send(8, named)                   update.load(SparseDeltaReceiver(carrier))
      header: policy 7, and the fingerprint of each tensor  ──►   compared with what the engine holds, before any write
      delta:NAME: which values changed, and the new ones    ──►   the engine's tensor, copied, with these put in
      whole:NAME: where too many changed, or there is no base ─►  as it came
      end: the fingerprint of each tensor of policy 8       ──►   compared with what the engine then holds, every byte

After an optimiser step with a small learning rate most bfloat16 values round to what they were. Values are compared as
bits; what the engine gets is the sender's policy, bit for bit, or an error.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollout.errors import TransportError
from rollout.weights.buckets import Tally, only_consumed, to_the_end, wire_dtype
from rollout.weights.names import canonical_name
from rollout.weights.receipt import fingerprint_of
from rollout.weights.transport import HeldPolicy, NamedTensor, Sender, SendReport, Transport
from rollout_kernels import copy_and_fingerprint

_HEADER, _DELTA, _WHOLE, _END = "header", "delta", "whole", "end"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a value -> the same as an integer
_WIDTHS = {"gaps8": np.dtype("<u1"), "gaps16": np.dtype("<u2"), "gaps32": np.dtype("<u4")}
_MASK = "mask"  # one bit for each value
_PREFIX = struct.Struct("<8sQ")  # the form, and the number of changed values


class SparseDeltaSender(Sender):
    """Sends through `carrier` what changed since the last policy that it delivered; the first policy goes whole.

    It keeps a copy of the last policy in host memory, in `dtype` where given: that must be the engine's dtype, for the
    engine's values are what the changes are put into. A tensor goes whole where its changes would take more than
    `max_fraction` of its bytes. After an error of the carrier the next policy goes whole; `send_whole_next()` asks for
    that where the carrier cannot know (files), for instance when a new engine joins. `sends=False` is for ranks that
    only take part in gathering.
    """

    def __init__(
        self, carrier: Sender, *, dtype: torch.dtype | None = None, max_fraction: float = 0.75, sends: bool = True
    ) -> None:
        if not 0 < max_fraction <= 1:
            raise ValueError(f"max_fraction={max_fraction!r} is not valid: it must be above 0 and at most 1")
        self._carrier = carrier
        self._dtype = dtype
        self._max_fraction = max_fraction
        self._sends = sends
        self._base: dict[str, torch.Tensor] = {}
        self._base_version: int | None = None
        self._fingerprints: dict[str, int] = {}

    def send_whole_next(self) -> None:
        """Forgets the last policy: the next one needs nothing of an engine."""
        self._base, self._base_version, self._fingerprints = {}, None, {}

    def send(self, version: int, named: Iterable[NamedTensor]) -> SendReport:
        """See `Sender`. `num_bytes` of the report is what travelled, the fingerprints are of the whole policy."""
        if not self._sends:
            return only_consumed(named)
        started = time.perf_counter()
        tally = Tally()
        try:
            with to_the_end(named) as source:
                report = self._carrier.send(version, self._encoded(source, tally))
        except BaseException:
            self.send_whole_next()  # some tensors of the copy are the new ones already
            raise
        self._base_version, self._fingerprints = version, tally.fingerprints
        return replace(
            report,
            num_tensors=len(tally.fingerprints),
            fingerprint=tally.fingerprint,
            drafter_fingerprint=tally.drafter_fingerprint,
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        self.send_whole_next()
        self._carrier.close()

    def _encoded(self, named: Iterable[NamedTensor], tally: Tally) -> Iterator[NamedTensor]:
        yield f"{_HEADER}:", _as_tensor({"base_version": self._base_version, "base": self._fingerprints})
        for name, tensor in named:
            new = tensor.detach().to("cpu", wire_dtype(name, tensor, self._dtype)).contiguous()
            base, delta = self._base.get(name), None
            if base is None or base.dtype != new.dtype or base.shape != new.shape:
                base = self._base[name] = torch.empty_like(new)
            else:
                delta = encode(base, new, self._max_fraction)
            tally.add(name, new.dtype, new.shape, copy_and_fingerprint(base, new))
            yield (f"{_WHOLE}:{name}", base) if delta is None else (f"{_DELTA}:{name}", delta)
        yield f"{_END}:", _as_tensor(tally.fingerprints)


class SparseDeltaReceiver(Transport):
    """Reads what a `SparseDeltaSender` sends through the other end of `carrier`."""

    def __init__(self, carrier: Transport) -> None:
        self._carrier = carrier
        self._held: HeldPolicy | None = None
        self._fingerprints: dict[str, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)  # the largest tensor so far, with its changes put in

    def prepare(self, version: int, held: HeldPolicy) -> None:
        self._held = held
        self._carrier.prepare(version, held)

    def tensors(self) -> Iterator[NamedTensor]:
        """See `Transport`. Changes to another policy than the engine's raise before the first tensor is given."""
        header: dict[str, Any] | None = None
        for tagged, tensor in self._carrier.tensors():
            tag, _, name = tagged.partition(":")
            if (tag == _HEADER) != (header is None):
                raise TransportError(f"{tagged!r} came where a SparseDeltaSender sends something else")
            if tag == _HEADER:
                header = _from_tensor(tensor)
                self._check_base(header)
            elif tag == _WHOLE:
                yield name, tensor
            elif tag == _DELTA:
                yield name, self._changed(name, tensor, header)
            elif tag == _END:
                self._fingerprints = _from_tensor(tensor)
            else:
                raise TransportError(f"{tagged!r} was not sent by a SparseDeltaSender")
        if not self._fingerprints:
            raise TransportError("the changes ended without the fingerprints of the policy that they make")

    def sent_fingerprints(self) -> Mapping[str, int]:
        return self._fingerprints

    def close(self) -> None:
        self._held = None
        self._carrier.close()

    def _check_base(self, header: Mapping[str, Any]) -> None:
        """The engine must hold, bit for bit, the policy that the changes were made against."""
        held, base_version = self._held, header["base_version"]
        assert held is not None, "prepare() comes first"
        if base_version is None:
            return
        if base_version != held.version:
            raise TransportError(
                f"the changes were made against policy {base_version}, but the engine holds policy {held.version}: "
                "the sender must send a whole policy (send_whole_next)"
            )
        for name, fingerprint in header["base"].items():
            tensor = held.tensors.get(canonical_name(name) or name)
            if tensor is None or fingerprint_of(tensor) != fingerprint:
                what = "is not there" if tensor is None else f"({tensor.dtype}) holds other values"
                raise TransportError(
                    f"the changes were made against policy {base_version}, but the engine's {name!r} {what}: the "
                    "sender must send in the engine's dtype, and a whole policy where the engine has lost its own "
                    "(send_whole_next)"
                )

    def _changed(self, name: str, delta: torch.Tensor, header: Mapping[str, Any] | None) -> torch.Tensor:
        """The engine's tensor with the changes, in memory that is used again for the next."""
        held = self._held
        if held is None or header is None or header["base_version"] is None or name not in header["base"]:
            raise TransportError(f"changes of {name!r} came without a policy that they were made against")
        tensor = held.tensors[canonical_name(name) or name]  # it was there when the base was checked
        if self._memory.device != tensor.device or self._memory.numel() < tensor.nbytes:
            self._memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        changed = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        apply(changed, delta)
        return changed


def encode(base: torch.Tensor, new: torch.Tensor, max_fraction: float = 1.0) -> torch.Tensor | None:
    """uint8: how `new` differs from `base`, or None where that takes more than `max_fraction` of `new`'s bytes.

    Both are contiguous, on the CPU, of one dtype and shape. The positions of the changed values are the gaps between
    them, or one bit for each value, whichever is smaller.
    """
    kind = _BITS[new.dtype.itemsize]
    old_bits, new_bits = base.flatten().view(kind).numpy(), new.flatten().view(kind).numpy()
    is_changed = old_bits != new_bits
    count = int(np.count_nonzero(is_changed))
    limit = max_fraction * new.nbytes - _PREFIX.size
    if count * (new.dtype.itemsize + 1) > limit and count * new.dtype.itemsize + len(is_changed) / 8 > limit:
        return None
    where = np.flatnonzero(is_changed)
    gaps = np.diff(where, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    form = next(name for name, width in _WIDTHS.items() if largest <= np.iinfo(width).max or name == "gaps32")
    positions = gaps.astype(_WIDTHS[form]).view(np.uint8)
    if largest > np.iinfo(_WIDTHS[form]).max or len(positions) > (len(is_changed) + 7) // 8:
        form, positions = _MASK, np.packbits(is_changed)
    values = np.ascontiguousarray(new_bits[where]).view(np.uint8)
    if len(positions) + len(values) > limit:
        return None
    prefix = np.frombuffer(_PREFIX.pack(form.encode(), count), dtype=np.uint8)
    return torch.from_numpy(np.concatenate((prefix, values, positions)))


def apply(tensor: torch.Tensor, delta: torch.Tensor) -> None:
    """Puts the changed values of `encode` into a contiguous tensor, in place. Raises `TransportError` where they do
    not fit."""
    size = tensor.dtype.itemsize
    data = delta.cpu().numpy()
    try:
        form, count = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
        end = _PREFIX.size + count * size
        values = data[_PREFIX.size : end].copy().view(np.uint8 if size == 1 else f"<i{size}")
        where = _positions(form.rstrip(b"\0").decode(), data[end:], tensor.numel())
    except (struct.error, ValueError) as error:
        raise TransportError(f"changes came that cannot be read: {error}") from error
    if len(where) != count or len(values) != count or (count and where[-1] >= tensor.numel()):
        raise TransportError(f"{count} changed values do not fit into a tensor of {tensor.numel()}")
    bits = tensor.view(-1).view(_BITS[size])
    bits[torch.from_numpy(where).to(tensor.device)] = torch.from_numpy(values).to(tensor.device)


def _positions(form: str, data: np.ndarray, num_values: int) -> np.ndarray:
    """int64, rising: which values changed."""
    if form == _MASK:
        return np.flatnonzero(np.unpackbits(data, count=num_values))
    if form not in _WIDTHS:
        raise TransportError(f"changes came in the form {form!r}, which is not known here")
    return np.cumsum(data.copy().view(_WIDTHS[form]).astype(np.int64) + 1) - 1


def _as_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    """JSON as uint8, to travel among the tensors."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    try:
        return json.loads(tensor.cpu().numpy().tobytes())
    except ValueError as error:
        raise TransportError("a SparseDeltaSender's announcement could not be read") from error
