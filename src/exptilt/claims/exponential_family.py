r"""A1 to A7: attention is the mean of an exponential family, and G is its log-normalizer.

Each claim compares the library's function, in float64, with a formula written out by hand or with an integral
that is computed without the claim.
"""

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from exptilt.claims.evidence import (
    ROUNDING,
    Findings,
    axes,
    covariance_of,
    curve,
    dots,
    least,
    most,
    normals,
    off,
    same,
)
from exptilt.claims.ledger import APPENDIX, FAMILY, FILTER, POSTER, Between, claim
from exptilt.families import Empirical, FromDensity, Gamma, Gaussian, GaussianMixture, Poisson
from exptilt.tilting import attend, fisher_vector_product, log_normalizer

Points = Annotated[int, Between(2, 4096)]
Dimensions = Annotated[int, Between(1, 64)]


@claim(
    "A1",
    "Attention is the gradient of a log-normalizer",
    r"G(\eta)=\log\sum_n e^{\langle x_n,\eta\rangle},\quad "
    r"\nabla G(\eta)=\sum_n \mathrm{softmax}_n(\langle x_n,\eta\rangle)\,x_n",
    f"{POSTER}, Proposition 1 (a); {FAMILY}, equations 2 to 7",
)
def gradient(seed: int, *, points: Points = 40, dimensions: Dimensions = 5) -> Findings:
    """The points x_n, counted, and tilted by η have the log-normalizer G(η) = log Σ e^⟨x_n,η⟩. Its gradient
    is one output of attention with query η, keys and values x_n. A prefactor 1/N shifts G by −log N and
    changes nothing else.

    Experiment:
        Random points and queries. G and attention of the library against sums written out, attention
        against the derivative of G by automatic differentiation, and both with weights 1/N.

    Example:
        >>> x, eta = torch.randn(1, 40, 5), torch.randn(1, 1, 5, requires_grad=True)  # one head
        >>> G = xt.log_normalizer(eta, x, scale=1.0)
        >>> gradient = torch.autograd.grad(G.sum(), eta)[0]
        >>> print(torch.allclose(gradient, xt.attend(eta, x, x, scale=1.0).output, atol=1e-5))
        True
    """
    x, eta = normals(seed, (1, points, dimensions), (1, 8, dimensions))
    seen = attend(eta, x, x, scale=1.0)
    weights = (eta @ x.mT).exp()
    eta.requires_grad_()
    (slope,) = torch.autograd.grad(log_normalizer(eta, x, scale=1.0).sum(), eta)
    even = attend(eta.detach(), x, x, scale=1.0, log_weight=torch.full_like(x[..., 0], -math.log(points)))
    shift = even.log_normalizer - seen.log_normalizer + math.log(points)
    along = torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None] * eta.detach()[:, :1]
    G = log_normalizer(along, x, scale=1.0)[0]
    slopes = (attend(along, x, x, scale=1.0).output * eta.detach()[:, :1]).sum(-1)[0]
    t = torch.linspace(-2, 2, 41).tolist()
    differences = torch.gradient(G, spacing=0.1)[0]
    yield same("G against the sum written out", seen.log_normalizer, weights.sum(-1).log())
    yield same("attention against the sum", seen.output, weights @ x / weights.sum(-1, True))
    yield same("attention against ∇G", seen.output, slope)
    yield most("shift of G by 1/N, less log N", shift.abs(), ROUNDING)
    yield same("attention with weights 1/N", even.output, seen.output)
    yield curve("G(tq)", t, G)
    yield curve("<attention, q>", t, slopes)
    yield dots("differences of G", t[1:-1:4], differences.tolist()[1:-1:4])
    yield axes("G along a line, and attention as its slope", "t, with η = t·q", "")


