"""`torch.vmap` of the rules: a mapped axis becomes a batch axis in front; the rest is expanded."""

from typing import Any

from torch import Tensor


def fold(function: Any, info: Any, in_dims: Any, arguments: Any) -> Any:
    """The `vmap` rule of an autograd function on canonical tensors."""

    def mapped(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    results = function.apply(*(mapped(x, dim) for x, dim in zip(arguments, in_dims, strict=True)))
    made = tuple(
        x if x.dim() else x.expand(info.batch_size) for x in results
    )  # () stands for what is not needed
    return made, (0,) * len(made)
