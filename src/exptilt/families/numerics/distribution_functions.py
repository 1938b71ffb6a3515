"""Distribution functions and quantiles that torch does not have, entry by entry, from `scipy.special`.

SciPy's functions have no derivative here, so a tensor that requires a gradient is refused; and they need
values, so they work neither inside `torch.compile` nor under `torch.func`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete


def by_scipy(name: str, *arguments: Tensor) -> Tensor:
    """The values of a function of `scipy.special` at tensors that broadcast."""
    from scipy import special

    if not _plain(*arguments):
        wanted = "Pass detached tensors, outside of torch.func and torch.compile."
        raise ArgumentError(f"scipy.special.{name} has neither derivatives nor transforms. {wanted}")
    arrays = [x.detach().cpu().double().numpy() for x in arguments]
    value = torch.as_tensor(getattr(special, name)(*arrays)).to(arguments[0])
    return value


def incomplete_gamma(a: Tensor, x: Tensor, *, upper: bool = False) -> Tensor:
    """The regularised incomplete gamma function: SciPy's, or torch's where a derivative in x is wanted.

    Torch's is right to only nine digits where x is near a large a.
    """
    a, x = torch.broadcast_tensors(a, x)
    name = "gammaincc" if upper else "gammainc"
    value: Tensor = by_scipy(name, a, x) if _plain(a, x) else getattr(torch.special, name)(a, x)
    return value


def _plain(*arguments: Tensor) -> bool:
    """Whether values can be read and no derivative is wanted."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in arguments)
    return is_concrete(*arguments) and not wanted


def least_count(cdf: Callable[[Tensor], Tensor], guess: Tensor, q: Tensor) -> Tensor:
    """The least count whose ``cdf`` reaches q, from a guess that may be off by one."""
    guess = guess.clamp_min(0)
    lower = (guess - 1).clamp_min(0)
    count = torch.where(cdf(guess) < q, guess + 1, torch.where(cdf(lower) >= q, lower, guess))
    return torch.where(q.isnan(), torch.nan, count)
