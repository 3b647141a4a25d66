"""The proof at the end of a policy update: fingerprints of the very tensors that the engine will read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from rollout.errors import StaleWeightsError
from rollout.weights.names import DRAFTER_PREFIX, is_drafters
from rollout_kernels import fingerprint


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an engine holds as policy `policy_version`, and what it cost to put it there.

    `tensors` has one 64-bit fingerprint per Hugging Face name, tied names included; `buffers` those that the engine
    computes itself (rotary tables); `copies` those of parameters in another form (int8), checked against these;
    `adapters` those of LoRA adapters in memory, under "name/layer.lora_A.weight".
    `fingerprint` is of all of them, `parameters_fingerprint` of the model's parameters without tied names: a trainer
    computes the same from its own with `parameters_fingerprint(named, dtype)`. `drafter_fingerprint` is that of a
    drafter's, by its own names for them, and empty where there is none. `id` is made of the version and of
    `fingerprint`; outputs carry it.
    """

    id: str
    policy_version: int
    fingerprint: str
    parameters_fingerprint: str
    tensors: dict[str, int] = field(repr=False)
    buffers: dict[str, int] = field(repr=False)
    num_tensors: int
    num_bytes: int  # of the parameters in the engine's memory
    bytes_copied: int = 0
    bytes_shared: int = 0  # of parameters that the trainer and the engine share: nothing was copied
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict, repr=False)
    copies: dict[str, int] = field(default_factory=dict, repr=False)
    adapters: dict[str, int] = field(default_factory=dict, repr=False)
    drafter_fingerprint: str = ""

    def timed(self, phase_seconds: Mapping[str, float]) -> Receipt:
        """The same receipt with what each phase took."""
        return replace(self, seconds=sum(phase_seconds.values()), phase_seconds=dict(phase_seconds))

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds * 1000:.1f} ms" for phase, seconds in self.phase_seconds.items())
        return (
            f"receipt {self.id}: policy {self.policy_version}, {self.num_tensors} tensors, {self.num_bytes} bytes "
            f"({self.bytes_copied} copied, {self.bytes_shared} shared), fingerprint {self.fingerprint}, "
            f"{self.seconds:.3f} s" + (f" ({phases})" if phases else "")
        )


def make_receipt(
    policy_version: int,
    parameters: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    buffers: Mapping[str, torch.Tensor],
    fingerprints: Mapping[str, int] | None = None,
    *,
    copies: Mapping[str, torch.Tensor] | None = None,
    adapters: Mapping[str, torch.Tensor] | None = None,
    bytes_copied: int = 0,
    bytes_shared: int = 0,
) -> Receipt:
    """A receipt of the engine's memory as it is now.

    `parameters` maps Hugging Face names to the engine's tensors, `tied` further names to those whose tensor they share.
    `fingerprints` are those of `parameters`, where they are known already. The loader makes the first receipt with it.
    `copies` are the tensors that the kernels read instead of parameters, `adapters` those that they read beside them.
    """
    known = fingerprints if fingerprints is not None else fingerprint_tensors(parameters)
    tensors = {**known, **{name: known[target] for name, target in tied.items()}}
    of_buffers, of_copies = fingerprint_tensors(buffers), fingerprint_tensors(copies or {})
    of_adapters = fingerprint_tensors(adapters or {})
    own = {name: tensor for name, tensor in parameters.items() if not is_drafters(name)}
    drafters = {name.removeprefix(DRAFTER_PREFIX): name for name in parameters if is_drafters(name)}
    everything = dict(parameters) | {name: parameters[target] for name, target in tied.items()}
    everything |= dict(buffers) | dict(copies or {}) | dict(adapters or {})
    whole = combine(everything, {**tensors, **of_buffers, **of_copies, **of_adapters})
    return Receipt(
        id=receipt_id(policy_version, whole),
        policy_version=policy_version,
        fingerprint=whole,
        parameters_fingerprint=combine(own, known),
        drafter_fingerprint=combine(
            {short: parameters[name] for short, name in drafters.items()},
            {short: known[name] for short, name in drafters.items()},
        )
        if drafters
        else "",
        tensors=tensors,
        buffers=of_buffers,
        copies=of_copies,
        adapters=of_adapters,
        num_tensors=len(tensors),
        num_bytes=sum(tensor.nbytes for tensor in parameters.values()),
        bytes_copied=bytes_copied,
        bytes_shared=bytes_shared,
    )


