r"""A Laplace posterior over some directions of the weights, and what it predicts.

Around weights w that minimise N L(w) + ½ τ |w|², the posterior is close to a Gaussian. Along the columns of a
basis U it is

    w + U c,   c ~ N(0, S),   S = (N Uᵀ A U + τ)⁻¹

with A the Gauss–Newton matrix: all parameters of a last layer (U = 1), or the leading eigenvectors of a whole
model. The outputs, linear in c, are Gaussian: f(x) + J U c; forward derivatives along the columns of U give
J U. Probabilities are the mean of the softmax under that Gaussian. The evidence of the data for τ,

    log p(data | τ) = ½ Σ_i log(τ / (μ_i + τ)) − ½ τ |Uᵀ w|² + const,     μ the eigenvalues of N Uᵀ A U

chooses τ if none is given. It believes that w is a minimum with that prior. Weights trained without a penalty
are not: their predictions saturate, A vanishes, and the posterior is far too wide. `calibrate` therefore
chooses τ by the likelihood of held-out labels; as τ grows, probabilities go to those of the model itself.
"""

from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.curvature.objectives import push
from exptilt.curvature.operator import Curvature

LARGEST = 4000  # directions that a dense posterior is made for


class LaplacePosterior:
    """A Gaussian posterior over directions of the weights.

    Args:
        curvature: "ggn" or "fisher" with "cross_entropy", restricted to the parameters that are uncertain,
            such as a last layer: ``curvature.restrict("classifier")``.
        basis: None for all parameters of the curvature; a number k for its k leading eigenvectors; or
            orthonormal columns ``(P, k)``.
        prior_precision: τ; None for the one with the largest evidence.

    Attributes:
        basis: ``(P, k)``, or None for all parameters.
        covariance: S, ``(k, k)``.
        prior_precision: τ.
        log_evidence: of τ, up to a constant of the data.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        >>> data = [(torch.randn(9, 2), torch.arange(9) % 3)]
        >>> ggn = xt.curvature.Curvature(model, "cross_entropy", data)
        >>> posterior = xt.curvature.LaplacePosterior(ggn.restrict("2"), prior_precision=1.0)
        >>> posterior.predict(torch.randn(5, 2)).sum(-1).allclose(torch.ones(5))
        True
    """

    def __init__(
        self, curvature: Curvature, *, basis: int | Tensor | None = None, prior_precision: float | None = None
    ) -> None:
        if not isinstance(curvature, Curvature) or curvature.kind not in ("ggn", "fisher"):
            got = curvature.kind if isinstance(curvature, Curvature) else type(curvature).__name__
            raise ArgumentError(
                f"LaplacePosterior: curvature is {got!r}. Pass a Curvature with kind='ggn' or 'fisher'."
            )
        if curvature.loss != "cross_entropy":
            raise ArgumentError(
                "LaplacePosterior: loss is a function. Pass a Curvature with loss='cross_entropy'."
            )
        self.curvature = curvature
        size = curvature.shape[0]
        if basis is None and size > LARGEST:
            raise ArgumentError(
                f"LaplacePosterior: {size:,} parameters are too many for a dense posterior (at most "
                f"{LARGEST:,}). Restrict the curvature to a small last layer, or pass basis=20."
            )
        if isinstance(basis, Tensor):
            self.basis: Tensor | None = _orthonormal(basis, size)
        else:
            self.basis = None if basis is None else curvature.eigenvalues(basis).vectors
        U = self._columns()
        M = curvature.items * (U.T @ (curvature @ U)).double()
        mu, vectors = torch.linalg.eigh((M + M.T) / 2)
        mu = mu.clamp_min(0)  # the matrix is never negative: what is below 0 is rounding
        inside = (U.T @ curvature.parameters.flat(curvature.parameters.weights()).to(U.dtype)).double()
        length = float(inside.square().sum())

        def evidence(log_tau: float) -> float:
            tau = torch.tensor(log_tau, dtype=torch.float64).exp()
            return float(0.5 * (tau / (mu + tau)).log().sum() - 0.5 * tau * length)

        if prior_precision is None:
            found = minimize_scalar(lambda t: -evidence(t), bounds=(-20.0, 20.0), method="bounded")
            prior_precision = float(torch.tensor(found.x).exp())
        self.prior_precision = checks.number("LaplacePosterior", "prior_precision", prior_precision, above=0)
        self.log_evidence = evidence(float(torch.tensor(self.prior_precision).double().log()))
        self._spectrum, self._vectors = mu, vectors
        self._root = self._scaled(self.prior_precision)
        self.covariance = self._root @ self._root.T

    def _scaled(self, tau: float) -> Tensor:
        """A root of the covariance for the prior precision `tau`."""
        root: Tensor = self._vectors * (self._spectrum + tau).rsqrt()
        return root

    def _columns(self) -> Tensor:
        if self.basis is not None:
            return self.basis
        kind = torch.float64 if self.curvature.dtype == torch.float64 else torch.float32
        return torch.eye(self.curvature.shape[0], dtype=kind, device=self.curvature.device)

    def predict(self, inputs: Any, *, samples: int = 256, seed: int = 0) -> Tensor:
        """Predictive probabilities: the mean of the softmax over draws of the linearised logits.

        Args:
            inputs: a batch as the curvature's data has them, labels not needed: a dict, or the inputs alone.
            samples: how many draws.
            seed: of the draws.

        Returns:
            ``(..., classes)``, the shape of the model's logits.
        """
        samples = checks.whole("LaplacePosterior.predict", "samples", samples)
        return self._mean_softmax(*self._linear(inputs), self._root, samples, seed)

    def calibrate(
        self, inputs: Any, labels: Tensor, *, samples: int = 64, seed: int = 0
    ) -> "LaplacePosterior":
        """A posterior over these directions whose prior precision makes held-out labels most probable.

        Args:
            inputs: a batch that the model was not trained on, as for `predict`.
            labels: ``(...)``, its classes as whole numbers.
            samples: how many draws, the same for every precision.
            seed: of the draws.
        """
        samples = checks.whole("LaplacePosterior.calibrate", "samples", samples)
        mean, slopes = self._linear(inputs)
        if labels.shape != mean.shape[:-1] or labels.is_floating_point():
            raise ArgumentError(
                f"LaplacePosterior.calibrate: labels are {tuple(labels.shape)} {labels.dtype}. Pass whole "
                f"numbers of shape {tuple(mean.shape[:-1])}, one class for each prediction."
            )

        def loss(log_tau: float) -> float:
            root = self._scaled(float(torch.tensor(log_tau, dtype=torch.float64).exp()))
            found = self._mean_softmax(mean, slopes, root, samples, seed)
            return -float(found.gather(-1, labels[..., None]).double().clamp_min(1e-300).log().mean())

        grid = torch.linspace(-8, 16, 25).tolist()  # the loss may have several valleys: look first
        best = min(grid, key=loss)
        chosen = minimize_scalar(loss, bounds=(best - 1, best + 1), method="bounded", options={"xatol": 0.02})
        tau = float(torch.tensor(chosen.x, dtype=torch.float64).exp())
        return LaplacePosterior(self.curvature, basis=self.basis, prior_precision=tau)

    def _linear(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Logits (..., classes) at the weights, and their slopes (..., classes, k) along the columns."""
        own, along, batch = self.curvature, [], inputs if isinstance(inputs, dict) else (inputs,)
        weights = own.parameters.weights()

        def logits(w: Any) -> Tensor:
            found: Tensor = own.objective._logits(w, batch)  # type: ignore[union-attr]
            return found

        with own._explained(), torch.no_grad():
            mean = logits(weights)
            for column in track(list(self._columns().T), "directions", show=own.progress):
                along.append(push(logits, weights, own.parameters.split(column.to(own.dtype)))[1])
        return mean, torch.stack(along, -1).to(self._root)

    @staticmethod
    def _mean_softmax(mean: Tensor, slopes: Tensor, root: Tensor, samples: int, seed: int) -> Tensor:
        """The mean of the softmax over draws of the logits."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(samples, root.shape[1], generator=generator, dtype=torch.float64)
        total = torch.zeros_like(mean)
        for drawn in noise.to(root.device) @ root.T:
            total += (mean + (slopes @ drawn).to(mean)).softmax(-1)
        return total / samples


def _orthonormal(basis: Tensor, size: int) -> Tensor:
    checks.floating("LaplacePosterior", "basis", basis)
    if basis.ndim != 2 or basis.shape[0] != size:
        raise ArgumentError(f"LaplacePosterior: basis is {tuple(basis.shape)}. Pass ({size}, k).")
    apart = (basis.T @ basis - torch.eye(basis.shape[1]).to(basis)).abs().max()
    if float(apart) > 1e-3:
        raise ArgumentError(
            f"LaplacePosterior: the columns of basis are not orthonormal, by {float(apart):.2g}. "
            "Pass torch.linalg.qr(basis)[0]."
        )
    return basis
