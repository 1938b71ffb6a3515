"""Runs a family model in the compiled core: converts model and data to arrays, and the results back.

The beliefs are those of ``csrc/families/conjugate.hpp``, the filters those of
``csrc/switching/switching.hpp``.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import pack, unpack
from exptilt._support.threads import run_kernel
from exptilt.families import (
    Beta,
    Dirichlet,
    ExponentialFamily,
    Gamma,
    Gaussian,
    NormalGamma,
    NormalInverseWishart,
    Wishart,
)
from exptilt.families.measure import make
from exptilt.families.relations import _log_base, moved

from ..arrays import METHODS, filled
from .dynamics import DiscountedDynamics, LinearDynamics

if TYPE_CHECKING:
    from .model import SwitchingFamily

# as in csrc/families/conjugate.hpp
COMPILED: dict[type, int] = {
    Gamma: 0,
    Beta: 1,
    Dirichlet: 1,
    NormalGamma: 2,
    NormalInverseWishart: 3,
    Wishart: 4,
    Gaussian: 5,
}


class Passed(NamedTuple):
    """Results of a pass, a row for each observation: ``(rows, ...)``."""

    terms: Tensor
    log_level: Tensor
    belief: ExponentialFamily
    mixing: Tensor


class Arrays(NamedTuple):
    """Output of the core, with a row for each observation or for each series.

    Attributes:
        terms: ``(rows,)``, log p(y_t | before).
        log_mode: ``(rows, M)``, log P(mode).
        belief: ``(rows, M, K)``, the natural parameters (for Gaussian and Wishart see conjugate.hpp).
        failure: ``(series, 2)``: the step at which a series cannot go on, and the mode whose belief is not
            finite there, or M if y has probability 0 in every mode; −1 for no failure.
        mixing: ``(rows, M, M)``, [i, j] = P(mode before = i | mode = j, y up to here), or no rows.
    """

    terms: np.ndarray
    log_mode: np.ndarray
    belief: np.ndarray
    failure: np.ndarray
    mixing: np.ndarray


class Compiled:
    """A model and its observations as arrays, named like the fields of the core's frame."""

    def __init__(self, model: "SwitchingFamily", rows: Tensor, there: Tensor, starts: np.ndarray) -> None:
        self.model, self.there = model, there
        self.starts = np.ascontiguousarray(starts, np.int64)
        self.rows, self.centre = rows, centre_of(model.prior, rows, there)
        near = rows if self.centre is None else rows - self.centre
        count = len(rows)
        prior, K = self.about(model.prior), model._size
        self.groups = 1 if isinstance(prior, Dirichlet) else near.shape[1]
        if isinstance(model.likelihood, Gaussian):  # one inverse, not one for each row as in the family
            R = model.likelihood.covariance_matrix
            precision = torch.linalg.inv(R)
            along = near @ precision
            evidence = torch.cat([along, (pack(precision) / -2).expand(count, -1)], -1)
            log_base = -((near * along).sum(-1) + torch.logdet(2 * math.pi * R)) / 2
        else:
            evidence, log_base = model._evidence(near), _log_base(model.likelihood, near)
        self.evidence = flat(evidence, count, K)
        self.log_base = flat(log_base.expand(count), count)
        self.seen = there.contiguous().numpy()
        M = len(model.dynamics)
        self.prior = flat(prior.natural_parameter.expand(M, K), M, K)
        moves = [move for move in model.dynamics if isinstance(move, DiscountedDynamics)]
        linear = [move for move in model.dynamics if isinstance(move, LinearDynamics)]
        self.discount, self.rest, self.map = np.ones(M), self.prior, np.zeros(0)
        if moves:
            self.discount = np.array([float(move.discount) for move in moves])
            rests = [self.about(move.rest).natural_parameter for move in moves]
            self.rest = flat(torch.stack(torch.broadcast_tensors(*rests)), M, K)
        else:
            linear[0](model.prior)
            parts = [torch.cat([move.dynamics.reshape(-1), move.process_noise.diagonal()]) for move in linear]
            self.map = flat(torch.stack(parts), M, len(parts[0]))
        assert model.initial_probability is not None
        with np.errstate(divide="ignore"):
            self.log_transition = np.log(flat(model.transition, M, M))
            self.log_initial = np.log(flat(model.initial_probability, M))

    def about(self, member: ExponentialFamily) -> ExponentialFamily:
        """A member with its location measured from the centre of the data."""
        return member if self.centre is None else moved(member, -self.centre)

    def arrays(self, method: str, *, every: bool = True) -> Arrays:
        """Filter all series; a row for each observation with `every`, else for the last of each series."""
        B, (M, K) = len(self.starts) - 1, self.rest.shape
        N = len(self.seen) if every else B
        out = Arrays(
            np.zeros(N),
            np.zeros((N, M)),
            np.zeros((N, M, K)),
            np.full((B, 2), -1, np.int64),
            np.zeros((N if every else 0, M, M)),
        )
        kind, total = COMPILED[type(self.model.prior)], np.zeros(B)
        given = {"modes": M, "method": METHODS[method], "series": B, "everything": every}
        given |= {"family": kind, "groups": self.groups, "numbers": K}
        arrays = {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        arrays |= out._asdict() | {"log_likelihood": total}
        frame = filled("ConjugateSeries", **given, **arrays)
        threads = min(torch.get_num_threads(), B)
        run_kernel("filter_families", frame, threads)
        if method == "gpb1" and every:  # its weights do not depend on the mode that follows
            before = np.roll(out.log_mode, 1, 0)
            before[self.starts[:-1]] = self.log_initial
            out.mixing[:] = kim_mixing(torch.from_numpy(before), torch.from_numpy(self.log_transition))
        return out

    def run(self, method: str, what: str) -> Passed:
        """Filter all series; an error names the step at which the filter fails."""
        found = self.arrays(method)
        with np.errstate(over="ignore", invalid="ignore"):
            theta = found.belief.astype(str(self.model.prior.dtype).removeprefix("torch."))
            if (found.failure >= 0).any() or not np.isfinite(theta.sum()):
                self._explain(theta, found.failure, what)
        kind, natural = type(self.model.prior), torch.from_numpy(theta)
        # The core checks every belief but the last of a series; after rounding, any may be invalid.
        doubtful = natural[self.starts[1:] - 1] if natural.dtype == torch.float64 else natural
        belief: ExponentialFamily
        if issubclass(kind, Gaussian | Wishart):  # from means, so that no matrix is inverted
            kind(*self._from_means(doubtful))
            belief = make(kind, **dict(zip(kind.event_dims, self._from_means(natural), strict=True)))
        else:
            kind.from_natural(doubtful)
            belief = kind._from_natural(natural)
        belief = belief if self.centre is None else moved(belief, self.centre)
        parts = (found.terms, found.log_mode, found.mixing)
        terms, level, mixing = (torch.from_numpy(x).to(natural) for x in parts)
        return Passed(terms, level, belief, mixing)

    def _from_means(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of Gaussian and Wishart beliefs, from the numbers that the core writes."""
        D = self.groups
        if isinstance(self.model.prior, Gaussian):
            return found[..., :D], unpack(found[..., D:])
        degrees = 2 * found[..., -1] + D + 1
        return degrees, unpack(found[..., :-1]) / degrees[..., None, None]

    def _explain(self, theta: np.ndarray, failure: np.ndarray, what: str) -> None:
        """Raise an error that names the first failed step; return if there is none."""
        bad = np.flatnonzero(failure[:, 0] >= 0)
        stuck = self.starts[bad] + failure[bad, 0]
        lost = np.flatnonzero(~np.isfinite(theta).all((1, 2)))
        if not len(stuck) and not len(lost):
            return
        row = int(min([*stuck[:1], *lost[:1]]))
        series = int(np.searchsorted(self.starts, row, "right")) - 1
        step, y = row - int(self.starts[series]), self.rows[row]
        if row not in lost and failure[series, 1] == theta.shape[1]:
            raise ArgumentError(impossible(what, step, y))
        raise ArgumentError(
            f"SwitchingFamily.{what}: at step {step}, y = {y.tolist()}, a belief is not finite: too "
            f"sharp or too wide for {theta.dtype}. Pass a smaller discount, or data nearer to 1."
        )


def smooth(
    evidence: Tensor, discount: list[float], log_level: Tensor, mixing: Tensor, starts: np.ndarray
) -> tuple[Tensor, Tensor, Tensor]:
    """Mode probabilities and pairs given all of y, and the sum r that is added to θ, ``(rows, M, K)``.

    Args:
        evidence: ``(rows, K)``, 0 where nothing was observed.
        discount: of each mode.
        log_level: ``(rows, M)``, the filter's.
        mixing: ``(rows, M, M)``, the filter's.
        starts: the row that each series begins at, and the number of rows.
    """
    (N, M), K = log_level.shape, evidence.shape[-1]
    arrays = {
        "starts": np.ascontiguousarray(starts, np.int64),
        "evidence": flat(evidence, N, K),
        "discount": np.array(discount),
        "level": flat(log_level.exp(), N, M),
        "mixing": flat(mixing, N, M, M),
    }
    sizes = {"probability": (N, M), "pairs": (N, M, M), "later": (N, M, K)}
    out = {name: np.empty(size) for name, size in sizes.items()}
    frame = filled("ConjugateBackward", modes=M, numbers=K, series=len(starts) - 1, **arrays, **out)
    native.call("smooth_families", frame)
    probability, pairs, later = (torch.from_numpy(x).to(evidence) for x in out.values())
    return probability, pairs, later


def kim_mixing(before: Tensor, log_transition: Tensor) -> Tensor:
    """P(mode before = i | mode = j) from log P(mode before); where no mode leads to j, P(mode before)."""
    joint = before.unsqueeze(-1) + log_transition
    nothing = joint.isneginf().all(-2, keepdim=True)
    return torch.softmax(torch.where(nothing, before.unsqueeze(-1), joint), -2)


def impossible(what: str, step: int, y: Tensor) -> str:
    """Error message for an observation that has probability 0 in every mode."""
    return f"SwitchingFamily.{what}: at step {step} no mode can give y = {y.tolist()}."


def centre_of(prior: ExponentialFamily, rows: Tensor, there: Tensor) -> Tensor | None:
    """Mean of the data if the prior has a location, else None; squares about the mean lose fewer digits."""
    if not isinstance(prior, NormalGamma | NormalInverseWishart | Gaussian) or not bool(there.any()):
        return None
    return rows[there].mean(0)


def flat(x: Tensor, *shape: int) -> np.ndarray:
    """A float64 numpy array of the given shape."""
    return np.ascontiguousarray(x.detach().double().cpu().numpy().reshape(shape))
