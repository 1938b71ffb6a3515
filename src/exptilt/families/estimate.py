"""A number with its pedigree: computed, estimated by sampling, or only bracketed.

Divergences and entropies of mixtures have no closed form. Rather than one tensor that hides how it came about, they come as an
`Estimate`: its `kind` says what `value` is, `standard_error` how far sampling may have thrown it, and ``[lower, upper]`` is a bracket
that holds without any sampling at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

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
    """A value with its pedigree.

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
    def sampled(cls, draws: Tensor, lower: Tensor, upper: Tensor) -> "Estimate":
        """The mean of independent draws.

        Args:
            draws: ``(S, ...)``, S > 1.
            lower: ``(...)``.
            upper: ``(...)``.
        """
        value = draws.mean(0)
        error = draws.std(0) / draws.shape[0] ** 0.5
        return cls(value, torch.where(value.isinf(), 0.0, error), lower, upper, Kind.ESTIMATED)

    @classmethod
    def bounded(cls, lower: Tensor, upper: Tensor) -> "Estimate":
        """From a bracket alone; the standard error is not a number because nothing was sampled.

        Args:
            lower: ``(...)``.
            upper: ``(...)``.
        """
        return cls((lower + upper) / 2, torch.full_like(lower, torch.nan), lower, upper, Kind.BOUNDED)


def _flatten(estimate: Estimate) -> tuple[list[Tensor], Kind]:
    return [estimate.value, estimate.standard_error, estimate.lower, estimate.upper], estimate.kind


def _unflatten(children: Iterable[Tensor], kind: Kind) -> Estimate:
    value, error, lower, upper = children
    return Estimate(value, error, lower, upper, kind)


pytree.register_pytree_node(Estimate, _flatten, _unflatten, serialized_type_name="exptilt.Estimate")
