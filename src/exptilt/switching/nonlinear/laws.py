"""Laws of modes that are functions, in numpy and in the form of the compiled kernels."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._support import native
from ..._support.errors import ArgumentError
from ..arrays import address
from .programs import Tapes


def wrap(difference: np.ndarray, angles: Sequence[int]) -> np.ndarray:
    """The difference with the components named in `angles` brought to (−π, π]."""
    out = difference.copy()
    for a in angles:
        out[..., a] = np.arctan2(np.sin(difference[..., a]), np.cos(difference[..., a]))
    return out


def collapse(
    weight: np.ndarray, mean: np.ndarray, cov: np.ndarray, angles: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Moments of mixtures: weight ``(..., K)``, mean ``(..., K, n)``, cov ``(..., K, n, n)``."""
    out = np.einsum("...k,...ki->...i", weight, mean)
    for a in angles:
        parts = (np.einsum("...k,...k->...", weight, f(mean[..., a])) for f in (np.sin, np.cos))
        out[..., a] = np.arctan2(*parts)
    delta = wrap(mean - out[..., None, :], angles)
    return out, np.einsum("...k,...kij->...ij", weight, cov + delta[..., None] * delta[..., None, :])


def triangles(roots: np.ndarray) -> np.ndarray:
    """Lower triangular factors of A A', for square A ``(..., n, n)``."""
    return np.ascontiguousarray(np.linalg.qr(roots.mT).R.mT)


def check_linearize(linearize: str, what: str) -> None:
    """Raise unless `linearize` is "extended" or "unscented"."""
    if linearize not in ("extended", "unscented"):
        raise ArgumentError(f'{what}: linearize is {linearize!r}. Pass "extended" or "unscented".')


class FactorRows(NamedTuple):
    """Laws by mode, with factors of the covariances: a row for each step or series."""

    mean: np.ndarray  # (rows, M·n)
    factor: np.ndarray  # (rows, M·n·n)
    log_mode: np.ndarray  # (rows, M)
    terms: np.ndarray = np.empty(0)  # (rows,)


class SigmaPoints(NamedTuple):
    """The points of the unscented transform: x, and x ± spread · L_k for the columns of the factor L.

    Attributes:
        spread: distance of the points from the mean, in units of L; each has the weight 1 / (2 spread²).
        center_weight: of x in the mean, which may be negative.
        center_share: of x in the covariance, at least 0.
    """

    spread: float
    center_weight: float
    center_share: float


def sigma_points(n: int, alpha: float, beta: float, kappa: float | None) -> SigmaPoints:
    """The points by the three numbers of Julier, Uhlmann and van der Merwe; see `SwitchingNonlinear`."""
    kappa = max(3.0 - n, 0.5) if kappa is None else kappa
    given = f"alpha is {alpha}, beta {beta}, kappa {kappa} with {n} states"
    if not (np.isfinite([alpha, beta, kappa]).all() and alpha > 0 and n + kappa > 0):
        raise ArgumentError(
            f"SwitchingNonlinear: {given}. Pass finite numbers, alpha above 0 and kappa above {-n}."
        )
    square = alpha**2 * (n + kappa)
    center = 1.0 - n / square
    share = center + 1.0 - alpha**2 + beta
    if share < 0:
        raise ArgumentError(
            f"SwitchingNonlinear: {given}, so that the mean's own point has the weight {share:.6g} in "
            "covariances. These are kept as factors, for which no weight may be negative: pass "
            f"beta of at least {beta - share:.6g}, or a larger alpha or kappa."
        )
    return SigmaPoints(float(np.sqrt(square)), center, share)


class Core:
    """A model in the form of the compiled kernels: arrays, and structs that hold their addresses."""

    def __init__(
        self, tapes: Tapes, sizes: tuple[int, int, int], tables: list[np.ndarray], points: "SigmaPoints"
    ) -> None:
        self.tapes, self.sizes, self.tables, self.points = tapes, sizes, tables, points
        self._frames: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state without the structs: they hold addresses, which a copy must make anew."""
        return self.__dict__ | {"_frames": {}}

    def address(self, linearize: str) -> int:
        """Address of the struct ``NonlinearModes``."""
        if linearize not in self._frames:
            tapes = self.tapes.frame()
            given = ctypes.addressof(tapes[0]), *map(address, self.tables)
            unscented = int(linearize == "unscented")
            frame = native.frame("NonlinearModes")(*self.sizes, unscented, *given, *self.points)
            self._frames[linearize] = frame, tapes
        return ctypes.addressof(self._frames[linearize][0])
