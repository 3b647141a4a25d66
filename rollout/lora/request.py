"""How a request names its adapter. Plain data: nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and number. `lora_path` is a PEFT folder, read when the adapter is first used.

    An adapter that a policy update or `add_lora` has loaded needs no path. Raises `ValueError` for an empty name or a
    number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name={self.lora_name!r} is not valid: it must be text of at least 1 character")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id={self.lora_int_id!r} is not valid: it must be an integer of at least 1")
        if not isinstance(self.lora_path, str):
            raise ValueError(f"lora_path={self.lora_path!r} is not valid: it must be text")


def one_each(
    lora_request: LoRARequest | str | Iterable[LoRARequest | str | None] | None, count: int
) -> list[LoRARequest | str | None]:
    """One choice for each of `count` prompts, from one for all or a list.

    Raises `ValueError` where a list has another length, `TypeError` for another type.
    """
    if lora_request is None or isinstance(lora_request, (LoRARequest, str)):
        return [lora_request] * count
    if not isinstance(lora_request, Iterable):
        raise TypeError(
            f"lora_request={lora_request!r} is not valid: it must be a LoRARequest, a name, None, or a list of them"
        )
    choices = list(lora_request)
    if len(choices) != count:
        raise ValueError(f"lora_request has {len(choices)} entries for {count} prompts: give one, or one a prompt")
    for choice in choices:
        if choice is not None and not isinstance(choice, (LoRARequest, str)):
            raise TypeError(f"lora_request holds {choice!r}: it must be a LoRARequest, a name or None")
    return choices
