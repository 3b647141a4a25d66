"""The operations as torch knows them: the namespace `rollout` of `torch.library`.

A registered operation is opaque to torch's compilers and tracers: they learn the shapes of its results from a *fake*
and its gradient from a backward formula, both given where the operation is defined (`rollout_kernels.autograd`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library

Gradients = tuple[torch.Tensor | None, ...]

_LIBRARY = Library("rollout", "DEF")


def nothing(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor in the place of a result that is not wanted: operations cannot return None."""
    return like.new_empty(0, dtype=dtype)


def optional(grad: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """The gradient, or None in the place of `nothing`."""
    return grad if wanted else None


def define(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> OpOverload:
    """Registers `rollout::<schema>` and returns what calls it through torch's dispatcher.

    `compute` gets plain tensors, below autograd; `fake` the same arguments, to return empty tensors of the results'
    shapes and dtypes. Without `backward` the operation has no gradient, and asking for one raises
    `NotImplementedError`: that of a backward pass is such an operation, so that gradients exist once.
    """
    name = schema.partition("(")[0]

    def refuse(ctx: Any, *grads: torch.Tensor | None) -> None:
        raise NotImplementedError(f"rollout::{name} has no gradient: the operations are differentiable once")

    # The kernels read by strides, which a compiler must therefore keep.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    qualified = f"rollout::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_autograd(qualified, backward or refuse, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.rollout, name).default
