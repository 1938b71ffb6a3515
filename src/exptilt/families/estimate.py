"""A number that says how it was obtained: computed, estimated by sampling, or only bracketed.

Divergences and entropies of mixtures have no closed form. Rather than one tensor that hides how it came
about, they come as an `Estimate`: its `kind` says what `value` is, `standard_error` how far sampling may have
thrown it, and ``[lower, upper]`` is a bracket that holds without any sampling at all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import pytree


class Kind(Enum):
    """What the value of an `Estimate` is. The text of a member is its message."""

    EXACT = "exact: a closed form, standard error 0"
    ESTIMATED = "estimated: the mean of a sample (or a quadrature sum), with its standard error"
    BOUNDED = "bounded: the middle of the deterministic bracket, no sample was drawn"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Estimate:
    """A value and how it was obtained; `float` gives it, and +, −, ×, ÷ take numbers and other estimates.

    Standard errors propagate to first order as those of *independent* estimates, so an estimate should not
    meet itself (``e - e`` has a standard error). The bracket is interval arithmetic and holds either way. A
    result is exact if both sides are, bounded (its value the middle of its bracket) if one is bounded, and
    estimated otherwise.

    Args:
        value: ``(...)``.
        standard_error: ``(...)``, 0 where exact or infinite, not a number where nothing was sampled.
        lower: ``(...)``, holds for certain.
        upper: ``(...)``, holds for certain.
        kind: what `value` is.
    """

    value: Tensor
    standard_error: Tensor
    lower: Tensor
    upper: Tensor
    kind: Kind

    @classmethod
    def exact(cls, value: Tensor) -> "Estimate":
        """A closed form: its own lower and upper bound.

        Args:
            value: ``(...)``.
        """
        return cls(value, torch.zeros_like(value), value, value, Kind.EXACT)

    @classmethod
    def sampled(cls, draws: Tensor, lower: Tensor, upper: Tensor, score: Tensor | None = None) -> "Estimate":
        """The mean of independent draws.

        Args:
            draws: ``(S, ...)``, S > 1, values of a function at draws of a measure.
            lower: ``(...)``.
            upper: ``(...)``.
            score: ``(S, ...)``, log-probability of all in the draws that carries no derivative. The
                derivative of the mean then has the term E[value ∇score], with the mean of the other draws
                taken off each value.
        """
        value, count = draws.mean(0), draws.shape[0]
        error = draws.std(0) / count**0.5
        if score is not None:
            offset = torch.where(draws.isfinite() & value.isfinite(), draws - value, 0.0) * (
                count / (count - 1)
            )
            value = value + (offset * torch.expm1(score - score.detach())).mean(0)
        return cls(value, torch.where(value.isinf(), 0.0, error), lower, upper, Kind.ESTIMATED)

    @classmethod
    def bounded(cls, lower: Tensor, upper: Tensor) -> "Estimate":
        """From a bracket alone; the standard error is not a number because nothing was sampled.

        Args:
            lower: ``(...)``.
            upper: ``(...)``.
        """
        return cls((lower + upper) / 2, torch.full_like(lower, torch.nan), lower, upper, Kind.BOUNDED)

    def __float__(self) -> float:
        return float(self.value)

    def __neg__(self) -> "Estimate":
        return Estimate(-self.value, self.standard_error, -self.upper, -self.lower, self.kind)

    def __add__(self, other: "Estimate | Tensor | float") -> "Estimate":
        return self._with(other, lambda a, b: a + b, lambda a, b: (torch.ones_like(a), torch.ones_like(b)))

    def __sub__(self, other: "Estimate | Tensor | float") -> "Estimate":
        return self + -other if isinstance(other, Estimate | Tensor | int | float) else NotImplemented

    def __mul__(self, other: "Estimate | Tensor | float") -> "Estimate":
        return self._with(other, _times, lambda a, b: (b, a))

    def __truediv__(self, other: "Estimate | Tensor | float") -> "Estimate":
        if not isinstance(other, Estimate | Tensor | int | float):
            return NotImplemented
        right = self._lifted(other)
        spread = (right.lower <= 0) & (right.upper >= 0) & (right.lower < right.upper)
        low = torch.where(spread, -torch.inf, 1 / right.upper)
        high = torch.where(spread, torch.inf, 1 / right.lower)
        error = right.standard_error / right.value**2
        return self * Estimate(1 / right.value, error, low, high, right.kind)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: "Tensor | float") -> "Estimate":
        return -self + other

    def __rtruediv__(self, other: "Tensor | float") -> "Estimate":
        return self._lifted(other) / self

    def _lifted(self, other: "Estimate | Tensor | float") -> "Estimate":
        """A number as an exact estimate."""
        return other if isinstance(other, Estimate) else Estimate.exact(torch.as_tensor(other).to(self.value))

    def _with(
        self,
        other: "Estimate | Tensor | float",
        combine: Callable[[Tensor, Tensor], Tensor],
        slopes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> "Estimate":
        """An operation that is monotone in either argument, with its two derivatives."""
        if not isinstance(other, Estimate | Tensor | int | float):
            return NotImplemented
        right = self._lifted(other)
        corners = [combine(a, b) for a in (self.lower, self.upper) for b in (right.lower, right.upper)]
        stacked = torch.stack(torch.broadcast_tensors(*corners))
        lower, upper = stacked.amin(0), stacked.amax(0)
        if Kind.BOUNDED in (self.kind, right.kind):
            return Estimate.bounded(lower, upper)
        both = self.kind is right.kind is Kind.EXACT
        by_left, by_right = slopes(self.value, right.value)
        error = torch.hypot(
            _times(by_left, self.standard_error), _times(by_right, right.standard_error)
        ).expand(lower.shape)
        value = combine(self.value, right.value)
        return Estimate(value, error, lower, upper, Kind.EXACT if both else Kind.ESTIMATED)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a b, where 0 times an infinite end of a bracket is 0."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def samples_wanted(caller: str, samples: int) -> int:
    """How many draws are taken: none, or enough for a standard error."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0 or samples == 1:
        raise ArgumentError(f"{caller}: samples must be 0 (bounds alone) or at least 2; got {samples}.")
    return samples


def _flatten(estimate: Estimate) -> tuple[list[Tensor], Kind]:
    return [estimate.value, estimate.standard_error, estimate.lower, estimate.upper], estimate.kind


def _unflatten(children: Iterable[Tensor], kind: Kind) -> Estimate:
    value, error, lower, upper = children
    return Estimate(value, error, lower, upper, kind)


pytree.register_pytree_node(Estimate, _flatten, _unflatten, serialized_type_name="exptilt.Estimate")
