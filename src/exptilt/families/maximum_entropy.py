r"""Maximum entropy under mean constraints.

    primal   min_x  log Σ_i e^{y_i} − ⟨c, x⟩,   y = Ax + b
    dual     max_ν  ⟨b, ν⟩ − Σ_i ν_i log ν_i    such that  Σ_i ν_i = 1,  A'ν = c,  ν ≥ 0

(THEORY A11 has c = 0.) The gap is zero and ν = softmax(Ax + b): the law of largest entropy relative to the
base measure e^b that satisfies the constraints is that base measure tilted, and the multipliers x are the
tilt. So the work is `Empirical(A, b).natural(c)`: the rows of A are the points.

`conflicting` says which mean constraints contradict each other. A law ν on the points x_n with mean m exists
unless some d has ⟨d, x_n − m⟩ < 0 for every n (Farkas). The constraints that such a d uses, d_j ≠ 0, cannot
all be met: the d with the least Σ|d_j| is found by a linear program,

    min Σ_j |d_j|     such that     ⟨d, x_n − m⟩ ≤ −1 for every n,

and uses few constraints. Then blocks of them (halves, quarters, down to single ones) are dropped wherever the
rest still contradict each other. The result is a minimal set: none of its constraints can be dropped.

A contradiction of size ε needs d of size 1/ε, which the program does not find much below ε = 1e-9. Then the
distance of m from the hull decides instead; it is accurate to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import entries, finite, floating
from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution, Status
from exptilt._support.transforms import is_concrete
from exptilt.families.checks import check_tensors
from exptilt.families.members.empirical import Empirical
from exptilt.families.numerics.hull import Array, nearest_to_origin, solve_by_rows, some_rows


@dataclass(frozen=True)
class MaximumEntropy:
    """The primal and dual optimum of a maximum entropy problem, and the gap between them.

    Args:
        log_probability: ``(..., n)``, log ν, the law of largest entropy.
        multiplier: ``(..., k)``, x.
        primal: ``(...)``, log Σ e^{Ax+b} − ⟨c,x⟩.
        dual: ``(...)``, ⟨b,ν⟩ + H(ν).
        gap: ``(...)``, primal − dual.
        conflict: for each problem that cannot be satisfied, by its batch index, the names of constraints that
            contradict each other; empty under `torch.func`, where values cannot be read.
    """

    log_probability: Tensor
    multiplier: Tensor
    primal: Tensor
    dual: Tensor
    gap: Tensor
    conflict: dict[tuple[int, ...], tuple[str, ...]]

    @property
    def probability(self) -> Tensor:
        """ν, ``(..., n)``."""
        return self.log_probability.exp()


def maximum_entropy(
    A: Tensor,
    b: Tensor | None = None,
    *,
    mean: Tensor | None = None,
    names: Sequence[str] | None = None,
    tolerance: float | None = None,
    max_steps: int = 100,
) -> Solution[MaximumEntropy]:
    """The law on n outcomes of largest entropy relative to e^b that gives the columns of A the wanted means.

    Args:
        A: ``(..., n, k)``, the k constraint functions at the n outcomes.
        b: ``(..., n)``, log of the base measure; default 0, the counting measure; −inf forbids an outcome.
        mean: ``(..., k)``, the wanted means; default 0.
        names: of the constraints, for `value.conflict`; default their numbers.
        tolerance: as for `Measure.natural`.
        max_steps: as for `Measure.natural`.

    Returns:
        A `Solution` whose residual is the largest violation of a constraint. Its status is BOUNDARY where the
        constraints force some probabilities to zero, and OUTSIDE where they cannot be met; then
        `value.conflict` names constraints that contradict each other.

    Example:
        >>> dice = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
        >>> found = maximum_entropy(dice, mean=torch.tensor([4.5], dtype=torch.float64))
        >>> found.status.name, [round(p, 4) for p in found.value.probability.tolist()]
        ('CONVERGED', [0.0544, 0.0788, 0.1142, 0.1654, 0.2398, 0.3475])
    """
    _check(A, b, mean)
    labels = tuple(map(str, range(A.shape[-1]))) if names is None else tuple(names)
    if len(labels) != A.shape[-1]:
        count = f"{A.shape[-1]} constraints (columns of A)"
        raise ArgumentError(f"maximum_entropy: {len(labels)} names for {count}.")
    base = Empirical(A, b)
    wanted = A.new_zeros(A.shape[-1]) if mean is None else mean
    solution = base.natural(wanted, tolerance=tolerance, max_steps=max_steps)
    x = solution.value
    offset = A - wanted.unsqueeze(-2)  # A @ x itself would lose digits if columns are large
    score = (x.unsqueeze(-2) @ offset.mT).squeeze(-2)
    log_total = torch.logsumexp(score + base.log_weight, -1)
    log_probability = score + base.log_weight - log_total.unsqueeze(-1)
    primal = log_total
    alive = log_probability > -torch.inf
    dual = torch.where(alive, log_probability.exp() * (base.log_weight - log_probability), 0.0).sum(-1)
    conflict = _conflicts(base, wanted.expand_as(x), solution.code == Status.OUTSIDE.code, labels)
    value = MaximumEntropy(log_probability, x, primal, dual, primal - dual, conflict)
    weight = value.probability.unsqueeze(-1)
    violation = (weight * offset).sum(-2).abs()
    # Residual of the returned law: rounding of the multipliers has changed it since `natural`.
    spread = (weight * offset**2).sum(-2).sqrt()
    precision = torch.finfo(A.dtype).eps
    allowed = (precision**0.5 if tolerance is None else tolerance) * spread + 16 * precision * wanted.abs()
    broken = (solution.code == Status.CONVERGED.code) & ~(violation <= allowed).all(-1)
    code = torch.where(broken, Status.STALLED.code, solution.code).to(torch.int8)
    return Solution(value, code, violation.amax(-1), solution.steps, solution.distance)


def _check(A: Tensor, b: Tensor | None, mean: Tensor | None) -> None:
    """Raise unless dtypes, shapes and values of the arguments are right."""
    caller = "maximum_entropy"
    outcomes, constraints = floating(caller, "A", A, axes=2, shape="(..., outcomes, constraints)").shape[-2:]
    fields = {"A": (A, 2)} | {name: (x, 1) for name, x in (("b", b), ("mean", mean)) if x is not None}
    check_tensors(caller, fields)
    finite(caller, A=A)
    for name, x, size, which in (("mean", mean, constraints, "column"), ("b", b, outcomes, "row")):
        if x is not None and x.shape[-1] != size:
            got = str(tuple(x.shape))
            raise ArgumentError(
                f"{caller}: {name} must be (..., {size}), one per {which} of A; got shape {got}."
            )
    if mean is not None:
        finite(caller, mean=mean)
    if b is not None:
        entries(caller, "b", b, ~b.isnan() & (b < torch.inf), "a number below +inf")
        entries(caller, "b", b, (b > -torch.inf).any(-1), "above −inf for some outcome")


def _conflicts(
    base: Empirical, mean: Tensor, outside: Tensor, labels: tuple[str, ...]
) -> dict[tuple[int, ...], tuple[str, ...]]:
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    if not is_concrete(outside):
        return found
    for index in map(tuple, outside.nonzero().tolist()):
        points = base.points.expand(*outside.shape, *base.points.shape[-2:])[index]
        alive = base.log_weight.expand(*outside.shape, -1)[index] > -torch.inf
        cloud, wanted = (x.detach().double().cpu().numpy() for x in (points[alive], mean[index]))
        found[index] = tuple(labels[j] for j in conflicting(cloud, wanted))
    return found


def conflicting(points: Array, mean: Array) -> list[int]:
    """Numbers of constraints (columns of ``points (N, k)``) that contradict each other at ``mean (k)``.

    Every constraint that cannot be met even alone; if there are none, a minimal contradictory set.

    Example:
        >>> square = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> conflicting(square, np.array([0.5, 3.0]))
        [1]
    """
    offset = points - mean
    scale = np.maximum(np.abs(offset).max(0), np.finfo(float).tiny)
    offset = offset / scale
    alone = np.flatnonzero((offset > 0).all(0) | (offset < 0).all(0))
    if alone.size:
        return [int(j) for j in alone]
    few = some_rows(len(offset))
    noise = 32 * np.finfo(float).eps * (offset.shape[1] + float(np.abs(mean / scale).max()))
    every = list(range(offset.shape[1]))

    def apart(columns: list[int]) -> list[int]:
        return columns if np.linalg.norm(nearest_to_origin(offset[:, columns])) > noise else []

    return _least(every, lambda columns: _separating(offset, columns, few)) or _least(every, apart)


def _least(columns: list[int], contradictory: Callable[[list[int]], list[int]]) -> list[int]:
    """A minimal contradictory set of columns; `contradictory` finds such a set among some columns, or []."""
    kept = contradictory(columns)
    block = len(kept)
    while block > 1:
        block = (block + 1) // 2
        for start in reversed(range(0, len(kept), block)):
            rest = kept[:start] + kept[start + block :]
            kept = (contradictory(rest) if 0 < len(rest) < len(kept) else []) or kept
    return kept


def _separating(offset: Array, columns: list[int], few: set[int]) -> list[int]:
    """Columns that the shortest separating d uses, [] if there is none; adds violated points to `few`."""
    rows, size = offset[:, columns], len(columns)
    both = solve_by_rows(np.ones(2 * size), np.hstack([rows, -rows]), -np.ones(len(rows)), few, 1e-6)
    if both is None:
        return []
    d = np.abs(both[:size] - both[size:])
    return [j for j, part in zip(columns, d, strict=True) if part > 1e-7 * d.max()]
