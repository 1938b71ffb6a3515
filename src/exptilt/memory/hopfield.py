r"""`Hopfield`: a continuous associative memory whose energy is a log-normalizer.

    E(ξ) = −β⁻¹ log Σ_n e^{β⟨x_n,ξ⟩} + ½⟨ξ,ξ⟩ + β⁻¹ log N + ½M²,      M = max_n ‖x_n‖
    ξ ← Σ_n softmax_n(β⟨x_n,ξ⟩) x_n                 (THEORY C1; Ramsauer et al. 2021, eq. 3)

The step is the concave–convex procedure on E and never raises it; the two constants make 0 ≤ E ≤ 2M² on the
hull of the patterns. Other similarities and separations (``similarity.py``, ``separation.py``) change ⟨x,ξ⟩
and β⁻¹ log Σ exp. With all of them no step raises E; the bounds hold for all but the polynomial,
whose weights do not sum to one.

This file holds the memory itself, ``patterns.py`` how a sweep sees its patterns. Some methods are defined in
the file of their subject: ``retrieval.py``, ``nearest.py`` and ``storage.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from numbers import Real
from os import PathLike
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete, version
from exptilt.distributed.collectives import highest
from exptilt.distributed.group import Group, Members, agree, refused_together
from exptilt.memory import nearest as sweeps
from exptilt.memory import retrieval, storage
from exptilt.memory.patterns import Keys, as_patterns, as_tensor, check_state, laid_out, measured
from exptilt.memory.separation import Polynomial, Separation, Softmax
from exptilt.memory.separation import separation as _separation
from exptilt.memory.similarity import Similarity
from exptilt.memory.similarity import similarity as _similarity

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _with_all_patterns(method: _Method) -> _Method:
    """Make a method raise unless all patterns of the memory are on this process."""

    @wraps(method)
    def checked(self: "Hopfield", *arguments: Any, **keywords: Any) -> Any:
        if self.members is not None:
            name = method.__name__.strip("_")
            raise ArgumentError(
                f"Hopfield.{name}: the patterns lie on {self.members.count} processes, and this needs all of "
                "them. Make a memory without group= for it; energy, step, read and retrieve work with one."
            )
        return method(self, *arguments, **keywords)

    return cast(_Method, checked)


@dataclass(frozen=True, eq=False, init=False)
class Hopfield:
    """A memory of patterns, read by descent on its energy. Frozen: `append` and `remove` return new memories.

    Tensors are not copied. A memory whose patterns or values were written to afterwards refuses to answer,
    since the norms that it keeps would be those of the old patterns.

    Args:
        patterns: ``(..., N, D)``, one memory for each leading index (a head, say); float64, float32, bfloat16
            or float16. Read-only numpy arrays, such as memory-mapped files (``mmap_mode="r"``), are not
            copied either, and a sweep reads them part by part; writable arrays are copied.
        beta: inverse temperature, > 0: a number, or one for each memory, ``(...)``.
        similarity: ``dot``, ``cosine`` or ``euclidean``.
        separation: ``softmax``, ``sparsemax``, ``entmax`` (α = 1.5), ``max``, ``polynomial`` (degree 3), or
            `Entmax(alpha)`, `Polynomial(degree)`.
        values: ``(..., N, Dv)``, the value of each pattern, for `read` and `nearest`; None for none.
        group: processes that share the patterns (`torch.distributed.group.WORLD` for all). Each passes its
            own; all call `energy`, `step`, `read` and `retrieve` with the same states and get the same
            result, exact over all patterns. Softmax only; gradients are those of
            `exptilt.distributed.attend`. None if this process has all patterns.

    Example:
        >>> memory = Hopfield(torch.eye(3), beta=8.0)
        >>> memory.retrieve(torch.tensor([0.9, 0.3, 0.0])).value.round(decimals=3)
        tensor([0.9990, 0.0000, 0.0000])
    """

    patterns: Tensor
    beta: Tensor
    similarity: Similarity
    rule: Separation
    measure: Tensor  # (..., N): the squared norm of each pattern; for cosine the norm
    count: int  # N, how many patterns are stored, on all processes of the group
    values: Tensor | None
    members: Members | None
    _versions: tuple[int, ...]

    def __init__(
        self,
        patterns: Any,
        beta: "float | Tensor" = 1.0,
        *,
        similarity: str = "dot",
        separation: "str | Separation" = "softmax",
        values: Any = None,
        group: Group = None,
    ) -> None:
        with refused_together("Hopfield", group):
            kind, rule = _similarity(similarity), _separation(separation)
            if group is not None and not isinstance(rule, Softmax):
                hint = "Pass separation='softmax', or all patterns to one process."
                raise ArgumentError(f"Hopfield: with a group, separation is {separation!r}. {hint}")
            if isinstance(rule, Polynomial) and similarity == "euclidean":
                raise ArgumentError(
                    "Hopfield: with similarity 'euclidean' no score is positive, and 'polynomial' weighs "
                    "those that are. Pass another separation, or similarity 'dot' or 'cosine'."
                )
            x, v = as_patterns(patterns), None if values is None else as_tensor("values", values)
            if v is not None and (v.shape[:-1] != x.shape[:-1] or v.device != x.device):
                got = f"values are {tuple(v.shape)} on {v.device}, patterns {tuple(x.shape)} on {x.device}"
                raise ArgumentError(f"Hopfield: {got}. Pass values (..., N, Dv), one row for each pattern.")
            measure = measured(x, kind)
            self.__dict__.update(patterns=x, values=v, similarity=kind, rule=rule, members=None)
            self.__dict__.update(beta=_as_beta(beta, measure), measure=measure, count=x.shape[-2])
            self.__dict__["_versions"] = self._present_versions()
        if group is not None:
            members = Members("Hopfield", group)
            facts = {
                "the dimension and leading axes of patterns": (self.lead, self.dimension),
                "the dtype of patterns": x.dtype,
                "the width and dtype of values": None if v is None else (v.shape[-1], v.dtype),
                "similarity": similarity,
                "beta": self.beta.tolist() if is_concrete(self.beta) else None,
            }
            sizes = agree(members, "Hopfield", facts, count=self.count)
            self.__dict__.update(members=members, count=sum(sizes))

    def _present_versions(self) -> tuple[int, ...]:
        """How often torch has counted writes to the patterns and to the values."""
        held = [x for x in (self.patterns, self.values) if x is not None]
        return tuple(map(version, held)) if is_concrete(*held) else ()

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of the patterns."""
        return tuple(self.patterns.shape[:-2])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that sums are taken in."""
        return self.measure.dtype

    @property
    def dimension(self) -> int:
        """D, how many coordinates a pattern has."""
        return self.patterns.shape[-1]

    @property
    def size(self) -> Tensor:
        """M ``(...)``: the largest norm of a key, 1 for cosine; the unit of residuals."""
        largest = self._largest
        size = torch.ones_like(largest) if self.similarity.sphere else largest.sqrt()
        return torch.where(size > 0, size, 1.0)

    @property
    def _largest(self) -> Tensor:
        """The largest `measure` ``(...)`` over the patterns of all processes."""
        largest = self.measure.amax(-1)
        return largest if self.members is None else highest(largest, self.members)

    @property
    def keys(self) -> Keys:
        """The patterns as `Keys` with an axis of heads; an error if they were written to."""
        now = self._present_versions()
        if self._versions and now and now != self._versions:
            raise ArgumentError(
                "Hopfield: the patterns or values were changed in place after the memory was made, so the "
                "norms it keeps are out of date. Make a new memory, or give this one patterns.clone()."
            )
        x, measure = (self.patterns, self.measure) if self.lead else (self.patterns[None], self.measure[None])
        return Keys(x, measure, self.similarity, members=self.members)

    @property
    def reading(self) -> Keys:
        """The patterns as `Keys` that average values, if the memory holds any."""
        values = self.values
        return replace(self.keys, values=values if self.lead or values is None else values[None])

    @property
    def head_beta(self) -> Tensor:
        """β ``(..., heads)``."""
        return self.beta if self.lead else self.beta.reshape(1)

    def energy(self, state: Tensor) -> Tensor:
        """The energy of each state, constants included: between 0 and 2M² on the hull of the patterns.

        Near β = 0 it is a small difference of terms of size β⁻¹ log N: expect an error of that size times the
        precision. It is infinite where ½⟨ξ,ξ⟩ overflows, and NaN where only β times a score does (softmax).

        Args:
            state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.

        Returns:
            ``(...)``, without the last axis of state.
        """
        check_state(self, state)
        query, beta = self.similarity.query(laid_out(self, state)), self.head_beta
        potential = self.rule.read(self.keys, query, beta).potential
        reach = self.similarity.reach(self._largest[..., None]).reshape(beta.shape)
        own = query.square().sum(-1) / 2
        energy = own - potential + (reach / 2 - self.rule.uniform(self.count) / beta)[..., None]
        # E ≥ ½(‖ξ‖ − M)²: infinite where ½⟨ξ,ξ⟩ overflows, even if the potential overflows too
        return torch.where(own.isinf(), own, energy).reshape(state.shape[:-1])

    def step(self, state: Tensor) -> Tensor:
        """One update of each state: the sum of the patterns under their weights.

        Args:
            state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``.

        Returns:
            ``(..., D)``, as state; of norm 1 for cosine; NaN where β times a score overflows.
        """
        check_state(self, state)
        rows = retrieval.advance(self, laid_out(self, state))
        shape = torch.broadcast_shapes(rows.shape, state.shape) if self.lead else state.shape
        return rows.reshape(shape).to(state.dtype)

    def read(self, state: Tensor) -> Tensor:
        """The mean of the values under the weights that the patterns have at each state.

        Args:
            state: ``(..., D)``; for patterns with leading axes ``(..., *leading axes, Q, D)``. A state
                that was retrieved reads the value of its pattern.

        Returns:
            ``(..., Dv)``; 0 where no pattern has weight (`polynomial`, no score positive).

        Example:
            >>> memory = Hopfield(torch.eye(3), beta=30.0, values=torch.tensor([[1.0], [2.0], [3.0]]))
            >>> memory.read(torch.tensor([0.1, 0.9, 0.0]))
            tensor([2.])
        """
        check_state(self, state)
        held = self.values
        if held is None or not held.is_floating_point():
            got = "holds no values" if held is None else f"holds values of {held.dtype}, which have no mean"
            raise ArgumentError(f"Hopfield.read: the memory {got}. Pass floating-point values= to Hopfield.")
        query = self.similarity.query(laid_out(self, state))
        found = self.rule.read(self.reading, query, self.head_beta).average
        return found.reshape(*state.shape[:-1], held.shape[-1])

    retrieve = retrieval.retrieve
    nearest = _with_all_patterns(sweeps.nearest)
    separation = _with_all_patterns(sweeps.separation)
    save = _with_all_patterns(storage.save)

    @classmethod
    def load(cls, path: str | PathLike[str], *, mapped: bool = False) -> "Hopfield":
        """The memory that a file holds; it retrieves the same, bit for bit. Needs the extra ``memory``.

        Args:
            path: a file that `save` wrote.
            mapped: leave patterns and values in the file and read them from there.
        """
        return cls(**storage.load(path, mapped=mapped))

    @_with_all_patterns
    def append(self, patterns: Any, values: Any = None) -> "Hopfield":
        """A new memory with more patterns after the present ones.

        Args:
            patterns: ``(..., n, D)`` or one ``(..., D)``; a tensor or numpy array, as for the constructor.
            values: ``(..., n, Dv)`` or one ``(..., Dv)``, if the memory holds values.
        """
        new = {"patterns": as_tensor("patterns", patterns)}
        if values is not None:
            new["values"] = as_tensor("values", values)
        if new["patterns"].ndim == len(self.lead) + 1:
            new = {name: x.unsqueeze(-2) for name, x in new.items()}
        old = {"patterns": self.patterns} | ({} if self.values is None else {"values": self.values})
        got, have = _kind(new), _kind(old)
        if got != have:
            wanted = "Only their number N may differ."
            raise ArgumentError(f"Hopfield.append: got {got}, the memory holds {have}. {wanted}")
        grown = {name: torch.cat([old[name], x], -2) for name, x in new.items()}
        return self._with(**grown)

    add = append

    def remove(self, index: "int | Sequence[int] | Tensor") -> "Hopfield":
        """A new memory without the patterns at `index`; the others keep their order.

        Args:
            index: places of the patterns to remove; or booleans ``(N,)``, True for these.
        """
        keep = torch.ones(self.count, dtype=torch.bool, device=self.patterns.device)
        try:
            at = torch.as_tensor(index, device=keep.device)
            if not at.numel() or (at.dtype == torch.bool and at.shape != keep.shape):
                raise IndexError
            keep[at] = False
        except (TypeError, ValueError, IndexError, RuntimeError):
            wanted = f"Pass integers below {self.count}, the places of patterns, or {self.count} booleans."
            raise ArgumentError(f"Hopfield.remove: index is {index!r}. {wanted}") from None
        values = None if self.values is None else self.values[..., keep, :]
        return self._with(self.patterns[..., keep, :], values)

    @_with_all_patterns
    def _with(self, patterns: Tensor, values: Tensor | None = None) -> "Hopfield":
        """A memory with these patterns and values, and the settings of this one."""
        return _again(patterns, self.beta, self.similarity.name, self.rule, values)

    @_with_all_patterns
    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.patterns, self.beta, self.similarity.name, self.rule, self.values)


def _kind(held: dict[str, Tensor]) -> str:
    """Shapes without N, dtypes and devices as text."""
    shapes = {name: ", ".join(map(str, (*x.shape[:-2], "N", x.shape[-1]))) for name, x in held.items()}
    return " and ".join(f"{name} ({shapes[name]}) {x.dtype} on {x.device}" for name, x in held.items())


def _as_beta(beta: Any, measure: Tensor) -> Tensor:
    """β as ``(...)``, one for each memory, with the leading axes and dtype of ``measure (..., N)``."""
    lead = tuple(measure.shape[:-1])
    if isinstance(beta, bool) or not isinstance(beta, Real | np.ndarray | Tensor):
        wanted = f"Pass a number, or a tensor {lead}, one for each memory."
        raise ArgumentError(f"Hopfield: beta is {beta!r}. {wanted}")
    value = torch.as_tensor(beta, dtype=measure.dtype, device=measure.device)
    try:
        value = value if value.shape == lead else value.expand(lead)
    except RuntimeError:
        got = f"beta has shape {tuple(value.shape)}, patterns have leading axes {lead}"
        raise ArgumentError(f"Hopfield: {got}. Pass one beta a memory.") from None
    if is_concrete(value) and not bool(((value > 0) & value.isfinite()).all()):
        exact, wanted = torch.as_tensor(beta, dtype=torch.float64), "It is a temperature's inverse: pass > 0."
        if bool(((exact > 0) & exact.isfinite()).all()):
            wanted = f"It is 0 or infinity in {value.dtype}. Pass patterns in float64."
        raise ArgumentError(f"Hopfield: beta is {beta}. {wanted}")
    return value


def _again(
    patterns: Tensor, beta: Tensor, similarity: str, separation: Separation, values: Tensor | None = None
) -> Hopfield:
    """A memory from its parts, for `pickle` and `copy`."""
    return Hopfield(patterns, beta, similarity=similarity, separation=separation, values=values)
