"""The adapters' memory on the engine's device: slots of equal size for every projection, in one slab.

A slot holds one adapter. Ranks below the largest, and projections that an adapter leaves alone, are zeros. The model's
layers know their part of the memory, and step with it where the rows of a batch name slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from rollout.errors import TensorShapeError, UnknownTensorError
from rollout.layers.linear import Linear
from rollout.layers.lora import LowRankWeights
from rollout.lora.adapter import Adapter, LowRank
from rollout.models.causal_lm import CausalLM
from rollout.platform.platform import Memory

_ALIGNMENT = 64  # bytes, as slabs carve


class AdapterMemory:
    """`num_slots` adapters of ranks up to `max_rank` for every linear layer of `model` but its head.

    `memory` gives the slab for a number of bytes. `on_change` is called when the projections that have to be computed
    change: recorded steps compute others. Raises `ValueError` for a model that does not apply adapters.
    """

    def __init__(
        self,
        model: CausalLM,
        num_slots: int,
        max_rank: int,
        memory: Callable[[int], Memory],
        on_change: Callable[[], None],
    ) -> None:
        if not model.supports_lora:
            raise ValueError(f"enable_lora=True is not supported by {type(model).__name__}: see CausalLM.supports_lora")
        self.num_slots, self.max_rank = num_slots, max_rank
        self._on_change = on_change
        head = model.output_weight
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Linear) and module.weight is not head
        }
        shapes = {name: (tuple(layer.weight.shape), layer.weight.dtype) for name, layer in layers.items()}
        sizes = [num_slots * max_rank * (rows + columns) * dtype.itemsize for (rows, columns), dtype in shapes.values()]
        self.slab = memory(sum(sizes) + 4 * num_slots * len(layers) + 3 * _ALIGNMENT * (len(layers) + 1))
        self._scales = self.slab.carve((len(layers), num_slots), torch.float32)
        self._weights: dict[str, LowRankWeights] = {}
        for index, (name, layer) in enumerate(layers.items()):
            (rows, columns), dtype = shapes[name]
            a = self.slab.carve((num_slots, max_rank, columns), dtype)
            b = self.slab.carve((num_slots, rows, max_rank), dtype)
            self._weights[name] = layer.lora = LowRankWeights(a, b, self._scales[index])

    @property
    def module_names(self) -> tuple[str, ...]:
        """Paths of the layers that an adapter may change."""
        return tuple(self._weights)

    @property
    def num_bytes(self) -> int:
        return self.slab.num_bytes

    def resident_bytes(self) -> int:
        return self.slab.resident_bytes()

    def release(self) -> None:
        """Gives the memory back: no slot holds anything."""
        self.slab.release()

    def resume(self) -> int:
        return self.slab.resume()

    def prepared(self, adapter: Adapter) -> Adapter:
        """A copy of the adapter in the memory's dtypes and on its device. Checks that it fits, and writes nothing; the
        memory is awake afterwards.

        Raises `UnknownTensorError` for a layer that the model does not have, `TensorShapeError` for other shapes and
        for a rank above `max_rank`.
        """
        self.slab.resume()
        modules = {}
        for name, part in adapter.modules.items():
            weights = self._weights.get(name)
            if weights is None:
                raise UnknownTensorError(
                    f"the adapter changes {name!r}, which is no layer that the engine's model applies adapters to; "
                    f"there are {len(self._weights)}, e.g. {next(iter(self._weights))!r}"
                )
            if part.rank > self.max_rank:
                raise TensorShapeError(
                    f"the adapter has rank {part.rank} in {name}, the engine has memory for max_lora_rank="
                    f"{self.max_rank}"
                )
            expected = (part.rank, weights.a.shape[2]), (weights.b.shape[1], part.rank)
            if (tuple(part.a.shape), tuple(part.b.shape)) != expected:
                raise TensorShapeError(
                    f"lora_A and lora_B of {name} have the shapes {tuple(part.a.shape)} and {tuple(part.b.shape)}, the "
                    f"engine's layer needs {expected[0]} and {expected[1]}"
                )
            place = {"device": weights.a.device, "dtype": weights.a.dtype, "copy": True}
            modules[name] = LowRank(part.a.detach().to(**place), part.b.detach().to(**place), part.scale)
            if not math.isfinite(part.scale):
                raise TensorShapeError(f"the adapter's scale for {name} is {part.scale}: it must be a finite number")
        return Adapter(modules)

    @torch.no_grad()
    def write(self, slot: int, adapter: Adapter | None) -> None:
        """Puts a prepared adapter into a slot, or zeros."""
        self._scales[:, slot] = self._scales_of(adapter)
        for name, weights in self._weights.items():
            part = None if adapter is None else adapter.modules.get(name)
            weights.a[slot].zero_()
            weights.b[slot].zero_()
            if part is not None:
                weights.a[slot, : part.rank].copy_(part.a)
                weights.b[slot, :, : part.rank].copy_(part.b)

    def _scales_of(self, adapter: Adapter | None) -> torch.Tensor:
        """float32 [number of layers], 0 for the layers that the adapter leaves alone."""
        modules = {} if adapter is None else adapter.modules
        scales = [modules[name].scale if name in modules else 0.0 for name in self._weights]
        return torch.tensor(scales, dtype=torch.float32, device=self._scales.device)

    def content(self, slot: int, ranks: Mapping[str, int]) -> Adapter:
        """A copy of the adapter of these ranks that lies in a slot."""
        found = self.tensors(slot, ranks)
        return Adapter(
            {
                name: LowRank(
                    found[f"{name}.lora_A.weight"].clone(),
                    found[f"{name}.lora_B.weight"].clone(),
                    float(self._weights[name].scales[slot]),
                )
                for name in ranks
            }
        )

    def expected(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """What `tensors` must give after `write` of this prepared adapter, from the adapter itself."""
        found = {"scales": self._scales_of(adapter)}
        for name, part in adapter.modules.items():
            found[f"{name}.lora_A.weight"] = part.a
            found[f"{name}.lora_B.weight"] = part.b
        return found

    def tensors(self, slot: int, ranks: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """What a slot holds for an adapter of these ranks, as views under PEFT's names, and all layers' "scales"."""
        found = {"scales": self._scales[:, slot]}
        for name, rank in ranks.items():
            found[f"{name}.lora_A.weight"] = self._weights[name].a[slot, :rank]
            found[f"{name}.lora_B.weight"] = self._weights[name].b[slot, :, :rank]
        return found

    def dirty_padding(self, slot: int, ranks: Mapping[str, int]) -> list[str]:
        """Names of the layers that hold something else than zeros beside an adapter of these ranks."""
        dirty = []
        for name, weights in self._weights.items():
            rank = ranks.get(name, 0)
            if weights.a[slot, rank:].any() or weights.b[slot, :, rank:].any():
                dirty.append(name)
        return dirty

    def use_only(self, names: Iterable[str]) -> None:
        """From now on only these projections are computed: no adapter in memory changes another. All where there are
        none: then no row names an adapter, except in a step that measures."""
        wanted = set(names) or set(self._weights)
        changed = [name for name, weights in self._weights.items() if weights.is_used != (name in wanted)]
        for name in changed:
            self._weights[name].is_used = name in wanted
        if changed:
            self._on_change()
