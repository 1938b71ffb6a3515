"""E5, E6, E8, E9 and G1: attention as a mixing step, its uncertainty, Gibbs chains, particles, errata."""

import math
from functools import partial
from typing import Annotated

import numpy as np
import torch
from scipy.optimize import nnls

from exptilt.attention import propagate
from exptilt.claims.evidence import (
    ROUNDING,
    Findings,
    axes,
    bars,
    covariance_of,
    curve,
    dots,
    least,
    most,
    normals,
    note,
    same,
)
from exptilt.claims.ledger import FAMILY, FILTER, POSTER, Between, claim
from exptilt.families import BernoulliProduct, Categorical, Gaussian, Poisson, fit_linear_link
from exptilt.sampling import Joint, gibbs, smc
from exptilt.switching import SwitchingLinearGaussian, attention_as_imm
from exptilt.tilting import attend

Tokens = Annotated[int, Between(2, 40)]


def forward_exists(backward: np.ndarray) -> bool:
    """Whether attention weights ``[query j, key i]`` have a forward transition with a uniform message.

    The joint law must be A_ij c_j/n, with c ≥ 0 and Σ_j A_ij c_j = 1 for every i.
    """
    _, left = nnls(backward.T, np.ones(len(backward)))
    return bool(left < 1e-8)


@claim(
    "E5",
    "Attention is one mixing step of IMM, read backwards",
    r"\mu_{i|j}=A_{ij}=\mathrm{softmax}_i\langle k_i,q_j\rangle=P(A{=}i\mid A'{=}j),\quad "
    r"h'_j=\sum_iA_{ij}W_vh_i",
    f"{FILTER}, equations 11 to 14",
    printed=r"P(A'{=}j\mid A{=}i)="
    r"\frac{e^{\langle\mu_i,\eta_j\rangle}}{\sum_{i'}e^{\langle\mu_{i'},\eta_j\rangle}}\,\tilde\sigma(A)",
)
def mixing(seed: int, *, tokens: Tokens = 6) -> Findings:
    """Attention is IMM's mixing step with tokens for modes, one linear map W_v and nothing observed. Its
    weights are normalised over where they come from: they are the backward transition P(A=i | A'=j), which
    the draft's equation 12 calls the forward one. A second correction: the message is not uniform. A forward
    transition needs P(A=i) = Σ_j A_ij P(A'=j), and with P(A) uniform that has a solution only if Ac = 1 for
    some c ≥ 0, which few heads have (E10). Unlike in IMM the weights depend on the states.

    Experiment:
        The mixing step with the filter's own arithmetic against attention; the same by the IMM filter with
        nothing observed, once with the message that belongs to the transition, once with the uniform one;
        sums of the weights both ways, and what the forward reading would make of the output. How many of 500
        random heads of 2, 3, 4 and 6 tokens have a forward transition with a uniform message.

    Example:
        >>> hidden, W = torch.randn(6, 4), torch.randn(3, 1, 4, 4)
        >>> step = xt.switching.attention_as_imm(hidden, *W)
        >>> q, k, v = (hidden @ w.mT for w in W)
        >>> print(torch.allclose(step.mean, xt.attend(q, k, v).output, atol=1e-5))
        True
    """
    h, W = normals(seed, (tokens, 3), (3, 1, 3, 3))
    step = attention_as_imm(h, *W)
    q, k, v = (h @ w.mT for w in W)
    seen = attend(q, k, v)
    scores = (q @ k.mT)[0] / 3**0.5  # [j, i]
    forward = torch.softmax(scores, 0)  # normalised over j for each token i, as a forward transition must be
    mixed = forward / forward.sum(1, keepdim=True)
    joint = (step.backward[0] * step.log_total[0].exp()[:, None]).mT
    joint = joint / joint.sum()

    def filtered(message: torch.Tensor) -> torch.Tensor:
        model = SwitchingLinearGaussian(
            transition=(joint / joint.sum(1, keepdim=True)).numpy(),
            dynamics=W[2, 0].numpy(),
            process_noise=1e-9 * np.eye(3),
            observation=np.eye(3),
            observation_noise=np.eye(3),
            initial_mean=h.numpy(),
            initial_covariance=np.stack([1e-9 * np.eye(3)] * tokens),
            initial_probability=message.numpy(),
        )
        return torch.from_numpy(model.filter(np.full((1, 3), np.nan), method="imm").mode_mean[0])

    uniform = torch.full((tokens,), 1 / tokens, dtype=h.dtype)
    moved = attention_as_imm(h + 0.5, *W).backward - step.backward
    out = v[0]
    yield same("mixing step against attention", step.mean, seen.output)
    yield same("log of the total against G − log n", step.log_total, seen.log_normalizer - math.log(tokens))
    yield same("IMM filter with the message of the transition", filtered(joint.sum(1)), step.mean[0], 1e-6)
    yield most("backward: Σ_i A_ij − 1", (step.backward.sum(-1) - 1).abs(), ROUNDING)
    yield most("as printed: Σ_j A_ij − 1", (step.backward.sum(-2) - 1).abs(), ROUNDING, "printed")
    yield same("as printed: output of the forward reading", mixed @ out, seen.output[0], role="printed")
    yield same(
        "as printed: IMM filter with a uniform message", filtered(uniform), step.mean[0], role="printed"
    )
    yield least("weights change with the states", moved.abs().max(), 1e-3, "guard")
    for n in (2, 3, 4, 6):
        q, k = normals(seed, (500, n, 3), (500, n, 3))
        share = np.mean([forward_exists(B) for B in torch.softmax(q @ k.mT, -1).numpy()])
        yield note(f"random heads of {n} tokens: share with a forward transition", share)
    yield dots("over i", range(tokens), step.backward[0].sum(-1))
    yield dots("over j, as printed", range(tokens), step.backward[0].sum(-2))
    yield axes("Attention weights summed over i (backward) and over j (forward)", "token", "sum")


