"""Functions of torch whose second derivatives are silently wrong in some order of nesting, written out.

With torch 2.13, measured against central differences in float64:

- ``layer_norm``, and ``batch_norm`` and ``instance_norm`` with statistics of the batch, are wrong (by 30 %
  for one layer) in a gradient of a forward derivative, in `torch.func.hessian` by weights, and in any second
  derivative over a backward pass under ``vmap``: the saved mean and deviation are taken for constants.
- ``det``, ``slogdet``, ``logdet`` and ``linalg.solve`` are wrong in a derivative of a forward derivative: the
  saved factorisation is taken for a constant.
- ``nn.utils.weight_norm`` is wrong in a second backward pass.

`jvp` of `grad`, and for the first two groups a second backward pass, are right as torch has them. There
torch's own functions stay, because they keep fewer tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from exptilt._support.transforms import WEIGHT_NORM, derivatives_are_nested, pytree


class Corrections(TorchFunctionMode):
    """Context in which the functions of `WRITTEN_OUT` are replaced wherever derivatives are nested."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is WEIGHT_NORM:
            return _weight_norm(*args, **kwargs)
        if function in WRITTEN_OUT and derivatives_are_nested(pytree.tree_leaves((args, kwargs))):
            function = WRITTEN_OUT[function]
        return function(*args, **kwargs)


def _normed(x: Tensor, axes: tuple[int, ...], eps: float, *scales: Tensor | None) -> Tensor:
    """weight (x − mean) / deviation + bias over some axes, computed in float32 at least."""
    weight, bias = scales
    wide = x.float() if x.dtype.itemsize < 4 else x
    centred = wide - wide.mean(axes, keepdim=True)
    found = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    return found.to(torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _normed(input, tuple(range(-len(normalized_shape), 0)), eps, weight, bias)


def _by_channel(x: Tensor, axes: tuple[int, ...], eps: float, *scales: Tensor | None) -> Tensor:
    """The norm with one weight and one bias for each entry of the second axis."""
    shape = (-1, *[1] * (x.ndim - 2))
    weight, bias = (None if scale is None else scale.reshape(shape) for scale in scales)
    return _normed(x, axes, eps, weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    own = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    axes = (0, *range(2, input.ndim))  # torch's own has moved the running statistics
    return _by_channel(input, axes, eps, weight, bias) if training else own


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    own = F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _by_channel(input, tuple(range(2, input.ndim)), eps, weight, bias) if use_input_stats else own


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = None if dim == -1 else tuple(axis for axis in range(v.ndim) if axis != dim)
    length: Tensor = torch.linalg.vector_norm(v, dim=axes, keepdim=dim != -1)
    return v * (g / length)


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    if not left:
        return _solve(A.mT, B.mT).mT
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    P, L, U = torch.linalg.lu(A)
    y = torch.linalg.solve_triangular(L, P.mT @ (B[..., None] if vector else B), upper=False)
    x: Tensor = torch.linalg.solve_triangular(U, y, upper=True)
    return x[..., 0] if vector else x


def _pivots(A: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal of U in A = P L U, and the sign of P."""
    P, _, U = torch.linalg.lu(A)
    return U.diagonal(dim1=-2, dim2=-1), torch.linalg.slogdet(P.detach()).sign


def _slogdet(A: Tensor) -> Any:
    pivots, sign = _pivots(A)
    return torch.return_types.linalg_slogdet(  # type: ignore[attr-defined]
        (sign * pivots.detach().sgn().prod(-1), pivots.abs().log().sum(-1))
    )


def _logdet(A: Tensor) -> Tensor:
    sign, size = _slogdet(A)
    return torch.where(sign < 0, torch.nan, size)


def _det(A: Tensor) -> Tensor:
    pivots, sign = _pivots(A)
    return sign * pivots.prod(-1)


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch.linalg.solve: _solve,
    **dict.fromkeys((torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
    **dict.fromkeys((torch.linalg.det, torch.det, Tensor.det), _det),
}