@claim(
    "A2",
    "The derivative of attention is a covariance",
    r"\nabla^2 G=\mathrm{Cov}[u],\qquad \partial_{\delta\eta}\,\mathrm{E}[v]=\mathrm{Cov}(v,k)\,\delta\eta",
    f"{FAMILY}, equation 6; {POSTER}, exponential families and Fisher information",
)
def fisher(seed: int, *, points: Points = 40, dimensions: Dimensions = 5) -> Findings:
    """The gradient of G is the mean of the statistic and its Hessian the covariance, the Fisher information.
    Where values belong to keys, the forward derivative of attention along δη is the product Cov(v,k) δη.

    Experiment:
        Hessian of G by automatic differentiation, the Fisher-vector product, and the forward derivative of
        attention with separate values, each against covariances under the attention weights.

    Example:
        >>> q, k, v, d = (torch.randn(1, n, 5) for n in (1, 40, 40, 1))
        >>> tangent = torch.func.jvp(lambda q: xt.attend(q, k, v, scale=1.0).output, (q,), (d,))[1]
        >>> p = torch.softmax(q @ k.mT, -1)
        >>> covariance = (p * (v - p @ v).mT) @ (k - p @ k)
        >>> print(torch.allclose(tangent, d @ covariance.mT, atol=1e-4))
        True
    """
    shapes = ((1, 1, dimensions), (1, points, dimensions), (1, points, 3), (1, 1, dimensions))
    q, k, v, step = normals(seed, *shapes)
    p = torch.softmax(q @ k.mT, -1)
    cov = ((p * (k - p @ k).mT) @ (k - p @ k))[0]
    cross = ((p * (v - p @ v).mT) @ (k - p @ k))[0]
    hessian = torch.autograd.functional.hessian(
        lambda x: log_normalizer(x[None, None], k, scale=1.0).sum(), q[0, 0]
    )
    product = fisher_vector_product(q, k, step, scale=1.0)
    forward = torch.func.jvp(lambda x: attend(x, k, v, scale=1.0).output, (q,), (step,))[1]
    h = torch.logspace(-6, 0, 13, dtype=torch.float64)
    there = attend(q + h[:, None] * step, k, v, scale=1.0).output - attend(q, k, v, scale=1.0).output
    error = (there / h[:, None] - step @ cross.mT).norm(dim=-1)[0]
    yield same("∇²G against Cov[k]", hessian, cov)
    yield same("Fisher-vector product against Cov[k]δη", product, step @ cov)
    yield same("forward derivative against Cov(v,k)δη", forward, step @ cross.mT)
    yield least("least eigenvalue of ∇²G", torch.linalg.eigvalsh(hessian).min(), -ROUNDING)
    yield dots("difference quotient", h, error)
    yield axes(
        "Difference quotients of attention come to Cov(v,k)δη",
        "size of the step",
        "distance from Cov(v,k)δη",
        log_x=True,
        log_y=True,
    )


@claim(
    "A3",
    "Tilting adds to the natural parameter of x",
    r"\nabla_\eta\log\int p_0(x\mid\eta_1,\eta_2)\,e^{\langle x,\eta\rangle}dx"
    r"=\mathrm{E}_{p_0(x\mid\eta_1+\eta,\,\eta_2)}[x]",
    f"{POSTER}, Proposition 1 (b)",
)
def tilting(seed: int, *, tilt: Annotated[float, Between(-2, 0.9)] = 0.4) -> Findings:
    """If the intrinsic measure is a member of an exponential family with x among its statistics, tilting by
    η gives the member whose natural parameter of x is larger by η, and the mean of that is the gradient.

    Experiment:
        A Gamma law (statistics x, log x), a Poisson law and a Gaussian (x, xx'), each tilted: natural
        parameters before and after, and the mean against a quadrature or sum over the untilted density.

    Example:
        >>> h = xt.families.Gamma(torch.tensor([3.0]), torch.tensor([2.0]))  # rate 2
        >>> print(h.tilt(torch.tensor([0.5])).rate)
        tensor([1.5000])
    """
    size = normals(seed, (3,))[0].abs() + 1.0
    eta = torch.full_like(size[:1], tilt)
    laws = {
        "Gamma": Gamma(size[:1] + 1, size[1:2]),
        "Poisson": Poisson(size[2:]),
        "Gaussian": Gaussian(size[:1], size[1:2, None]),
    }
    for name, law in laws.items():
        added = law.tilt(eta).natural_parameter - law.natural_parameter
        added[..., :1] -= eta
        yield most(f"{name}: natural parameter less η", added.abs(), ROUNDING)
        if name == "Poisson":
            x = torch.arange(200.0).to(size)
        else:
            x = torch.linspace(1e-4 if name == "Gamma" else -30, 60, 400_001).to(size)
        weight = torch.softmax(law.log_prob(x[:, None]) + tilt * x, 0)
        yield most(f"{name}: mean against the sum over x", abs(law.mean(eta) - weight @ x), 1e-6)
        several = torch.linspace(-1, 0.8, 19).to(size)
        yield curve(name, several, law.mean(several[:, None])[:, 0])
    yield axes("Mean of x by tilt", "η", "∇G(η)")