@claim(
    "E6",
    "Attention that carries uncertainty",
    r"\Sigma'_j=\sum_iA_{ij}\big(W_v\Sigma_iW_v'+d_{ij}d_{ij}'\big),\quad d_{ij}=W_v\mu_i-h'_j",
    "beyond the drafts: what E5 leaves out",
)
def uncertainty(
    seed: int, *, tokens: Tokens = 6, draws: Annotated[int, Between(1000, 1_000_000)] = 40_000
) -> Findings:
    """Keeping covariances as well as means, the mixing step gives each token the covariance of the mixture:
    the mean of the mapped covariances plus the spread of the means.

    Experiment:
        `propagate` against the formula written out, and against the covariance of draws: a token by its
        weight, then its value. Differences in units of their standard error.

    Example:
        >>> x, S = torch.randn(6, 4), torch.eye(4).expand(6, 4, 4)
        >>> q = k = x[None]
        >>> mean, covariance = xt.attention.propagate(x, S, q, k, torch.eye(4)[None])
        >>> print(torch.allclose(mean, xt.attend(q, k, x[None]).output, atol=1e-5), covariance.shape)
        True torch.Size([1, 6, 4, 4])
    """
    mu, root, q, k, W = normals(seed, (tokens, 3), (tokens, 3, 3), (1, tokens, 3), (1, tokens, 3), (1, 3, 3))
    sigma = covariance_of(root)
    mean, covariance = propagate(mu, sigma, q, k, W)
    A = torch.softmax((q @ k.mT)[0] / 3**0.5, -1)
    value, pushed = mu @ W[0].mT, W[0] @ sigma @ W[0].mT
    d = value - (A @ value).unsqueeze(1)
    by_hand = torch.einsum("ji,ikl->jkl", A, pushed) + torch.einsum("ji,jik,jil->jkl", A, d, d)
    generator = torch.Generator().manual_seed(seed)
    which = torch.multinomial(A[0], draws, True, generator=generator)
    noise = torch.randn(draws, 3, 1, dtype=mu.dtype, generator=generator)
    drawn = (value[which] + (torch.linalg.cholesky(pushed)[which] @ noise)[..., 0]) - mean[0, 0]
    products = drawn.unsqueeze(-1) * drawn.unsqueeze(-2)
    error = (products.mean(0) - covariance[0, 0]).abs() / (products.std(0) / draws**0.5)
    within = torch.einsum("ji,ikl->jkl", A, pushed).diagonal(dim1=-2, dim2=-1).sum(-1)
    yield same("mean against attention", mean[0], A @ value)
    yield same("covariance against the formula", covariance[0], by_hand)
    yield most("covariance against draws, in standard errors", error, 5.0, "guard")
    yield bars("within tokens", range(tokens), within)
    yield dots("with the spread of means", range(tokens), by_hand.diagonal(dim1=-2, dim2=-1).sum(-1))
    yield axes("Variance of each token's output", "token", "trace")


