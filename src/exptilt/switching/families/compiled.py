"""A model and its observations as the compiled pass takes them, and what it leaves as a family again."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.kernels import run_chunks
from exptilt.families import Beta, Dirichlet, ExponentialFamily, Gamma, NormalGamma, NormalInverseWishart
from exptilt.families.relations import _log_base, moved

from .dynamics import Discounted
from .kernel import DIRICHLET, GAMMA, NORMAL_GAMMA, NORMAL_WISHART, filter_family

if TYPE_CHECKING:
    from .model import SwitchingFamily

METHODS = ("gpb2", "imm", "gpb1")  # in the order of the kernel's
FITTED: dict[type, int] = {Gamma: GAMMA, Beta: DIRICHLET, Dirichlet: DIRICHLET, NormalGamma: NORMAL_GAMMA}
COMPILED = FITTED | {NormalInverseWishart: NORMAL_WISHART}


class Passed(NamedTuple):
    """What a pass over B series leaves: ``(B, T, ...)``."""

    terms: Tensor
    log_level: Tensor
    belief: ExponentialFamily
    mixing: Tensor


class Compiled:
    """A model and its observations as the kernel takes them."""

    def __init__(self, model: "SwitchingFamily", rows: Tensor, there: Tensor) -> None:
        self.model, self.shape, self.there = model, tuple(there.shape), there
        self.rows, self.centre = rows, centre_of(model.prior, rows, there)
        near = rows if self.centre is None else rows - self.centre
        count = there.numel()
        prior, K = self.about(model._started()), model.prior.natural_parameter.shape[-1]
        self.groups = prior.size if isinstance(prior, NormalInverseWishart) else 1
        if isinstance(prior, Gamma | Beta | NormalGamma):
            self.groups = K // (4 if isinstance(prior, NormalGamma) else 2)
        self.evidence = flat(model._evidence(near), count, K)
        self.log_base = flat(_log_base(model.likelihood, rows).expand(self.shape), count)
        self.seen = there.reshape(-1).numpy()
        self.starts = self.shape[1] * np.arange(self.shape[0] + 1)
        M = len(model.dynamics)
        self.prior = flat(prior.natural_parameter.expand(M, K), M, K)
        moves = [move for move in model.dynamics if isinstance(move, Discounted)]
        self.discount = np.array([float(move.discount) for move in moves])
        rests = [self.about(move.rest).natural_parameter for move in moves]
        self.rest = flat(torch.stack(torch.broadcast_tensors(*rests)), M, K)
        assert model.initial_probability is not None
        with np.errstate(divide="ignore"):
            self.log_transition = np.log(flat(model.transition, M, M))
            self.log_initial = np.log(flat(model.initial_probability, M))

    def about(self, member: ExponentialFamily) -> ExponentialFamily:
        """A member as seen from the centre of the data."""
        return member if self.centre is None else moved(member, -self.centre)

    def arrays(self, method: str) -> tuple[np.ndarray, ...]:
        """Terms, log-levels, beliefs and mixing probabilities by row, and where series could not go on."""
        N, (M, K) = len(self.seen), self.rest.shape
        out = (np.zeros(N), np.zeros((N, M)), np.zeros((N, M, K)), np.zeros((N, M, M)))
        failure = np.full((self.shape[0], 2), -1, np.int64)
        given = (self.evidence, self.log_base, self.seen)
        model = (self.prior, self.discount, self.rest, self.log_transition, self.log_initial)
        head = COMPILED[type(self.model.prior)], self.groups, METHODS.index(method)

        def work(first: int, end: int) -> None:
            filter_family(*head, *given, self.starts[first : end + 1], *model, *out, failure[first:end])

        run_chunks(work, self.shape[0])
        return *out, failure

    def run(self, method: str, what: str) -> Passed:
        """The filter's pass; an error with the step where it cannot go on."""
        terms, level, theta, mixing, failure = self.arrays(method)
        B, T = self.shape
        with np.errstate(over="ignore"):
            theta = theta.astype(str(self.model.prior.dtype).removeprefix("torch."))
        stuck = np.flatnonzero(failure[:, 0] >= 0)
        lost = np.flatnonzero(~np.isfinite(theta).all((1, 2)))
        if len(stuck) or len(lost):
            row = int(failure[stuck[0], 0] if len(stuck) else lost[0])
            step, y = row % T, self.rows[row // T, row % T]
            if len(stuck) and not failure[stuck[0], 1]:
                raise ArgumentError(impossible(what, step, y))
            raise ArgumentError(
                f"SwitchingFamily.{what}: at step {step}, y = {y.tolist()}, a belief is not finite: too "
                f"sharp or too wide for {theta.dtype}. Pass a smaller discount, or data nearer to 1."
            )
        natural = torch.from_numpy(theta).reshape(B, T, *theta.shape[1:])
        belief = type(self.model.prior).from_natural(natural)
        belief = belief if self.centre is None else moved(belief, self.centre)
        parts = [torch.from_numpy(x).to(natural).reshape(B, T, *x.shape[1:]) for x in (terms, level, mixing)]
        return Passed(parts[0], parts[1], belief, parts[2])


def impossible(what: str, step: int, y: Tensor) -> str:
    """What is said where no mode is left."""
    return f"SwitchingFamily.{what}: at step {step} no mode can give y = {y.tolist()}."


def centre_of(prior: ExponentialFamily, rows: Tensor, there: Tensor) -> Tensor | None:
    """The mean of the data, where the prior is of a location: squares about it lose fewer digits."""
    if not isinstance(prior, NormalGamma | NormalInverseWishart) or not bool(there.any()):
        return None
    return rows[there].mean(0)


def flat(x: Tensor, *shape: int) -> np.ndarray:
    """The numbers in float64, in this shape."""
    return np.ascontiguousarray(x.detach().double().cpu().numpy().reshape(shape))