def with_adapters(
    receipt: Receipt, tensors: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]
) -> Receipt:
    """The receipt of the same policy with other `adapters` beside it, whose memory is fingerprinted.

    `tensors` are all that the receipt names apart from adapters; only their dtypes and shapes are looked at.
    """
    fingerprints = receipt.tensors | receipt.buffers | receipt.copies
    of_adapters = fingerprint_tensors(adapters)
    whole = combine({**tensors, **adapters}, fingerprints | of_adapters)
    return replace(receipt, id=receipt_id(receipt.policy_version, whole), fingerprint=whole, adapters=of_adapters)


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The fingerprint of every tensor's bytes, as they lie in memory now."""
    return {name: fingerprint_of(tensor) for name, tensor in tensors.items()}


def fingerprint_of(tensor: torch.Tensor) -> int:
    """64-bit fingerprint of a tensor's bytes in logical order, whatever its strides and device."""
    return fingerprint(tensor.detach())


def combine(tensors: Mapping[str, torch.Tensor], fingerprints: Mapping[str, int]) -> str:
    """One fingerprint (32 hex digits) for all `tensors`: over name, dtype, shape and fingerprint, sorted by name."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {fingerprints[name]:016x}\n".encode())
    return digest.hexdigest()


def receipt_id(policy_version: int, whole_fingerprint: str) -> str:
    """12 hex digits, a function of the policy version and the whole fingerprint."""
    return hashlib.blake2b(f"{policy_version} {whole_fingerprint}".encode(), digest_size=6).hexdigest()


def parameters_fingerprint(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> str:
    """What `Receipt.parameters_fingerprint` must be for these tensors, cast to the engine's dtype.

    `named` has Hugging Face names, without the names that the engine ties to others.
    """
    tensors: dict[str, torch.Tensor] = {}
    fingerprints: dict[str, int] = {}
    for name, tensor in named:
        cast = tensor.detach().to(dtype)
        fingerprints[name] = fingerprint_of(cast)
        tensors[name] = torch.empty_like(cast, device="meta")
    return combine(tensors, fingerprints)


def verify_receipt(
    receipt: Receipt,
    parameters: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    buffers: Mapping[str, torch.Tensor],
    copies: Mapping[str, torch.Tensor] | None = None,
    adapters: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Fingerprints the engine's memory again. Raises `StaleWeightsError` naming every tensor that has changed."""
    changed = changed_tensors(receipt, parameters, tied, buffers, copies, adapters)
    if changed:
        shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise StaleWeightsError(
            f"{len(changed)} tensors are not those of receipt {receipt.id} (policy {receipt.policy_version}): {shown}"
        )


def changed_tensors(
    receipt: Receipt,
    parameters: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    buffers: Mapping[str, torch.Tensor],
    copies: Mapping[str, torch.Tensor] | None = None,
    adapters: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """Names whose fingerprint, computed now, is not the receipt's; names that only one side has are among them.

    Copies come last: they follow from parameters, so that a parameter is the cause where both have changed.
    """
    known = fingerprint_tensors(parameters)
    now = {**known, **{name: known[target] for name, target in tied.items()}, **fingerprint_tensors(buffers)}
    now |= fingerprint_tensors(copies or {}) | fingerprint_tensors(adapters or {})
    then = receipt.tensors | receipt.buffers | receipt.copies | receipt.adapters
    of_copies = receipt.copies.keys() | (copies or {}).keys()
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    return sorted(changed, key=lambda name: name in of_copies)