@claim(
    "A4",
    "A Gaussian measure gives a linear map",
    r"h=\mathcal N(\mu,\Sigma):\quad \nabla G(\eta)=\mu+\Sigma\eta",
    f"{POSTER}, Corollary 1",
)
def gaussian(seed: int, *, nodes: Annotated[int, Between(8, 60)] = 30) -> Findings:
    """With a Gaussian intrinsic measure N(μ,Σ) attention becomes the affine map μ + Ση.

    Experiment:
        Means of the tilted measure in two dimensions against Gauss–Hermite quadrature of ∫ h e^⟨x,η⟩.

    Example:
        >>> h = xt.Gaussian(torch.tensor([1.0, 0.0]), torch.diag(torch.tensor([2.0, 3.0])))
        >>> print(h.mean(torch.tensor([1.0, 1.0])))
        tensor([3., 3.])
    """
    mean, root, eta = normals(seed, (2,), (2, 2), (16, 2))
    covariance = covariance_of(root)
    law = Gaussian(mean, covariance)
    x, log_w = _hermite(mean, covariance, nodes)
    G = torch.logsumexp(log_w + eta @ x.mT, -1)
    by_sum = torch.softmax(log_w + eta @ x.mT, -1) @ x
    found = law.mean(eta)
    yield same("∇G against μ + Ση", found, mean + eta @ covariance)
    yield same("∇G against quadrature", found, by_sum, 1e-6)
    yield same("G against quadrature", law.log_normalizer(eta), G, 1e-6)
    yield dots("", (mean + eta @ covariance).flatten(), by_sum.flatten())
    yield axes("Attention over a Gaussian: predicted and integrated", "μ + Ση", "by quadrature")


@claim(
    "A5",
    "A Gaussian mixture gives attention plus a linear map",
    r"\nabla G=\sum_n w_n(\mu_n+\Sigma_n\eta),\quad "
    r"w_n\propto\pi_n e^{\langle\mu_n,\eta\rangle+\frac12\eta'\Sigma_n\eta}",
    f"{POSTER}, Proposition 2 (one Σ for all); covariances of their own go beyond it",
    printed=r"\nabla G=\Sigma\eta+\sum_n w_n\mu_n,\quad w_n\propto\pi_n e^{\langle\mu_n,\eta\rangle}",
)
def mixture(seed: int, *, components: Annotated[int, Between(2, 64)] = 5) -> Findings:
    """With a mixture of Gaussians of one covariance, ∇G is attention over the means plus Ση. With
    covariances of their own, the weights gain ½η'Σ_nη and each mean becomes μ_n + Σ_nη.

    Experiment:
        Means of tilted mixtures against quadrature, with one covariance and with one for each component;
        and how far the formula for one covariance is off where there are several.

    Example:
        >>> h = xt.GaussianMixture(torch.zeros(2), torch.tensor([[0.0], [4.0]]), torch.eye(1).expand(2, 1, 1))
        >>> print(h.mean(torch.tensor([0.0])))
        tensor([2.])
    """
    log_pi, means, roots, eta = normals(seed, (components,), (components, 2), (components, 2, 2), (16, 2))
    log_pi = log_pi.log_softmax(0)
    covariances, errors, plain = covariance_of(roots), [], []
    for own in (covariances[:1].expand_as(covariances), covariances):
        law = GaussianMixture(log_pi, means, own)
        parts = [_hermite(mean, cov, 30) for mean, cov in zip(means, own, strict=True)]
        x = torch.cat([nodes for nodes, _ in parts])
        log_w = torch.cat([log_pi[n] + weight for n, (_, weight) in enumerate(parts)])
        by_sum = torch.softmax(log_w + eta @ x.mT, -1) @ x
        errors.append(off(law.mean(eta), by_sum))
        average = torch.einsum("n,nij->ij", log_pi.exp(), own)
        simple = torch.softmax(log_pi + eta @ means.mT, -1) @ means + eta @ average
        plain.append((simple - by_sum).norm(dim=-1))
    yield most("one Σ: ∇G against quadrature", errors[0], 1e-6)
    yield most("one Σ: the printed formula", plain[0], 1e-6)
    yield most("Σ_n: ∇G against quadrature", errors[1], 1e-6)
    yield most("Σ_n: the printed formula with the mean Σ", plain[1], 1e-6, "reach")
    yield dots("one Σ", eta.norm(dim=-1), plain[0].clamp_min(1e-17))
    yield dots("Σ for each component", eta.norm(dim=-1), plain[1])
    yield axes("How far the formula for one covariance is off", "length of η", "distance from ∇G", log_y=True)


