"""`torch.vmap` of the rules: a mapped axis becomes a batch axis in front; the rest is expanded."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from exptilt._support.transforms import as_batch, in_batches, is_batch, without_batch


def fold(function: Any, info: Any, in_dims: Any, *arguments: Any) -> Any:
    """The `vmap` rule of an autograd function on canonical tensors."""

    def mapped(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    results = function.apply(*(mapped(x, dim) for x, dim in zip(arguments, in_dims, strict=True)))
    # () stands for what is not needed
    made = tuple(x if x.dim() else x.expand(info.batch_size) for x in results)
    return made, (0,) * len(made)


def fold_batches(forward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A forward rule that takes batches of ``grad(is_grads_batched=True)`` too, which ask no `vmap` rule."""

    @wraps(forward)
    def folded(*arguments: Any) -> tuple[Tensor, ...]:
        level = in_batches()
        batch = level and next((x for x in arguments if isinstance(x, Tensor) and is_batch(x)), None)
        if not isinstance(batch, Tensor):
            return forward(*arguments)
        size = without_batch(batch, level, 1).shape[0]
        plain = (without_batch(x, level, size) if isinstance(x, Tensor) else x for x in arguments)
        return tuple(as_batch(x, level) if x.dim() else x for x in forward(*plain))

    return folded
