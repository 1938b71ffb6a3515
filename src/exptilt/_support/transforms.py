"""What torch is doing around a call: derivatives, transforms, compilation. The only file that touches torch's private names for it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter


def in_transform() -> bool:
    """Whether a torch.func transform is under way (rather than plain autograd or forward_ad.dual_level, which does not nest)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Whether forward derivatives may be taken: a level of `forward_ad` is open."""
    return forward_ad._current_level >= 0


def forward_derivatives() -> AbstractContextManager[None]:
    """Forward derivatives inside a `jvp`, where torch switches them off."""
    return forward_ad._set_fwd_grad_enabled(True)


def derivatives_wanted(tensors: Iterable[Tensor | None]) -> bool:
    """Whether anyone may ask for a derivative of what is computed from these tensors."""
    if in_transform() or in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def transform_compiled() -> bool:
    """Whether a torch.func transform is being compiled; asked while tracing, and not traced."""
    return in_transform() or in_forward_mode()


# As `torch.compiler.assume_constant_result` would mark it, which loads the compiler.
transform_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_plain(tensor: Tensor) -> bool:
    """Whether this is an ordinary tensor: not one that stands for values while a graph is traced, nor one of a batch.

    The batches are those of ``torch.autograd.grad(is_grads_batched=True)``, which has a `vmap` of its own.
    """
    return type(tensor) in (Tensor, Parameter) and not torch._C._functorch.is_legacy_batchedtensor(tensor)


def without_tangent(tensor: Tensor | None) -> Tensor | None:
    """The tensor without the tangent that it carries at the open level of `forward_ad`."""
    return None if tensor is None else forward_ad.unpack_dual(tensor).primal


def push(function: Callable[..., tuple[Tensor, ...]], primals: Any, tangents: Any) -> tuple[Tensor, ...]:
    """The forward derivative of a function along tangents, from inside a `jvp` rule too.

    torch.func.jvp would open a level inside that of `forward_ad`, which torch refuses: there the open one is used.
    """
    if in_transform():
        return torch.func.jvp(function, primals, tangents)[1]
    with forward_derivatives():
        duals = (forward_ad.make_dual(without_tangent(x), dot) for x, dot in zip(primals, tangents, strict=True))
        unpacked = [forward_ad.unpack_dual(x) for x in function(*duals)]
    return tuple(torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in unpacked)
