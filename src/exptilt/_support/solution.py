"""The result of a solver: the value, and how far it can be trusted.

A solver that works on a batch solves many problems at once, and each of them ends in its own way.
`Solution.code` keeps one small integer per problem; `Solution.status` is the worst of them as a `Status`,
whose text is the message. Not converging is never silent, and never an exception unless the caller asks for
one with `Solution.or_raise`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ConvergenceError
from exptilt._support.transforms import pytree

Value = TypeVar("Value")


class Status(Enum):
    """How a problem ended, from best to worst. The text of a member is its message."""

    CONVERGED = "converged: the residual is within the tolerance"
    STALLED = (
        "stalled: no step improves the objective in this precision, yet the residual is above the tolerance"
    )
    MAX_STEPS = "stopped at max_steps before the residual reached the tolerance"
    BOUNDARY = (
        "the target lies on the boundary of what can be attained: "
        "no finite solution exists, the value is a stand-in"
    )
    OUTSIDE = (
        "the target lies outside of what can be attained: "
        "no solution exists; see `distance` for how far outside"
    )
    DIVERGED = (
        "diverged: the iterates left every neighbourhood of the start; "
        "the value is the point with the least residual on the way"
    )
    NOT_FINITE = (
        "the function returned NaN or infinity; the value is the point with the least residual before that"
    )
    UNBOUNDED = (
        "unbounded: the likelihood grows without end as a component shrinks onto too few points; "
        "the value is no maximum"
    )

    def __str__(self) -> str:
        return self.value

    @property
    def code(self) -> int:
        """Position of this member in the enum, 0 is best."""
        return _CODES[self]


_CODES = {status: code for code, status in enumerate(Status)}


@dataclass(frozen=True)
class Solution(Generic[Value]):
    """Result of a solver: the value, how each problem ended, its residual and its steps.

    Args:
        value: the solution; leading axes are batch.
        code: ``(...)`` integers, one per problem: the position of its `Status` in the enum.
        residual: ``(...)``, how far each problem is from solved, in the units its solver documents.
        steps: ``()``, the number of steps taken, the largest over the batch.
        distance: ``(...)``, how far a target is outside of what can be attained; 0 where it is not.
        trace: ``(steps, ...)``, residuals by step, from solvers that keep them; a problem that has ended
            repeats its last.
    """

    value: Value
    code: Tensor
    residual: Tensor
    steps: Tensor
    distance: Tensor
    trace: Tensor | None = None

    @classmethod
    def of(cls, value: Value, status: Status, residual: Tensor, steps: int) -> "Solution[Value]":
        """A solution whose problems all ended in the same way.

        Args:
            value: the solution.
            status: how the problems ended.
            residual: ``(...)``.
            steps: number of steps taken.
        """
        code = torch.full_like(residual, status.code, dtype=torch.int8)
        return cls(value, code, residual, torch.tensor(steps), torch.zeros_like(residual))

    @property
    def status(self) -> Status:
        """The worst status over the batch."""
        return list(Status)[int(self.code.max())] if self.code.numel() else Status.CONVERGED

    @property
    def converged(self) -> bool:
        """Whether every problem of the batch was solved."""
        return self.status is Status.CONVERGED

    def or_raise(self) -> Value:
        """The value, or a `ConvergenceError` that names the first of the worst problems of the batch."""
        if self.converged:
            return self.value
        worst = (self.code == self.code.max()).nonzero()[0].tolist()
        where = f" at batch index {tuple(worst)}" if worst else ""
        residual, distance = float(self.residual[tuple(worst)]), float(self.distance[tuple(worst)])
        message = f"{self.status}{where}. Residual {residual:.3g} after {int(self.steps)} steps"
        raise ConvergenceError(
            message + (f", {distance:.6g} outside." if self.status is Status.OUTSIDE else ".")
        )


def _flatten(solution: Solution[Value]) -> tuple[list[object], None]:
    children: list[object] = [
        solution.value,
        solution.code,
        solution.residual,
        solution.steps,
        solution.distance,
    ]
    return children if solution.trace is None else [*children, solution.trace], None


def _unflatten(children: object, _: None) -> Solution[object]:
    return Solution(*children)  # type: ignore[misc]


pytree.register_pytree_node(Solution, _flatten, _unflatten, serialized_type_name="exptilt.Solution")
