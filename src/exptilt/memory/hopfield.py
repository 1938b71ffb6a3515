r"""`Hopfield`: a continuous associative memory whose energy is a log-normalizer.

    E(ξ) = −β⁻¹ log Σ_n e^{β<x_n,ξ>} + ½<ξ,ξ> + β⁻¹ log N + ½M²,       M = max_n ‖x_n‖              (THEORY C1; Ramsauer et al. 2021, eq. 3)
    ξ ← Σ_n softmax_n(β<x_n,ξ>) x_n

The step is the concave–convex procedure on E and never raises it; the two constants make 0 ≤ E ≤ 2M² on the hull of the patterns. Other
similarities and separations (``similarity.py``, ``separation.py``) change <x,ξ> and β⁻¹ log Σ exp. All keep the first property; those
whose weights sum to one, which is all but the polynomial, keep the second.

This file holds the memory itself. What can be asked of it lies beside it: ``retrieval.py``, ``margins.py``, ``basins.py``, ``recall.py``,
``metastable.py``, ``storage.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution
from exptilt._support.transforms import is_concrete
from exptilt.memory import few, retrieval, storage
from exptilt.memory.checks import as_beta, as_patterns, as_tensor, check_state
from exptilt.memory.landscape import basins, margins, metastable, recall
from exptilt.memory.patterns import Keys, measures
from exptilt.memory.separation import Polynomial, Separation, separation
from exptilt.memory.similarity import Similarity, similarity


@dataclass(frozen=True, eq=False, init=False)
class Hopfield:
    """A memory of patterns, read by its energy's own descent. Frozen: `add` and `remove` return new ones.

    Args:
        patterns: ``(..., N, D)``, one memory for each leading index (a head, say); float64, float32, bfloat16 or float16. Numpy arrays are
            taken as they are, memory-mapped ones too: nothing is copied, and a sweep reads them part by part.
        beta: inverse temperature, > 0: a number, or one for each memory, ``(...)``.
        similarity: ``dot``, ``cosine`` or ``euclidean``.
        separation: ``softmax``, ``sparsemax``, ``entmax`` (α = 1.5), ``max``, ``polynomial`` (degree 3), or `Entmax(alpha)`,
            `Polynomial(degree)`.

    Example:
        >>> memory = Hopfield(torch.eye(3), beta=8.0)
        >>> memory.retrieve(torch.tensor([0.9, 0.3, 0.0])).value.round(decimals=3)
        tensor([0.9990, 0.0000, 0.0000])
    """

    patterns: Tensor
    beta: Tensor
    similarity: Similarity
    rule: Separation
    measure: Tensor

    def __init__(
        self,
        patterns: Any,
        beta: "float | Tensor" = 1.0,
        *,
        similarity: str = "dot",
        separation: "str | Separation" = "softmax",
    ) -> None:
        x, kind = as_patterns(patterns), _similarity(similarity)
        measure = measures(x, kind)
        object.__setattr__(self, "patterns", x)
        object.__setattr__(self, "similarity", kind)
        object.__setattr__(self, "measure", measure)
        object.__setattr__(self, "beta", as_beta(beta, measure))
        object.__setattr__(self, "rule", _separation(separation))
        if isinstance(self.rule, Polynomial) and similarity == "euclidean":
            raise ArgumentError(
                "Hopfield: with similarity 'euclidean' no score is positive, and 'polynomial' weighs positive scores. "
                "Pass another separation, or similarity 'dot' or 'cosine'."
            )
        if is_concrete(measure):
            if not bool(measure.isfinite().all()):
                index = tuple((~measure.isfinite()).nonzero()[0].tolist())
                raise ArgumentError(
                    f"Hopfield: patterns[{', '.join(map(str, index))}] holds NaN or infinity, or its norm overflows."
                )
            if kind.sphere and bool((measure == 0).any()):
                index = tuple((measure == 0).nonzero()[0].tolist())
                raise ArgumentError(
                    f"Hopfield: patterns[{', '.join(map(str, index))}] is 0 and has no direction. "
                    "Leave it out, or pass similarity 'dot' or 'euclidean'."
                )

    @property
    def count(self) -> int:
        """N, how many patterns are stored."""
        return self.patterns.shape[-2]

    @property
    def dimension(self) -> int:
        """D."""
        return self.patterns.shape[-1]

    @property
    def size(self) -> Tensor:
        """M ``(...)``: the largest norm of a key, 1 on the sphere. Residuals are measured in it."""
        largest = self.measure.amax(-1)
        size = torch.ones_like(largest) if self.similarity.sphere else largest.sqrt()
        return torch.where(size > 0, size, 1.0)

    @property
    def keys(self) -> Keys:
        """The patterns as a sweep sees them, with an axis of heads."""
        if self.patterns.ndim > 2:
            return Keys(self.patterns, self.measure, self.similarity)
        return Keys(self.patterns[None], self.measure[None], self.similarity)

    def rows(self, state: Tensor) -> Tensor:
        """States laid out for a sweep, in the dtype that sums are taken in.

        Args:
            state: ``(..., D)``.

        Returns:
            ``(..., heads, Q, D)``.
        """
        state = state.to(self.measure.dtype)
        return state if self.patterns.ndim > 2 else state.reshape(1, -1, self.dimension)

    def energy(self, state: Tensor) -> Tensor:
        """The energy of each state, constants included: between 0 and 2M² on the hull of the patterns.

        Near β = 0 it is a small difference of terms of size β⁻¹ log N: expect an error of that size times the precision. It is infinite
        where ½<ξ,ξ> overflows, and NaN where β times a score alone does (softmax).

        Args:
            state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.

        Returns:
            ``(...)``, without the last axis of state.
        """
        check_state(self, state)
        query = self.similarity.query(self.rows(state))
        beta = self.head_beta
        potential = self.rule.read(self.keys, query, beta).potential
        constant = self.similarity.reach(self.measure.amax(-1)) / 2 - self.rule.uniform(self.count) / beta
        own = query.square().sum(-1) / 2
        energy = own - potential + (constant if self.patterns.ndim > 2 else constant.reshape(1))[..., None]
        energy = torch.where(
            own.isinf(), own, energy
        )  # E >= ½(‖ξ‖ − M)²: what overflows as well does not outweigh it
        return energy.reshape(state.shape[:-1])

    @property
    def head_beta(self) -> Tensor:
        """Beta ``(..., heads)``."""
        return self.beta if self.patterns.ndim > 2 else self.beta.reshape(1)

    def advance(self, rows: Tensor) -> Tensor:
        """One step of ``(..., heads, Q, D)``, unchecked.

        Args:
            rows: ``(..., heads, Q, D)``, as `rows` returns them.

        Returns:
            ``(..., heads, Q, D)``.
        """
        query = self.similarity.query(rows)
        return self.similarity.settle(self.rule.read(self.keys, query, self.head_beta).average, query)

    def step(self, state: Tensor) -> Tensor:
        """One update of each state: the mean of the patterns under their weights.

        Args:
            state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.

        Returns:
            ``(..., D)``, as state; of a norm of 1 if the similarity is cosine; NaN where β times a score overflows.
        """
        quick = few.step(self, state) if few.suits(self, state) else None
        if quick is not None:
            return quick
        check_state(self, state)
        rows = self.advance(self.rows(state))
        return rows.reshape(
            (*torch.broadcast_shapes(rows.shape, state.shape),) if self.patterns.ndim > 2 else state.shape
        ).to(state.dtype)

    def retrieve(
        self, state: Tensor, *, tolerance: float | None = None, max_steps: int = 1000, throw: bool = True
    ) -> Solution[Tensor]:
        """Steps until each state stands still by itself.

        Where a derivative is wanted it is that of the fixed point, by the implicit function theorem: it flows to patterns and beta; the
        start has none, since a fixed point does not depend on where one came from.

        Args:
            state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.
            tolerance: of the residual ‖step(ξ) − ξ‖/M; None is 1e-5 in float32, 1e-10 in float64.
            max_steps: at most so many.
            throw: raise a `ConvergenceError` where some state has not settled; False leaves that to `Solution.status`.

        Returns:
            `Solution` with value as state, residual ``(...)`` and trace ``(steps, ...)``: how far each step led. A state whose step is not
            finite (β times a score overflows) stays where it is, and its status says so.
        """
        check_state(self, state)
        return retrieval.retrieve(self, state, tolerance=tolerance, max_steps=max_steps, throw=throw)

    def separation(self, *, index: Sequence[int] | None = None) -> Tensor:
        """How far each pattern stands out: Δ_i = min_{j≠i} (<x_i,x_i> − <x_i,x_j>), in scores of this memory's similarity.

        Warns where patterns are equal: their separation is 0.

        Args:
            index: the patterns to measure; None is all, at a cost of N² products in O(N) memory.

        Returns:
            ``(..., N)`` or ``(..., len(index))``; inf where there is one pattern only.
        """
        return margins.separation(self, index)

    def duplicates(self) -> list[list[int]]:
        """Groups of patterns that are equal in every leading index. They are allowed: together they count as one with more weight."""
        return margins.duplicates(self.patterns)

    def basin(
        self,
        *,
        index: Sequence[int] | None = None,
        directions: int = 16,
        precision: float = 1e-2,
        generator: torch.Generator | None = None,
    ) -> basins.Basin:
        """How far from each pattern retrieval still ends where it does from the pattern itself, measured.

        Args:
            index: the patterns to measure; None is all.
            directions: how many random directions are tried around each pattern.
            precision: width of the bracket in which each radius is found, in units of M.
            generator: draws the directions.
        """
        return basins.measure(self, index, directions=directions, precision=precision, generator=generator)

    def capacity(
        self,
        *,
        noise: float = 0.0,
        within: float = 0.1,
        trials: int = 1,
        max_steps: int = 1000,
        generator: torch.Generator | None = None,
    ) -> recall.Recall:
        """How many of the stored patterns come back, by the stated rule. For random patterns against theory see `storage_capacity`.

        Args:
            noise: length of the random vector added to each start, in units of M.
            within: a pattern is recalled if its retrieval ends no farther away than this, in units of M, with no other pattern nearer.
            trials: starts for each pattern; without noise they would all be equal, and one is made.
            max_steps: of each retrieval.
            generator: draws the noise.
        """
        return recall.measure(
            self, noise=noise, within=within, trials=trials, max_steps=max_steps, generator=generator
        )

    def metastable(
        self,
        starts: Tensor | None = None,
        *,
        count: int = 256,
        share: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> metastable.FixedPoints:
        """The fixed points that many starts lead to: single patterns, averages of some, the mean of all.

        Args:
            starts: ``(S, D)``; None draws count of them: patterns, means of random groups of patterns, and points of the hull.
            count: how many to draw.
            share: a fixed point averages the fewest patterns that hold this share of the weight.
            generator: draws the starts.
        """
        return metastable.find(self, starts, count=count, share=share, generator=generator)

    def add(self, patterns: Any) -> "Hopfield":
        """A memory with more patterns, after those that are there.

        Args:
            patterns: ``(..., n, D)`` or one ``(..., D)``; a tensor or numpy array.
        """
        given = as_tensor(patterns)
        new = as_patterns(
            given if given.ndim == self.patterns.ndim or not given.ndim else given.unsqueeze(-2)
        )
        if (
            new.shape[:-2] != self.patterns.shape[:-2]
            or new.shape[-1] != self.dimension
            or new.dtype != self.patterns.dtype
        ):
            got, have = (
                f"{tuple(new.shape)} {new.dtype}",
                f"{tuple(self.patterns.shape)} {self.patterns.dtype}",
            )
            raise ArgumentError(
                f"Hopfield.add: patterns are {got}, the memory holds {have}. Only their number N may differ."
            )
        return self.replaced(torch.cat([self.patterns, new], -2))

    def remove(self, index: "int | Sequence[int] | Tensor") -> "Hopfield":
        """A memory without some patterns; the others keep their order.

        Args:
            index: one or several places of patterns, or booleans ``(N,)``, True where a pattern goes. At least one.
        """
        if index is None:
            raise ArgumentError("Hopfield.remove: index is None. Pass the places of the patterns that go.")
        gone = margins.places(self, index, "Hopfield.remove")
        keep = torch.ones(self.count, dtype=torch.bool, device=gone.device).index_fill(0, gone, False)
        return self.replaced(self.patterns[..., keep, :])

    def replaced(self, patterns: Tensor) -> "Hopfield":
        """The same memory with other patterns.

        Args:
            patterns: ``(..., N, D)``.
        """
        return Hopfield(patterns, self.beta, similarity=self.similarity.name, separation=self.rule)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.patterns, self.beta, self.similarity.name, self.rule)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the memory to one file (safetensors), whole or not at all.

        Args:
            path: where; an existing file is replaced at the end, in one move.
        """
        storage.save(self, Path(path))

    @classmethod
    def load(cls, path: str | PathLike[str], *, mapped: bool = False) -> "Hopfield":
        """A memory from its file; it retrieves the same, bit for bit.

        Args:
            path: what `save` wrote. A file that was cut, changed or is of another kind is refused.
            mapped: leave the patterns in the file and read them from there, for memories larger than one's memory.
        """
        return cls(**storage.load(Path(path), mapped=mapped))


def _again(patterns: Tensor, beta: Tensor, similarity: str, separation: Separation) -> Hopfield:
    """A memory from its parts, for `pickle` and `copy`."""
    return Hopfield(patterns, beta, similarity=similarity, separation=separation)


_similarity, _separation = similarity, separation