@claim(
    "A6",
    "G is the log Laplace transform of the measure",
    r"G(\eta)=\log\mathcal L\{h\}(-\eta)",
    f"{FAMILY}, equation 3",
)
def laplace(seed: int, *, draws: Annotated[int, Between(100, 1_000_000)] = 20_000) -> Findings:
    """The log-normalizer is the log Laplace transform of any intrinsic measure, at −η; where no closed form
    is known, quadrature or Monte Carlo gives it, with its error.

    Experiment:
        An exponential law, an even one on [−1, 1] and a standard normal, given by their densities alone,
        against the transforms that tables have: −log(1−η), log(sinh η/η) and η²/2. Monte Carlo against the
        last, in units of its own standard error.

    Example:
        >>> h = xt.families.FromDensity.quadrature(lambda x: -x.sum(-1), lower=(0.0,))  # the density alone
        >>> print(round(float(h.log_normalizer(torch.tensor([0.5], dtype=torch.float64))), 6))  # log 2
        0.693147
    """
    t = torch.tensor([-2.0, -1.0, -0.3, 0.2, 0.5, 0.8], dtype=torch.float64)[:, None]
    one_sided = FromDensity.quadrature(lambda x: -x.sum(-1), lower=(0.0,))
    even = FromDensity.quadrature(
        lambda x: torch.full_like(x[..., 0], -math.log(2)), lower=(-1.0,), upper=(1.0,)
    )
    normal = Gaussian(torch.zeros(1).to(t), torch.eye(1).to(t))
    generator = torch.Generator().manual_seed(seed)
    drawn = FromDensity.monte_carlo(normal.log_prob, normal, samples=draws, generator=generator)
    off_by = (drawn.log_normalizer(t) - t[:, 0].square() / 2).abs() / drawn.log_normalizer_error(t)
    yield same("exponential law", one_sided.log_normalizer(t), -(1 - t[:, 0]).log(), 1e-8)
    yield same("even on [−1, 1]", even.log_normalizer(t), (t.sinh() / t)[:, 0].log())
    yield most("standard normal by draws, in standard errors", off_by, 5.0, "guard")
    yield curve("exponential law", t[:, 0], (-(1 - t[:, 0]).log()))
    yield dots("by quadrature", t[:, 0], one_sided.log_normalizer(t))
    yield curve("even on [−1, 1]", t[:, 0], (t.sinh() / t)[:, 0].log())
    yield dots("by quadrature ", t[:, 0], even.log_normalizer(t))
    yield axes("Log Laplace transforms by quadrature and from tables", "η", "G(η)")


@claim(
    "A7",
    "Multi-head attention is one family a head",
    r"A_{ij}=\frac{e^{\langle k_i,q_j\rangle/\sqrt d}}{\sum_{i'}e^{\langle k_{i'},q_j\rangle/\sqrt d}},\quad "
    r"\sum_i A_{ij}=1",
    f"{FILTER}, equations 1 to 3; {POSTER}, Transformer attention; {APPENDIX}, on several heads",
)
def heads(seed: int, *, points: Points = 24, heads: Annotated[int, Between(1, 16)] = 3) -> Findings:
    """Softmax attention with weight matrices normalises e^⟨k,q⟩/√d over keys, and every head is a family of
    its own: its keys tilted by its query, its values averaged.

    Experiment:
        Queries, keys and values of several heads: attention of the library and of PyTorch, and for each
        head the `Empirical` measure of its keys tilted by its queries.

    Example:
        >>> q, k, v = (torch.randn(1, 3, 24, 8) for _ in range(3))
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> print(torch.allclose(xt.attend(q, k, v).output, theirs, atol=1e-5))
        True
    """
    d = 8
    q, k, v = normals(seed, *((1, heads, points, d),) * 3)
    seen = attend(q, k, v)
    torch_s = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mass = attend(q, k, torch.ones_like(v[..., :1])).output
    family = [Empirical(k[0, h]).log_normalizer(q[0, h] / d**0.5) for h in range(heads)]
    by_head = [
        Empirical(k[0, h]).tilt(q[0, h, j] / d**0.5).log_weight.softmax(-1) @ v[0, h]
        for h in range(heads)
        for j in range(points)
    ]
    entropy = seen.entropy[0].sort(-1).values
    places = list(range(points))
    yield same("against PyTorch's attention", seen.output, torch_s)
    yield most("sum of the weights over keys, less 1", (mass - 1).abs(), ROUNDING)
    yield same("G against one family a head", seen.log_normalizer[0], torch.stack(family))
    yield same("output against one family a head", seen.output[0].flatten(0, 1), torch.stack(by_head))
    yield from (curve(f"head {h}", places, entropy[h]) for h in range(min(heads, 4)))
    yield axes(
        "Each head tilts its own measure: entropies of its queries", "query, by entropy", "entropy (nats)"
    )


def _hermite(mean: Tensor, covariance: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes ``(nodes², 2)`` and log-weights of N(mean, covariance) in the plane, by Gauss and Hermite."""
    at, weight = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(nodes))
    z = torch.cartesian_prod(at, at)
    log_w = torch.cartesian_prod(weight.log(), weight.log()).sum(-1) - math.log(2 * math.pi)
    return mean + z @ torch.linalg.cholesky(covariance).mT, log_w
