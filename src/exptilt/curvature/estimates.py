r"""Spectrum, trace, log-determinant and solutions of a symmetric matrix, from its products with vectors.

Random estimates average over probes z with independent signs, for which E[z zᵀ] = 1, and carry the standard
error of that average. For a function f, zᵀ f(A) z is a Gauss quadrature with the nodes and weights of
Lanczos' tridiagonal matrix T (Golub, Welsch):

    zᵀ f(A) z / P  ≈  Σ_k (e_1ᵀ u_k)² f(θ_k),      T u_k = θ_k u_k

exact for polynomials of degree below twice the steps, and for any f once the steps reach the number of
distinct eigenvalues.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import eigsh, lobpcg
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.solution import Solution, Status

WHICH = {"largest": "LA", "smallest": "SA", "magnitude": "LM"}


class Estimate(NamedTuple):
    """A random estimate.

    Attributes:
        value: ``()`` or ``(P,)``.
        standard_error: of the value, over the probes; 0 where the value is exact.
        probes: how many probes were averaged.
    """

    value: Tensor
    standard_error: Tensor
    probes: int


class Eigenpairs(NamedTuple):
    """Eigenvalues with their certificates.

    Attributes:
        values: ``(k,)``, from the largest to the smallest.
        vectors: ``(P, k)``, of length 1.
        residuals: ``(k,)``, |A v − λ v|: a true eigenvalue lies within this distance of λ.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor


