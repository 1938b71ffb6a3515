"""Derivatives, transforms, compilation around a call: the only file that uses torch's private names."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)

pytree = _pytree
"""torch's own module that flattens and rebuilds nested arguments and results."""


def apply(function: Any, *arguments: Any) -> Any:
    """``function.apply(*arguments)`` of a `torch.autograd.Function`, which torch leaves without types."""
    return function.apply(*arguments)


def in_transform() -> bool:
    """True under grad, vmap or jvp of torch.func; a bare forward_ad.dual_level does not count."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Whether forward derivatives may be taken: a level of `forward_ad` is open."""
    return forward_ad._current_level >= 0


WEIGHT_NORM: Any = torch._weight_norm  # what nn.utils.weight_norm calls


def derivatives_are_nested(tensors: Iterable[Any]) -> bool:
    """Whether derivatives may be nested, or vectorised, in another way than backward passes or jvp of grad.

    True for a forward derivative where gradients are on: a backward pass may go over it later. Plain autograd
    counts if one of the tensors requires a gradient outside of all transforms.
    """
    kinds = torch._C._functorch.TransformType
    levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    if not levels:
        return in_forward_mode()
    if levels == [kinds.Jvp] and not torch.is_grad_enabled():
        return False
    if levels not in ([kinds.Grad], [kinds.Jvp, kinds.Grad]):
        return True
    for x in tensors:
        while isinstance(x, Tensor) and is_wrapped(x):
            x = unwrapped(x)
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def in_backward() -> bool:
    """Whether a backward pass is under way on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_pass() -> int:
    """Unique number of the backward pass under way on this thread; −1 if there is none."""
    return torch._C._current_graph_task_id()


def forward_derivatives(on: bool = True) -> AbstractContextManager[None]:
    """Context with forward derivatives on (torch turns them off inside a `jvp`), or off if `on` is False."""
    return forward_ad._set_fwd_grad_enabled(on)


def has_tangent(tensor: Tensor) -> bool:
    """Whether the tensor carries a tangent at the open level of `forward_ad`."""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


def derivatives_wanted(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a derivative may be taken of results computed from these tensors."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:  # a loop, not any(): every small call asks this
            if x is not None and x.requires_grad:
                return True
    return False


@contextmanager
def uncompiled() -> Iterator[None]:
    """Context in which compiled functions run as they are written; does nothing if none was compiled.

    What happens inside a compiled graph cannot be intercepted.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:  # loading the compiler takes a second
        yield
        return
    dynamo: Any = sys.modules["torch._dynamo"]
    # The stance is for compiled functions that are called in here, the setting for one that is running.
    with torch.compiler.set_stance("force_eager"), dynamo.config.patch(disable=True):
        yield


def never_compiled(function: _Function) -> _Function:
    """The function, which the compiler calls as it is written, with all that it calls.

    `torch.compiler.disable` does the same, but loads the compiler.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        loaded = "torch._dynamo.eval_frame" in sys.modules
        return (torch.compiler.disable(function) if loaded else function)(*arguments, **keywords)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_Function, called)


def not_traced(function: _Function) -> _Function:
    """Mark a function so that the compiler calls it while tracing and takes its result for a constant.

    `torch.compiler.assume_constant_result` does the same, but loads the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@not_traced
def transform_compiled() -> bool:
    """Whether a torch.func transform is being compiled; called while tracing, never traced itself."""
    return in_transform() or in_forward_mode()


def is_concrete(*tensors: Tensor) -> bool:
    """Whether values may be looked at: not inside `torch.compile`, nor under a `torch.func` transform."""
    return not torch.compiler.is_compiling() and not any(is_wrapped(t) or t.is_meta for t in tensors)


def version(tensor: Tensor) -> int:
    """Number of in-place writes to the tensor; −1 for tensors of inference mode, which keep no count."""
    return -1 if tensor.is_inference() else tensor._version


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a torch.func transform tracks this tensor; each transform wraps it once."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """A wrapped tensor without its outermost wrapper."""
    return torch._C._functorch.get_unwrapped(tensor)


def vmap_axis(tensor: Tensor) -> tuple[int, int] | None:
    """Axis that the tensor's outermost wrapper, a ``vmap``, hides, and its level; None for other tensors."""
    functorch = torch._C._functorch
    return (
        (functorch.maybe_get_bdim(tensor), functorch.maybe_get_level(tensor))
        if functorch.is_batchedtensor(tensor)
        else None
    )


def with_vmap_axis(tensor: Tensor, level: int) -> Tensor:
    """The tensor with its first axis hidden, as the ``vmap`` of `level` would hide it."""
    return torch._C._functorch._add_batch_dim(tensor, 0, level)


def current_level() -> int:
    """The level of the innermost transform, 0 outside of all."""
    return torch._C._functorch.maybe_current_level() or 0


