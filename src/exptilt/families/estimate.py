"""A number that says how it was obtained: computed, estimated by sampling, or only bracketed.

Divergences and entropies of mixtures have no closed form. They are returned as an `Estimate`: its `kind` says
how `value` was obtained, `standard_error` how far sampling may have put it off, and ``[lower, upper]`` is a
bracket that does not depend on sampling.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt._support.transforms import is_concrete, pytree


class EstimateKind(Enum):
    """How the value of an `Estimate` was obtained; `str` gives the message."""

    EXACT = "exact: a closed form, standard error 0"
    ESTIMATED = "estimated: the mean of a sample, with its standard error"
    QUADRATURE = "quadrature: a sum over nodes; its error is blind to a peak between the finest nodes"
    BOUNDED = "bounded: the middle of the deterministic bracket, no sample was drawn"

    def __str__(self) -> str:
        return self.value


def _comparison(operator: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A comparison of the values of two estimates, or of an estimate and a number or tensor."""

    def compared(self: "Estimate", other: "Estimate | Tensor | float") -> Tensor:
        if not isinstance(other, Estimate | Tensor | int | float):
            return NotImplemented
        return operator(self.value, getattr(other, "value", other))

    return compared


@dataclass(frozen=True, eq=False)
class Estimate:
    """A value and how it was obtained; `float` gives the value.

    Comparisons compare the values and give tensors of booleans. A format such as ``f"{e:.3f}"`` shows the
    standard error after an estimated value, the bracket after one that is only bounded, and says so if the
    value comes from quadrature, whose error does not know of peaks between the nodes.

    Args:
        value: ``(...)``.
        standard_error: ``(...)``, 0 where the value is exact or infinite, NaN where nothing was sampled.
        lower: ``(...)``, holds for certain.
        upper: ``(...)``, holds for certain.
        kind: how `value` was obtained.
    """

    value: Tensor
    standard_error: Tensor
    lower: Tensor
    upper: Tensor
    kind: EstimateKind

    @classmethod
    def exact(cls, value: Tensor) -> "Estimate":
        """An exact value, which is its own lower and upper bound.

        Args:
            value: ``(...)``.
        """
        return cls(value, torch.zeros_like(value), value, value, EstimateKind.EXACT)

    @classmethod
    def sampled(cls, draws: Tensor, lower: Tensor, upper: Tensor, score: Tensor | None = None) -> "Estimate":
        """The mean of independent draws, moved into its bracket.

        A mean outside the bracket by no more than sampling explains is moved to the nearer end and keeps its
        derivatives. A mean that contradicts the bracket is an error, or NaN if values cannot be read.

        Args:
            draws: ``(S, ...)``, S > 1, values of a function at draws of a measure.
            lower: ``(...)``.
            upper: ``(...)``.
            score: ``(S, ...)``, log-probability of the part of the draws that is not differentiable. It
                adds the term E[value ∇score] to the derivative of the mean, with the mean of the other
                draws subtracted from each value.
        """
        value, count = draws.mean(0), draws.shape[0]
        error = draws.std(0) / count**0.5
        if score is not None:
            offset = torch.where(draws.isfinite() & value.isfinite(), draws - value, 0.0) * (
                count / (count - 1)
            )
            value = value + (offset * torch.expm1(score - score.detach())).mean(0)
        error = torch.where(value.isinf(), 0.0, error)
        return cls(_bracketed(value, error, lower, upper), error, lower, upper, EstimateKind.ESTIMATED)

    @classmethod
    def bounded(cls, lower: Tensor, upper: Tensor) -> "Estimate":
        """The middle of a bracket; the standard error is NaN because nothing was sampled.

        Args:
            lower: ``(...)``.
            upper: ``(...)``.
        """
        return cls((lower + upper) / 2, torch.full_like(lower, torch.nan), lower, upper, EstimateKind.BOUNDED)

    def to(self, dtype: torch.dtype) -> "Estimate":
        """The same estimate in another dtype.

        Args:
            dtype: of all its tensors.
        """
        converted: Estimate = pytree.tree_map(lambda x: x.to(dtype), self)
        return converted

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The value, for `numpy.asarray`."""
        return np.asarray(self.value.detach().cpu(), dtype=dtype)

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        value, error, lower, upper = (
            format(float(x), spec) for x in (self.value, self.standard_error, self.lower, self.upper)
        )
        if self.kind is EstimateKind.BOUNDED:
            return f"{value} in [{lower}, {upper}]"
        shown = value if self.kind is EstimateKind.EXACT else f"{value} ± {error}"
        return f"{shown} (quadrature)" if self.kind is EstimateKind.QUADRATURE else shown

    __eq__ = _comparison(torch.eq)  # type: ignore[assignment]
    __ne__ = _comparison(torch.ne)  # type: ignore[assignment]
    __lt__, __le__ = _comparison(torch.lt), _comparison(torch.le)
    __gt__, __ge__ = _comparison(torch.gt), _comparison(torch.ge)
    __hash__ = object.__hash__


def _bracketed(value: Tensor, error: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """A sample mean moved into its bracket; an error if it is outside by more than 8 standard errors."""
    size = torch.where(value.isfinite(), value.abs(), 0.0)
    slack = 8 * error + torch.finfo(value.dtype).eps ** 0.5 * (1 + size)
    believable = (value >= lower - slack) & (value <= upper + slack)  # False for NaN
    if is_concrete(believable) and not bool(believable.all()):
        got, deviation, low, high = (float(x[~believable][0]) for x in (value, error, lower, upper))
        raise ConvergenceError(
            f"the sample mean {got:.6g} ± {deviation:.2g} contradicts the bracket [{low:.6g}, {high:.6g}], "
            "which holds for certain: the draws or their densities are not right in this precision. "
            "Pass float64, or samples=0 for the bracket alone."
        )
    moved = torch.where(
        value.isfinite(), value.detach().clamp(lower.detach(), upper.detach()) - value.detach(), 0.0
    )
    return torch.where(believable, value + moved, torch.nan)


def samples_wanted(caller: str, samples: int) -> int:
    """The checked number of draws: 0, or at least 2 for a standard error."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0 or samples == 1:
        raise ArgumentError(f"{caller}: samples must be 0 (bounds alone) or at least 2; got {samples}.")
    return samples


def _flatten(estimate: Estimate) -> tuple[list[Tensor], EstimateKind]:
    return [estimate.value, estimate.standard_error, estimate.lower, estimate.upper], estimate.kind


def _unflatten(children: Iterable[Tensor], kind: EstimateKind) -> Estimate:
    value, error, lower, upper = children
    return Estimate(value, error, lower, upper, kind)


pytree.register_pytree_node(Estimate, _flatten, _unflatten, serialized_type_name="exptilt.Estimate")

Kind = EstimateKind  # the name in older pickles