class SpectralDensity(NamedTuple):
    """The distribution of the eigenvalues, as quadratures: one for each probe.

    Attributes:
        nodes: ``(probes, steps)``, where the mass sits.
        weights: ``(probes, steps)``, how much; they sum to 1 for each probe.
        coarse: nodes and weights of half the steps, for the error of the quadrature.
        size: P, the number of eigenvalues.
    """

    nodes: Tensor
    weights: Tensor
    coarse: tuple[Tensor, Tensor]
    size: int

    def mean(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """The mean of a function over the eigenvalues; the error is of probes and quadrature.

        Args:
            function: of a tensor of eigenvalues, entry by entry.
        """
        each = (self.weights * function(self.nodes)).sum(-1)
        half = (self.coarse[1] * function(self.coarse[0])).sum(-1)
        found = _averaged(each)
        return Estimate(found.value, found.standard_error + (each - half).mean().abs(), len(each))

    def density(self, grid: Tensor, width: float) -> Estimate:
        """The density at the points of a grid, each eigenvalue a Gaussian of standard deviation `width`.

        Args:
            grid: ``(G,)``.
            width: of the Gaussians, in the units of the eigenvalues.
        """
        checks.number("SpectralDensity.density", "width", width, above=0)
        apart = (grid[:, None, None] - self.nodes) / width
        each = (self.weights * torch.exp(-apart.square() / 2)).sum(-1) / (width * (2 * torch.pi) ** 0.5)
        return _averaged(each.T)


def _averaged(each: Tensor) -> Estimate:
    """The mean over the first axis, with its standard error; infinite for one probe."""
    count = len(each)
    spread = each.std(0) / count**0.5 if count > 1 else torch.full_like(each[0], torch.inf)
    return Estimate(each.mean(0), spread, count)


class Estimates:
    """Base of a symmetric operator: `shape`, `dtype`, `device`, `progress` and products with matrices."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    progress: bool | None

    def __matmul__(self, vector: Any) -> Any:
        """The product with a vector; `Curvature` implements it."""
        raise NotImplementedError

    def _wide(self, flat: Tensor) -> Tensor:
        """The product with a vector of float32 or float64."""
        found: Tensor = self @ flat.to(self.dtype)
        return found.to(flat.dtype)

    def _signs(self, count: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        return [
            (2 * torch.randint(2, (self.shape[0],), generator=generator) - 1).to(self.device, kind)
            for _ in range(count)
        ]

    def eigenvalues(
        self,
        k: int = 6,
        *,
        which: str = "largest",
        method: str = "lanczos",
        tolerance: float = 0.0,
        max_steps: int | None = None,
        seed: int = 0,
    ) -> Eigenpairs:
        """The outermost eigenvalues and their eigenvectors, by SciPy.

        Args:
            k: how many.
            which: "largest", "smallest" or "magnitude" (of either sign).
            method: "lanczos" (restarted, ARPACK), or "lobpcg", k products at a time.
            tolerance: relative accuracy of the eigenvalues; 0 for that of the dtype.
            max_steps: restarts or iterations at most; None for SciPy's own limit.
            seed: of the first vectors.

        Returns:
            `Eigenpairs`: values, vectors and residuals.

        Raises:
            ArgumentError: if SciPy stops before the tolerance is reached.
        """
        caller, size = "Curvature.eigenvalues", self.shape[0]
        k = checks.whole(caller, "k", k)
        checks.choice(caller, "which", which, WHICH)
        checks.choice(caller, "method", method, ("lanczos", "lobpcg"))
        if k > size:
            raise ArgumentError(f"{caller}: k is {k}, the matrix has {size} rows. Pass at most that.")
        operator = self.to_scipy()  # type: ignore[attr-defined]
        if 5 * k >= size or (method == "lobpcg" and which == "magnitude"):
            if size > 2000:
                raise ArgumentError(f"{caller}: 'lobpcg' finds 'largest' or 'smallest'; got {which!r}.")
            values, vectors = np.linalg.eigh(operator @ np.eye(size, dtype=operator.dtype))
            order = np.argsort({"LA": -values, "SA": values, "LM": -np.abs(values)}[WHICH[which]])[:k]
            values, vectors = values[order], vectors[:, order]
        else:
            start = np.random.default_rng(seed).standard_normal((size, k)).astype(operator.dtype)
            try:
                if method == "lanczos":
                    values, vectors = eigsh(
                        self._counted(operator, k),
                        k,
                        which=WHICH[which],
                        v0=start[:, 0],
                        tol=tolerance,
                        maxiter=max_steps,
                    )
                else:
                    values, vectors = lobpcg(
                        operator,
                        start,
                        largest=which == "largest",
                        tol=tolerance or None,
                        maxiter=max_steps or 200,
                    )
            except Exception as problem:
                if isinstance(problem, ArgumentError) or "No convergence" not in str(problem):
                    raise
                raise ArgumentError(f"{caller}: {problem}. Pass a larger max_steps or tolerance.") from None
        order = np.argsort(-values)
        values, vectors = values[order], np.ascontiguousarray(vectors[:, order])
        residuals = np.linalg.norm(operator @ vectors - vectors * values, axis=0)
        return Eigenpairs(
            *(torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (values, vectors, residuals))
        )

    def _counted(self, operator: Any, k: int) -> Any:
        """The operator with a bar over its products: to the end of the sweep that is under way."""
        size = self.shape[0]
        basis = min(size, max(2 * k + 1, 20))

        def sweeps() -> Any:
            yield from range(10**9)

        bar = iter(track(sweeps(), "products", total=basis, show=self.progress))

        def product(x: Any) -> Any:
            next(bar)
            return operator @ x

        return type(operator)(operator.shape, matvec=product, dtype=operator.dtype)

    def _lanczos(self, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Diagonals of Lanczos' tridiagonal matrix, every vector held orthogonal to all before."""
        basis = [start / start.norm()]
        alpha: list[Tensor] = []
        beta: list[Tensor] = []
        for step in range(steps):
            w = self._wide(basis[-1])
            alpha.append(w @ basis[-1])
            for _ in range(2):  # twice is enough (Parlett, Kahan)
                for v in basis:
                    w = w - (w @ v) * v
            length = w.norm()
            size = max(float(a.abs()) for a in alpha)
            if step + 1 == steps or float(length) <= 100 * torch.finfo(w.dtype).eps * max(size, 1e-30):
                break
            beta.append(length)
            basis.append(w / length)
        return torch.stack(alpha).double().cpu(), torch.stack(beta).double().cpu() if beta else torch.zeros(
            0
        ).double()

    def spectral_density(self, *, steps: int = 30, probes: int = 8, seed: int = 0) -> SpectralDensity:
        """The distribution of all eigenvalues, by stochastic Lanczos quadrature.

        Args:
            steps: products for each probe; twice the steps moments of the distribution are matched.
            probes: random vectors; the error falls with their square root.
            seed: of the probes.
        """
        caller = "Curvature.spectral_density"
        steps, probes = checks.whole(caller, "steps", steps), checks.whole(caller, "probes", probes)
        steps = min(steps, self.shape[0])
        fine, coarse = [], []
        for start in track(self._signs(probes, seed), "probes", total=probes, show=self.progress):
            alpha, beta = self._lanczos(start, steps)
            fine.append(_quadrature(alpha, beta, steps))
            half = max(1, (len(alpha) + 1) // 2)
            half = len(alpha) if len(alpha) < steps else half  # the space was exhausted: the rule is exact
            coarse.append(_quadrature(alpha[:half], beta[: half - 1], steps))
        found = [torch.stack(x) for x in zip(*fine, strict=True)]
        rough = [torch.stack(x) for x in zip(*coarse, strict=True)]
        return SpectralDensity(found[0], found[1], (rough[0], rough[1]), self.shape[0])

    def log_determinant(self, damping: float, *, steps: int = 30, probes: int = 8, seed: int = 0) -> Estimate:
        """log det(A + damping), with its error.

        Args:
            damping: added to every eigenvalue; large enough to make all of them positive.
            steps: products for each probe.
            probes: random vectors.
            seed: of the probes.
        """
        damping = checks.number("Curvature.log_determinant", "damping", damping, least=0)
        spectrum = self.spectral_density(steps=steps, probes=probes, seed=seed)
        least = float(spectrum.nodes.min())
        if least + damping <= 0:
            raise ArgumentError(
                f"Curvature.log_determinant: the matrix has an eigenvalue near {least:.3g}, damping is "
                f"{damping:g}. Pass damping > {-least:.3g}."
            )
        found = spectrum.mean(lambda x: torch.log(x + damping))
        return Estimate(found.value * self.shape[0], found.standard_error * self.shape[0], probes)

    def trace(self, *, probes: int = 16, method: str = "hutch++", seed: int = 0) -> Estimate:
        """The trace, with its standard error.

        Args:
            probes: random vectors; "hutch++" takes three products for each two.
            method: "hutch++" (a third of the products find the leading directions, which are then exact), or
                "hutchinson".
            seed: of the probes.
        """
        Q, AQ, rest = self._deflated("Curvature.trace", probes, method, seed)
        each = torch.stack([z @ (w - Q @ (Q.T @ w)) for z, w in rest])
        found = _averaged(each)
        return Estimate(found.value + (Q * AQ).sum(), found.standard_error, len(rest))

    def diagonal(self, *, probes: int = 16, method: str = "hutch++", seed: int = 0) -> Estimate:
        """The diagonal ``(P,)``, with the standard error of each entry.

        Args:
            probes: random vectors.
            method: "hutch++" or "hutchinson", as for the trace.
            seed: of the probes.
        """
        Q, AQ, rest = self._deflated("Curvature.diagonal", probes, method, seed, project=False)
        each = torch.stack([z * (w - Q @ (Q.T @ w)) for z, w in rest])
        found = _averaged(each)
        return Estimate(found.value + (Q * AQ).sum(1), found.standard_error, len(rest))

    def _deflated(
        self, caller: str, probes: int, method: str, seed: int, *, project: bool = True
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """A basis Q of leading directions, A Q, and probes (projected off Q) with their products."""
        probes = checks.whole(caller, "probes", probes, least=2)
        checks.choice(caller, "method", method, ("hutch++", "hutchinson"))
        first = min(probes // 2, self.shape[0]) if method == "hutch++" else 0
        signs = self._signs(probes, seed)
        Q, AQ = signs[0].new_zeros(self.shape[0], 0), signs[0].new_zeros(self.shape[0], 0)
        show = self.progress
        if first:
            sketch = [self._wide(z) for z in track(signs[:first], "leading directions", show=show)]
            Q = torch.linalg.qr(torch.stack(sketch, 1))[0]
            AQ = torch.stack([self._wide(q) for q in track(list(Q.T), "their products", show=show)], 1)
        rest = []
        for z in track(signs[first:], "probes", total=probes - first, show=show):
            g = z - Q @ (Q.T @ z) if project else z
            rest.append((g, self._wide(g)))
        return Q, AQ, rest

    def solve(
        self, b: Any, *, damping: float, tolerance: float = 1e-5, max_steps: int = 200
    ) -> Solution[Any]:
        """The x with (A + damping) x = b, by conjugate gradients.

        Args:
            b: ``(P,)`` or a dict, as for a product; the solution has its form.
            damping: added to the diagonal.
            tolerance: of the residual |b − (A + damping) x|, relative to |b|.
            max_steps: products at most.

        Returns:
            A `Solution` with status, relative residual and steps.

        Raises:
            ArgumentError: if A + damping is not positive along a direction that came up.
        """
        caller = "Curvature.solve"
        damping = checks.number(caller, "damping", damping, least=0)
        tolerance = checks.number(caller, "tolerance", tolerance, above=0)
        max_steps = checks.whole(caller, "max_steps", max_steps)
        flat, form = self.parameters.read(b)  # type: ignore[attr-defined]
        if flat.ndim != 1:
            raise ArgumentError(f"{caller}: b is {tuple(flat.shape)}. Pass one vector at a time.")
        r = flat.double() if self.dtype == torch.float64 else flat.float()
        x, p, size, goal = torch.zeros_like(r), r.clone(), r @ r, tolerance * r.norm()
        status, steps, least, best = Status.MAX_STEPS, 0, float("inf"), x
        if float(goal) == 0:
            return Solution.of(form(x.to(self.dtype)), Status.CONVERGED, torch.zeros(()), 0)
        for step in track(
            range(1, max_steps + 1), "conjugate gradients", total=max_steps, show=self.progress
        ):
            steps = step
            w = self._wide(p) + damping * p
            bend = p @ w
            if float(bend) <= 0:
                raise ArgumentError(
                    f"{caller}: the matrix is not positive: its curvature along a direction is "
                    f"{float(bend / (p @ p)) - damping:.3g}, damping is {damping:g}. Pass more damping, or "
                    "kind='ggn', which is never negative."
                )
            x = x + (size / bend) * p
            r = r - (size / bend) * w
            new = r @ r
            if float(new) < least:
                least, best = float(new), x
            if float(new.sqrt()) <= float(goal):
                status = Status.CONVERGED
                break
            p, size = r + (new / size) * p, new
        residual = (flat.to(x.dtype) - self._wide(best) - damping * best).norm() / flat.to(x.dtype).norm()
        if status is Status.CONVERGED and float(residual) > 2 * tolerance:
            status = Status.STALLED  # rounding: the running residual is no longer the true one
        return Solution.of(form(best.to(self.dtype)), status, residual.cpu(), steps)


def _quadrature(alpha: Tensor, beta: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a tridiagonal matrix, filled up to `steps` with nodes of weight 0."""
    values, vectors = torch.linalg.eigh(torch.diag(alpha) + torch.diag(beta, 1) + torch.diag(beta, -1))
    short = steps - len(values)
    weights = vectors[0].square()
    return torch.cat([values, values[-1:].expand(short)]), torch.cat([weights, weights.new_zeros(short)])