def outside_transforms() -> AbstractContextManager[Any]:
    """Context without torch.func transforms; yields those it removed, for `inside_transforms`."""
    return temporarily_clear_interpreter_stack()


def inside_transforms(transforms: Any) -> AbstractContextManager[Any]:
    """Context that restores the transforms that `outside_transforms` removed."""
    return temporarily_restore_interpreter_stack(transforms)


def is_batch(tensor: Tensor) -> bool:
    """Whether this is a batch of ``torch.autograd.grad(is_grads_batched=True)``, torch's older `vmap`."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def in_batches() -> int:
    """The level of torch's older `vmap` (see `is_batch`), 0 outside of it.

    Not for calls without a batch: Ctrl-C between the two lines would leave torch inside of a `vmap` for good.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def without_batch(tensor: Tensor, level: int, size: int) -> Tensor:
    """A tensor of torch's older `vmap` with its hidden axis in front, expanded to `size` if it has none."""
    return torch._remove_batch_dim(tensor, level, size, 0)


def as_batch(tensor: Tensor, level: int) -> Tensor:
    """A tensor with its first axis hidden, as torch's older `vmap` hides it."""
    return torch._add_batch_dim(tensor, 0, level)


def is_plain(tensor: Tensor) -> bool:
    """Whether this is an ordinary tensor: no subclass (as in a traced graph), and no batch (`is_batch`)."""
    return type(tensor) in (Tensor, Parameter) and not is_batch(tensor)


def without_tangent(tensor: _Tensor) -> _Tensor:
    """The tensor, or None, without the tangent that it carries at the open level of `forward_ad`."""
    if tensor is None:
        return None
    primal: Tensor = forward_ad.unpack_dual(tensor).primal
    return primal


def derivative_levels(tensor: Tensor) -> int:
    """Number of torch.func transforms that differentiate this tensor, forward or backward."""
    count = 0
    with outside_transforms() as stack:  # innermost first
        while is_wrapped(tensor):
            if tensor.requires_grad:
                count += 1
            elif vmap_axis(tensor) is None:
                level = torch._C._functorch.maybe_get_level(tensor)
                with inside_transforms(stack[len(stack) - level :]):
                    count += has_tangent(tensor)
            tensor = unwrapped(tensor)
    return count


def push(function: Callable[..., tuple[Tensor, ...]], primals: Any, tangents: Any) -> tuple[Tensor, ...]:
    """The forward derivative of a function along tangents, also inside a `jvp` rule.

    There torch.func.jvp would open a second level of `forward_ad`, which torch refuses: the open one is used.
    """
    if in_transform():
        pushed: tuple[Tensor, ...] = torch.func.jvp(function, primals, tangents)[1]
        return pushed
    with forward_derivatives():
        duals = (
            forward_ad.make_dual(without_tangent(x), dot) for x, dot in zip(primals, tangents, strict=True)
        )
        unpacked = [forward_ad.unpack_dual(x) for x in function(*duals)]
    return tuple(torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in unpacked)


# ---- other private names


class _Inside:
    """A function that is called inside a context."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]):
        self.context, self.function = context, function

    def __call__(self, *arguments: Any) -> Any:
        with self.context():
            return self.function(*arguments)


def rerun_checkpoint_inside(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """If an activation checkpoint is running now, have its recomputation run inside `context`.

    torch recomputes a non-reentrant checkpoint in the backward pass and expects it to save the same tensors.
    The running checkpoint is found by the hook that saves its tensors.
    """
    checkpoint = sys.modules.get("torch.utils.checkpoint")  # loaded by whoever checkpoints
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) if checkpoint is not None else None
    for cell in getattr(hooks[0], "__closure__", None) or () if hooks else ():
        frame = cell.cell_contents
        if isinstance(frame, cast(Any, checkpoint)._CheckpointFrame) and not isinstance(
            frame.recompute_fn, _Inside
        ):
            frame.recompute_fn = _Inside(context, frame.recompute_fn)


no_torch_function = torch._C._disabled_torch_function_impl
"""Value of ``__torch_function__`` for a subclass of Tensor that does not override torch's functions."""


def empty_wrapper(cls: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """An instance of a subclass of Tensor that holds no numbers of its own."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def standard_gamma(shape: Tensor, generator: torch.Generator | None) -> Tensor:
    """Gamma(shape, 1) draws by torch, of the size of `shape`."""
    return torch._standard_gamma(shape.contiguous(), generator=generator)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for this device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Context with autocast off: it would multiply matrices in half precision and return another dtype."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


class _Observed(TorchDispatchMode):
    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled. torch's own answer imports its compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, out)
        return out


def observed(function: Callable[..., Any], arguments: tuple[Tensor, ...], note: Callable[..., None]) -> Any:
    """Call the function, and ``note(operation, args, kwargs, result)`` after each of torch's operations."""
    with _Observed(note):
        return function(*arguments)
