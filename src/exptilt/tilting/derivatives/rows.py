r"""Functions that are computed a few rows at a time, with derivatives of every order in the same memory.

A function takes row tensors, whose first axis is cut into chunks, and shared tensors, which every chunk sees
whole. It returns results for the rows of a chunk, which are joined, and sums, which are added up over chunks:

    f(x_i, w) = (y_i, Σ_i z_i)

Its gradient is again of this form, with rows (x_i, ȳ_i), shared tensors (w, z̄), row results x̄_i and sums
w̄. So is its forward derivative, which is the gradient of the gradient in the cotangents. `ByRows` therefore
differentiates itself: what a chunk needs in between is computed again, and never kept for all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.transforms import apply

Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def of_some(
    function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Any], some: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function of the arguments numbered `some` alone, the others fixed."""

    def partial(*x: Tensor) -> tuple[Tensor, ...]:
        full = list(arguments)
        for i, value in zip(some, x, strict=True):
            full[i] = value
        return function(*full)

    return partial


@dataclass(frozen=True, eq=False)
class Rows:
    """A function of rows and shared tensors, and how many rows it takes at a time.

    Attributes:
        function: ``(rows, shared) → (row results, sums)``, in plain torch.
        rows: how many of the arguments are rows; the others are shared.
        size: how many rows are taken at a time.
    """

    function: Callable[[Sequence[Tensor], Sequence[Tensor]], Results]
    rows: int
    size: int

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The row results of all rows, then the sums; differentiable."""
        found: tuple[Tensor, ...] = apply(ByRows, self, *arguments)
        return found

    def results(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The row results and the sums of a few rows, taken at once."""
        found, sums = self.function(arguments[: self.rows], arguments[self.rows :])
        return (*found, *sums)

    def run(self, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The row results and the sums, without derivatives."""
        rows, shared = arguments[: self.rows], arguments[self.rows :]
        pieces: list[tuple[Tensor, ...]] = []
        sums: list[Tensor] = []
        for start in range(0, max(1, rows[0].shape[0]), self.size):
            found, added = self.function([x[start : start + self.size] for x in rows], shared)
            pieces.append(found)
            sums = [x + y for x, y in zip(sums, added, strict=True)] if sums else list(added)
        return [torch.cat(piece) for piece in zip(*pieces, strict=True)], sums

    def pulled(self, wanted: Sequence[int], barred: Sequence[int], row_results: int) -> "Rows":
        """The gradient by the `wanted` arguments, given cotangents of the `barred` results."""
        count, late = self.rows, sum(1 for i in barred if i < row_results)

        def function(rows: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
            held = len(shared) - (len(barred) - late)
            given = [*rows[:count], *shared[:held]]

            def results(*arguments: Tensor) -> tuple[Tensor, ...]:
                every = self.results(*arguments)
                return tuple(every[i] for i in barred)

            pull = torch.func.vjp(of_some(results, given, wanted), *(given[i] for i in wanted))[1]
            found = pull((*rows[count:], *shared[held:]))
            early = sum(1 for i in wanted if i < count)
            return found[:early], found[early:]

        return Rows(function, count + late, self.size)

    def gradient(
        self, arguments: Sequence[Tensor], needed: Sequence[int], bars: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Gradients by the `needed` arguments from cotangents of the results; differentiable."""
        barred = [i for i, bar in enumerate(bars) if bar is not None]
        row_results = _row_results(self, arguments)
        late = sum(1 for i in barred if i < row_results)
        given = [bar for bar in bars if bar is not None]
        return self.pulled(needed, barred, row_results)(*self.arranged(arguments, given, late))

    def arranged(self, arguments: Sequence[Tensor], bars: Sequence[Tensor], late: int) -> list[Tensor]:
        """Arguments of a `pulled` function: rows, cotangents of rows, shared tensors, those of sums."""
        return [*arguments[: self.rows], *bars[:late], *arguments[self.rows :], *bars[late:]]


class ByRows(Function):
    """A `Rows` and its arguments → its row results and its sums."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plan: Rows, *arguments: Tensor) -> tuple[Tensor, ...]:
        """The results, chunk by chunk."""
        found, sums = plan.run(arguments)
        return (*found, *sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the arguments; nothing of what came in between."""
        ctx.plan, *arguments = inputs
        ctx.save_for_backward(*arguments)
        ctx.save_for_forward(*arguments)
        ctx.set_materialize_grads(False)
        ctx.outcomes = len(output)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        """Gradients by the arguments that need one: again a function of rows."""
        arguments = ctx.saved_tensors
        if all(bar is None for bar in bars):
            return (None,) * (1 + len(arguments))
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        found = ctx.plan.gradient(arguments, needed, bars)
        by_place = dict(zip(needed, found, strict=True))
        return (None, *(by_place.get(i) for i in range(len(arguments))))

    @staticmethod
    def jvp(ctx: Any, _: Any, *dots: Tensor | None) -> Any:
        """Forward derivatives of all results: the gradient of the gradient in the cotangents."""
        plan, arguments = ctx.plan, ctx.saved_tensors
        moved = [i for i, dot in enumerate(dots) if dot is not None]
        return _pushed(plan, arguments, moved, [x for x in dots if x is not None], ctx.outcomes)


def _row_results(plan: Rows, arguments: Sequence[Tensor]) -> int:
    """How many of the results are rows, found by a call without rows."""
    with torch.no_grad():
        found, _ = plan.function([x[:0] for x in arguments[: plan.rows]], arguments[plan.rows :])
    return len(found)


def _pushed(
    plan: Rows, arguments: Sequence[Tensor], moved: Sequence[int], dots: Sequence[Tensor], outcomes: int
) -> tuple[Tensor, ...]:
    row_results, count = _row_results(plan, arguments), plan.rows
    early = sum(1 for i in moved if i < count)

    def function(rows: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
        held = len(shared) - (len(moved) - early)
        given = [*rows[:count], *shared[:held]]
        along = (*rows[count:], *shared[held:])
        results = of_some(plan.results, given, moved)
        there, pull, *_ = torch.func.vjp(results, *(given[i] for i in moved))
        pushed = torch.func.vjp(pull, tuple(torch.zeros_like(x) for x in there))[1](along)[0]
        return tuple(pushed[:row_results]), tuple(pushed[row_results:])

    again = Rows(function, count + early, plan.size)
    found = again(*plan.arranged(arguments, dots, early))
    assert len(found) == outcomes
    return found