@claim(
    "E8",
    "Exact Gibbs keeps its law; it is the skip connection that blows up",
    r"\eta\leftarrow f(\nabla G(\eta))=\eta,\qquad \eta\leftarrow\eta+f(\nabla G(\eta))=2\eta\quad"
    r"\text{with the exact link } f=\nabla G^*",
    f"{FILTER}, section 4.1",
    printed=r"\text{“… suggests the linear approximation to the link function causes blowup of the"
    r" normalization function”}",
)
def chains(
    seed: int,
    *,
    chains: Annotated[int, Between(50, 20000)] = 2000,
    coupling: Annotated[float, Between(0.05, 0.95)] = 0.6,
) -> Findings:
    """Alternating draws from exact conditionals keep the joint law. The draft blames the linear approximation
    of the link for the blow-up of attention with a skip connection. But with the exact link, too, the step
    η + f(∇G(η)) is 2η: the skip connection alone suffices. A linear link alone blows up where means are
    unbounded (counts), and does not where they are bounded (bits).

    Experiment:
        Two coupled Gaussian sites: the covariance of exact sweeps from the joint law, in standard errors.
        Four cells, link exact or linear, skip connection or none, on sites that are not Gaussian (bits and
        counts): the factor by which the largest |η| grows in three steps. The linear link is the best fit
        over the starts.

    Example:
        >>> eta = torch.tensor([[0.5]], dtype=torch.float64)
        >>> mean = xt.families.Poisson.from_natural(eta).mean_parameter
        >>> back = xt.families.Poisson.from_mean(mean).or_raise().natural_parameter
        >>> print(round(float(eta + back), 6))  # the exact link and the skip connection: twice η
        1.0
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    site = Gaussian(torch.zeros(1, dtype=torch.float64), one)
    joint = Joint({"eta": site, "mu": site}, {("eta", "mu"): coupling * one})
    law = torch.linalg.inv(torch.tensor([[1.0, -coupling], [-coupling, 1.0]], dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    begin = Gaussian(torch.zeros(2, dtype=torch.float64), law).sample((chains,), generator=generator)
    drawn = gibbs(
        joint, 20, chains=chains, start={"eta": begin[:, :1], "mu": begin[:, 1:]}, generator=generator
    )
    last = torch.cat([drawn["eta"][-1], drawn["mu"][-1]], -1)
    products = last.unsqueeze(-1) * last.unsqueeze(-2)
    error = (products.mean(0) - law).abs() / (products.std(0) / chains**0.5)
    yield most("exact sweeps: covariance, in standard errors", error, 5.0, "guard")
    start = 2 * torch.rand(40, 1, dtype=torch.float64, generator=generator) - 1
    for name, kind in (("bits", BernoulliProduct), ("counts", Poisson)):
        linear = fit_linear_link(kind.from_natural(start))
        exact = partial(_natural, kind)
        paths = {}
        for link, f in (("exact link", exact), ("linear link", linear)):
            for skip in (True, False):
                path = [start]
                for _ in range(3):
                    moved = f(kind.from_natural(path[-1]).mean_parameter)
                    path.append(path[-1] + moved if skip else moved)
                paths[link, skip] = path
        factor = {cell: float(path[-1].abs().max() / start.abs().max()) for cell, path in paths.items()}
        yield same(
            f"{name}, exact link, no skip: η after a step against η", paths["exact link", False][1], start
        )
        yield same(
            f"{name}, exact link, skip: η after a step against 2η", paths["exact link", True][1], 2 * start
        )
        yield note(f"{name}, linear link, no skip: growth in three steps", factor["linear link", False])
        yield note(f"{name}, linear link, skip: growth in three steps", factor["linear link", True])
        printed = f"{name}, as printed: growth in three steps with the exact link and skip"
        yield most(printed, factor["exact link", True], 2.0, "printed")
        for (link, skip), path in paths.items():
            sizes = [x.abs().max() for x in path]
            yield curve(f"{name}, {link}, {'skip' if skip else 'no skip'}", range(4), sizes)
    yield axes("Largest |η|: it is the skip connection that makes it grow", "step", "|η|", log_y=True)


def _natural(kind: type[BernoulliProduct] | type[Poisson], mean: torch.Tensor) -> torch.Tensor:
    """The exact canonical link: the natural parameter of a mean."""
    return kind.from_mean(mean).or_raise().natural_parameter


@claim(
    "G1",
    "Further errata of the draft on message passing",
    r"A_{ij}\propto e^{\langle H_jW_q,H_iW_k\rangle},\quad "
    r"P(\eta\mid\mu)\propto e^{\langle\eta,\mu\rangle-\nu G(\eta)},"
    r"\quad \mathrm E[X'\mid A']=\sum_iA_{ij}\!\int\!X'P(X'\mid X)P(X\mid A{=}i)",
    f"{FILTER}, equations 2, 5, 14 and 15; {FAMILY} (“contrastive divergence”)",
    printed=r"A_{ij}\propto e^{\langle H_jW_k,H_iW_q\rangle},\quad "
    r"P(\eta\mid\mu)\propto e^{\langle f(\eta),\mu\rangle},"
    r"\quad \ldots P(X'\mid X,A{=}i)\,P(X'\mid A{=}i)",
)
def errata(seed: int, *, tokens: Tokens = 6) -> Findings:
    """Equation 2 swaps W_q and W_k of equation 1. Equation 14 has P(X'|A) in place of P(X|A), and so does not
    give attention's mean. Equation 15's conjugate prior lacks −G(η), without which its integral is infinite.
    In equation 5 the last message is of X' given A', not A; and the draft on
    exponential families says "contrastive divergence", a way to train, where it means contrastive learning.

    Experiment:
        Attention by equation 1 against equation 2 as it is printed. A linear Gaussian state: the integral of
        equation 14 with either law, against W_v h. The prior of a Bernoulli law's η over growing intervals
        with −G and without. Errors of wording are not run.

    Example:
        >>> H, W_q, W_k = torch.randn(6, 3), torch.randn(3, 3), torch.randn(3, 3)
        >>> right, printed = (H @ W_q) @ (H @ W_k).mT, (H @ W_k) @ (H @ W_q).mT
        >>> print(torch.allclose(right.softmax(-1), printed.softmax(-1)))
        False
    """
    h, wq, wk = normals(seed, (tokens, 3), (3, 3), (3, 3))
    q, k = h @ wq, h @ wk
    seen = attend(q[None], k[None], h[None], scale=1.0).output[0]
    x = torch.linspace(-12, 12, 24_001, dtype=h.dtype)
    mean, w, gap = 1.5, 0.7, float(x[1] - x[0])
    arrives = (
        -((x - w * mean) ** 2) / (2 * (w**2 + 0.25))
    ).exp()  # the law of X' = wX + noise, X ~ N(mean, 1)
    twice = arrives * arrives  # P(X'|A) once from the integral over X, once as printed
    printed = float((x * twice).sum() * gap) / math.sqrt(2 * math.pi * (w**2 + 0.25)) ** 2
    right = float((x * arrives).sum() * gap) / math.sqrt(2 * math.pi * (w**2 + 0.25))

    def log_mass(reach: float, nu: float) -> float:
        eta = reach * torch.linspace(-1, 1, 20_001, dtype=h.dtype)
        weight = 0.8 * eta - nu * torch.nn.functional.softplus(eta)
        return float(torch.logsumexp(weight, 0)) + math.log(reach / 10_000)

    yield same("equation 1: queries from W_q", torch.softmax(q @ k.mT, -1) @ h, seen)
    yield same("as printed: equation 2", torch.softmax(k @ q.mT, -1) @ h, seen, role="printed")
    yield most("equation 14 with P(X|A): mean against W_v h", abs(right - w * mean), 1e-8)
    yield most("as printed: equation 14 with P(X'|A)", abs(printed - w * mean), 1e-8, "printed")
    yield most(
        "prior with −G: log of its integral to ±400 less that to ±200",
        log_mass(400, 2) - log_mass(200, 2),
        1e-6,
    )
    yield most("as printed: the same without −G", log_mass(400, 0) - log_mass(200, 0), 1e-6, "printed")
    for nu, label in ((2, "with −G"), (0, "as printed")):
        yield curve(label, (25, 50, 100, 200), [log_mass(reach, nu) for reach in (25, 50, 100, 200)])
    yield axes("Log of the prior's integral over [−r, r]", "r", "log integral")


@claim(
    "E9",
    "Sequential Monte Carlo on hybrid models",
    r"\hat Z=\prod_t\tfrac1N\sum_n w_t^{(n)},\qquad "
    r"p(y_{1:t})\approx\hat p\ \text{ by Rao–Blackwellised particles}",
    f"{POSTER}, future work",
)
def particles(seed: int, *, particles: Annotated[int, Between(16, 100_000)] = 1000) -> Findings:
    """On models with discrete and continuous parts, sequential Monte Carlo estimates the normalizer with its
    standard error; in a switching model particles carry modes only, and Kalman filters do the rest.

    Experiment:
        A class coupled to a Gaussian: log Z of SMC against the sum over classes, in standard errors. A
        random switching model: log-likelihood of the Rao–Blackwellised filter against the sum over all
        paths, with few and with many particles.

    Example:
        >>> h = xt.Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
        >>> joint = xt.sampling.Joint({"x": h}, bias={"x": torch.tensor([2.0], dtype=torch.float64)})
        >>> found = xt.sampling.smc(joint)
        >>> print(bool((found.log_evidence - 2.0).abs() < 5 * found.standard_error))
        True
    """
    logits, J, root, y = normals(seed, (3,), (3, 2), (2, 2), (6, 1))
    site, covariance = Categorical(logits), covariance_of(root)
    joint = Joint({"class": site, "x": Gaussian(torch.zeros(2).to(J), covariance)}, {("class", "x"): J})
    generator = torch.Generator().manual_seed(seed)
    found = smc(joint, particles=particles, generator=generator)
    truth = torch.logsumexp(logits.log_softmax(0) + ((J @ covariance) * J).sum(-1) / 2, 0)
    eye = np.eye(1)
    model = SwitchingLinearGaussian(
        transition=[[0.8, 0.2], [0.3, 0.7]],
        dynamics=[0.9 * eye, -0.5 * eye],
        process_noise=[0.3 * eye, eye],
        observation=eye,
        observation_noise=0.5 * eye,
        initial_mean=[[0.0], [1.0]],
        initial_covariance=[eye, eye],
        initial_probability=[0.5, 0.5],
    )
    exact = float(model.filter(y.numpy(), method="exact").log_likelihood)
    sizes = (20, 60, 200, particles)

    def error(n: int) -> float:
        post = model.filter(y.numpy(), method="rbpf", particles=n, generator=generator)
        return abs(float(post.log_likelihood) - exact)

    errors = [sum(error(n) for _ in range(8)) / 8 for n in sizes]
    apart = (found.log_evidence - truth).abs() / found.standard_error
    yield most("log Z of SMC, in standard errors", apart, 5.0, "measured")
    yield most(
        "log-likelihood of particles: error times √particles", errors[-1] * particles**0.5, 4.0, "measured"
    )
    yield note("log-likelihood of all particles: error", errors[-1])
    yield note("log-likelihood of 20 particles: error", errors[0])
    yield note("standard error of log Z", found.standard_error)
    yield dots("Rao–Blackwellised filter", sizes, errors)
    yield axes(
        "Error of the log-likelihood, mean of 8 runs", "particles", "error (nats)", log_x=True, log_y=True
    )
