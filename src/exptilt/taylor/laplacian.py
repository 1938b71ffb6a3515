r"""The Laplacian of a function in one sweep from its input to its output: a forward Laplacian.

    Δf(x) = Σ_d ∂²f/∂x_d²

is what the kinetic energy of a wave function and many differential equations ask of a network. By nested
derivatives it takes D Hessian products. Here every tensor of the network carries its D derivatives and its
Laplacian along (``rules.py``), which costs about as much as D + 1 more samples in the batch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import uncompiled
from exptilt.taylor import attention, rules  # noqa: F401  (the rules)
from exptilt.taylor.jets import Jet, NoRuleError, make_jet


class Laplacian(NamedTuple):
    """A function's value, gradient and Laplacian at a point.

    Attributes:
        value: ``(*batch, *out)``.
        gradient: ``(*batch, *out, *event)``, by the coordinates of the input.
        laplacian: ``(*batch, *out)``, the sum of its second derivatives by them.
    """

    value: Tensor
    gradient: Tensor
    laplacian: Tensor


def laplacian(
    function: Callable[[Tensor], Tensor], x: Tensor, *, batch_dims: int = 0, chunk_size: int | None = None
) -> Laplacian:
    r"""Value, gradient and Laplacian of a function made of attention, linear maps, norms and activations.

    Exact. Functions and modules are taken as they are written; an operation without a rule is refused by its
    name. The results can be differentiated backwards once more, by parameters and by x.

    Args:
        function: takes a tensor of the shape of x and returns one tensor ``(*batch, *out)``, such as an
            `nn.Module`. Along the first `batch_dims` axes it must treat samples apart (no batch norm).
        x: ``(*batch, *event)``, floating point: the point, or a batch of points.
        batch_dims: how many leading axes are samples; derivatives are by the other axes, of each sample.
        chunk_size: how many of the D coordinates to carry along at once; None for all. Memory grows with it.

    Returns:
        A record of value ``(*batch, *out)``, gradient ``(*batch, *out, *event)`` and laplacian
        ``(*batch, *out)``.

    Example:
        >>> xt.laplacian(lambda x: x.square().sum(), torch.ones(4)).laplacian
        tensor(8.)
    """
    name = "laplacian"
    if not callable(function):
        got = type(function).__name__
        raise ArgumentError(f"{name}: function is a {got}. Pass a function of one tensor, such as a module.")
    checks.floating(name, "x", x)
    if isinstance(x, Jet):
        raise ArgumentError(
            f"{name}: a Laplacian within a Laplacian. Take the inner one by torch.func.hessian."
        )
    batch_dims = checks.whole(name, "batch_dims", batch_dims, least=0)
    if batch_dims > x.dim():
        hint = f"Pass at most {x.dim()}."
        raise ArgumentError(f"{name}: batch_dims is {batch_dims}, but x has shape {tuple(x.shape)}. {hint}")
    batch, event = x.shape[:batch_dims], x.shape[batch_dims:]
    D = math.prod(event)
    if D == 0:
        raise ArgumentError(f"{name}: x has shape {tuple(x.shape)}: no coordinate to differentiate by.")
    step = D if chunk_size is None else checks.whole(name, "chunk_size", chunk_size)
    unit = torch.eye(D, dtype=x.dtype, device=x.device).reshape(D, *(1,) * batch_dims, *event)
    gradients, total, value = [], None, None
    for along in unit.expand(D, *x.shape).split(step):
        with uncompiled():
            y = function(make_jet(x, torch.cat([along, torch.zeros_like(along[:1])])))
        if not isinstance(y, Tensor) or not (isinstance(y, Jet) or y.is_floating_point()):
            got = f"a tensor of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            hint = "Return one tensor of real numbers: laplacian(lambda x: model(x)[0], x)."
            raise ArgumentError(f"{name}: function returned {got}. {hint}")
        if (y.value if isinstance(y, Jet) else y).device != x.device:
            raise NoRuleError(
                f"{name}: derivatives were lost in a part of the function that torch does not show. Leave "
                "out torch.jit and transforms of torch.func in it; for a batch there is batch_dims=."
            )
        if not isinstance(y, Jet):  # it does not depend on x
            y = make_jet(y, y.new_zeros(len(along) + 1, *y.shape))
        value, rows = y.value, y.rows
        if value.shape[:batch_dims] != batch:
            got = f"{tuple(value.shape)} for x of shape {tuple(x.shape)}"
            raise ArgumentError(
                f"{name}: function returned {got}, and batch_dims is {batch_dims}. The first axes of both "
                "are the batch: return one result for each sample."
            )
        gradients.append(rows[:-1])
        total = rows[-1] if total is None else total + rows[-1]
    if value is None or total is None:
        raise ArgumentError(f"{name}: x has shape {tuple(x.shape)}: nothing to differentiate.")
    gradient = torch.cat(gradients).movedim(0, -1).reshape(*value.shape, *event)
    return Laplacian(value, gradient, total)
