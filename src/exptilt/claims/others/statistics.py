"""H5 to H9: results of others about softmax, single keys, families and posteriors."""

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from exptilt.claims.evidence import Findings, axes, curve, dots, least, most, normals, note, same
from exptilt.claims.exponential_family import Dimensions, Points
from exptilt.claims.ledger import Between, claim
from exptilt.claims.others import posterior
from exptilt.families import BernoulliProduct, Gaussian, kl
from exptilt.taylor import score_skewness
from exptilt.tilting import attend


@claim(
    "H5",
    "Entropy falls with β by β Var(s)",
    r"\frac{dH}{d\beta}=-\beta\,\mathrm{Var}(s),\qquad "
    r"\frac{d^2H}{d\beta^2}=-(\mathrm{Var}(s)+\beta\kappa_3(s))",
    "arXiv 2603.06875",
)
def entropy(seed: int, *, points: Points = 64, dimensions: Dimensions = 8) -> Findings:
    """As β grows, the entropy of attention falls at the rate β times the variance of the scores; the second
    derivative brings in their third cumulant, and where it is 0 the entropy has its inflection.

    Experiment:
        Entropy, variance and `score_skewness` of attention at many β, and two derivatives by automatic
        differentiation; the second also by differences against cumulants written out; the inflection.

    Example:
        >>> q, k = torch.randn(1, 1, 8), torch.randn(1, 64, 8)
        >>> beta = torch.tensor(0.7, requires_grad=True)
        >>> seen = xt.attend(beta * q, k, k, scale=1.0)
        >>> (slope,) = torch.autograd.grad(seen.entropy.sum(), beta)
        >>> print(torch.allclose(slope, -seen.score_variance.sum() / beta, rtol=1e-3))
        True
    """
    q, k = normals(seed, (1, 1, dimensions), (1, points, dimensions))
    s = (q @ k.mT)[0, 0]
    betas = torch.linspace(0.05, 3, 60, dtype=s.dtype)

    def moments(beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p = torch.softmax(beta * s, 0)
        away = s - p @ s
        return -(p * p.log()).sum(), p @ away**2, p @ away**3

    wrong, bent, second, entropies = 0.0, 0.0, 0.0, []
    for beta in betas:
        b = beta.clone().requires_grad_()
        seen = attend(b * q, k, k, scale=1.0)
        (slope,) = torch.autograd.grad(seen.entropy.sum(), b, create_graph=True)
        (bend,) = torch.autograd.grad(slope, b)
        skew = score_skewness(beta * q, k, scale=1.0, standardized=False).sum() / beta**2  # of βs, so β κ₃
        bent = max(bent, float((bend + seen.score_variance.detach().sum() / beta**2 + skew).abs()))
        H, variance, third = moments(beta)
        wrong = max(wrong, float((slope.detach() + beta * variance).abs()))
        ends = [-(beta + d) * moments(beta + d)[1] for d in (1e-5, -1e-5)]
        second = max(second, float(((ends[0] - ends[1]) / 2e-5 + variance + beta * third).abs()))
        entropies.append(float(H))
    bends = np.diff(entropies, 2)
    yield most("dH/dβ of `attend` against −β Var", wrong, 1e-9)
    yield most("d²H/dβ² of `attend` against its variance and `score_skewness`", bent, 1e-9)
    yield most("d²H/dβ² against −(Var + βκ₃)", second, EXACT_DIFFERENCES)
    yield note("β of the inflection", float(betas[1 + int((bends > 0).argmax())]))
    yield curve("", betas, entropies)
    yield axes("Entropy of attention", "β", "nats")


EXACT_DIFFERENCES = 1e-6  # of a derivative by differences of 1e-5 in float64


@claim(
    "H6",
    "Softmax is ½-Lipschitz in every norm",
    r"\|\sigma(x)-\sigma(y)\|_p\le\tfrac12\|x-y\|_p",
    "arXiv 2510.23012",
)
def lipschitz(seed: int, *, entries: Annotated[int, Between(2, 1000)] = 20) -> Findings:
    """In any ℓ_p norm, two softmaxes differ by at most half the difference of their scores; at two equal
    scores the slope is ½.

    Experiment:
        Pairs of scores at many distances, p = 1, 1.5, 2, 3 and ∞: the largest ratio. The slope at two equal
        scores.

    Example:
        >>> x, y = torch.randn(20), torch.randn(20)
        >>> print(bool((x.softmax(0) - y.softmax(0)).norm() <= 0.5 * (x - y).norm()))
        True
    """
    x, move, sizes = normals(seed, (4000, entries), (4000, entries), (4000, 1))
    sharp = x * (3 * sizes).exp().clamp(max=30)
    # Directions that move two entries against each other, where the largest slopes are.
    pair = torch.nn.functional.one_hot(x.topk(2).indices, entries).double()
    for p in (1.0, 1.5, 2.0, 3.0, math.inf):
        largest = 0.0
        for start, step in (
            (sharp, move),
            (x, 0.01 * (pair[:, 0] - pair[:, 1])),
            (x.sign() * 0, 0.01 * move),
        ):
            apart = torch.linalg.vector_norm(
                torch.softmax(start + step, -1) - torch.softmax(start, -1), p, -1
            )
            largest = max(largest, float((apart / torch.linalg.vector_norm(step, p, -1)).max()))
        yield most(f"ℓ_{p:g}: largest ratio less ½", largest - 0.5, 0.0, signed=True)
    two = torch.tensor([[1e-4, -1e-4]], dtype=torch.float64)
    reached = (two.softmax(-1) - 0.5).norm() / two.norm()
    yield most("two equal scores: slope less ½", (reached - 0.5).abs(), 1e-6)
    line = torch.linspace(-6, 6, 61, dtype=torch.float64)
    yield curve("two scores", line, 2 * line.sigmoid() * (1 - line.sigmoid()))
    yield axes(
        "Slope of softmax over two scores: ½ where they are equal", "difference of the scores", "slope"
    )


@claim(
    "H7",
    "A small trained transformer has the posterior of a hidden Markov model",
    r"\mathrm{KL}\big(P(y_{t+1}\mid y_{1:t})\,\|\,\text{transformer}\big)\approx10^{-3}\ \text{bit}",
    "arXiv 2512.22471",
    question=True,
    seeds=1,
)
def hidden_chain(seed: int) -> Findings:
    """Small transformers trained on draws of a hidden Markov model are said to predict as its exact posterior
    does, to 10⁻³ or 10⁻⁴ of a bit. The exact posterior is that of `xt.switching`: a model whose modes emit
    symbols, which GPB2 filters exactly.

    Experiment:
        Two layers trained to predict the next of three symbols of a chain with two hidden states; its
        predictions on new sequences against those of the library's filter: the mean divergence in bits,
        beside that of the same model before training, and of one that knows the frequencies of pairs alone.
        The weights come with the package; `examples/train_small_models.py` trains again.

    Example:
        >>> from exptilt.claims.others.posterior import draws, exact
        >>> print(exact(draws(5, torch.Generator())).shape)
        torch.Size([5, 31, 3])
    """
    model, before, history = posterior.models()
    symbols = posterior.draws(1000, torch.Generator().manual_seed(seed + 2))
    truth = posterior.exact(symbols)
    pairs = torch.stack([truth[symbols[:, :-1] == y].mean(0) for y in range(3)])[symbols[:, :-1]]
    bits, untrained, by_pairs = (
        posterior.divergence(truth, said)
        for said in (*(posterior.predicted(one, symbols) for one in (model, before)), pairs.log())
    )
    yield most("divergence from the exact posterior, in bits", bits, 1e-3, "measured")
    yield most("the same, over that of pair frequencies", bits / by_pairs, 0.1, "measured")
    yield least("before training: divergence in bits", untrained, 1e-2, "guard")
    yield note("pair frequencies: divergence in bits", by_pairs)
    yield note("training steps", history["steps"][-1])
    yield curve("transformer", history["steps"], history["bits"])
    yield axes("Divergence from the exact posterior", "training step", "bits", log_y=True)


@claim(
    "H8",
    "Removing a key moves the output by p/(1−p) (o − v)",
    r"o_{-j}-o=\frac{p_j}{1-p_j}(o-v_j)",
    "arXiv 2504.14051",
)
def removal(seed: int, *, points: Points = 30, dimensions: Dimensions = 4) -> Findings:
    """The output without key j follows from the full output and the weight and value of the key.

    Experiment:
        Attention over the other keys, for every key left out, against the formula.

    Example:
        >>> q, k, v = torch.randn(1, 1, 4), torch.randn(1, 30, 4), torch.randn(1, 30, 2)
        >>> p = torch.softmax(q @ k.mT / 2, -1)[0, 0]
        >>> o = xt.attend(q, k, v).output[0, 0]
        >>> less = xt.attend(q, k[:, 1:], v[:, 1:]).output[0, 0]
        >>> print(torch.allclose(less - o, p[0] / (1 - p[0]) * (o - v[0, 0]), atol=1e-5))
        True
    """
    q, k, v = normals(seed, (1, 3, dimensions), (1, points, dimensions), (1, points, 2))
    o = attend(q, k, v).output[0]
    p = torch.softmax(q[0] @ k[0].mT / dimensions**0.5, -1)
    formula = o[:, None] + (p / (1 - p))[..., None] * (o[:, None] - v)
    keep = [[i for i in range(points) if i != j] for j in range(points)]
    again = torch.stack([attend(q, k[:, some], v[:, some]).output[0] for some in keep], 1)
    yield same("attention over the other keys against the formula", again, formula)
    yield dots("", p.flatten(), (again - o[:, None]).norm(dim=-1).flatten())
    yield axes(
        "How far the output moves without a key", "weight of the key", "distance", log_x=True, log_y=True
    )


@claim(
    "H9",
    "One head is Bayes for log-linear classes; one metric serves Gaussians, not Bernoulli laws",
    r"P(c\mid x)=\mathrm{softmax}_c\big(\langle\eta_c,u(x)\rangle-G(\eta_c)\big),\qquad "
    r"\mathrm{KL}(p_i\|p_j)=\tfrac12(\mu_i-\mu_j)'\Sigma^{-1}(\mu_i-\mu_j)",
    "“Attention Implements the Fisher Geometry of Exponential Families”, ICML 2026",
)
def fisher(seed: int, *, classes: Annotated[int, Between(3, 60)] = 12) -> Findings:
    """Over classes that are members of one family, the posterior is attention with the natural parameters for
    keys and −G for log-weights. For Gaussians of one covariance the divergence of any two is one quadratic
    form; for Bernoulli laws no quadratic form fits all pairs.

    Experiment:
        Posterior of random classes by densities against `attend`; the best quadratic form for the
        divergences of all pairs, and its residual.

    Example:
        >>> eta, x = torch.randn(5, 3), torch.randint(0, 2, (3,)).float()
        >>> laws = xt.families.BernoulliProduct.from_natural(eta)
        >>> logits = eta @ x - torch.nn.functional.softplus(eta).sum(-1)
        >>> print(torch.allclose(laws.log_prob(x).softmax(0), logits.softmax(0), atol=1e-5))
        True
    """
    eta, means, root = normals(seed, (classes, 3), (classes, 3), (3, 3))
    laws = BernoulliProduct.from_natural(1.5 * eta)
    x = (torch.rand(20, 3, generator=torch.Generator().manual_seed(seed)) < 0.5).double()
    theta = laws.natural_parameter
    G = torch.nn.functional.softplus(theta).sum(-1)
    eye = torch.eye(classes, dtype=x.dtype)
    head = attend(x[None], theta[None], eye[None], scale=1.0, log_weight=-G[None]).output[0]
    by_density = laws.log_prob(x[:, None]).softmax(-1)
    covariance = root @ root.mT / 3 + 0.3 * torch.eye(3, dtype=x.dtype)
    cases = {
        "Gaussians": (Gaussian(means, covariance.expand(classes, 3, 3)), means),
        "Bernoulli laws": (laws, theta),
    }
    yield same("posterior by `attend` against densities", head, by_density)
    for name, (members, place) in cases.items():
        pairs = [(i, j) for i in range(classes) for j in range(classes) if i != j]
        gaps = torch.stack([place[i] - place[j] for i, j in pairs])
        divergence = torch.stack([kl(members[i], members[j]).value for i, j in pairs])
        design = (gaps[:, :, None] * gaps[:, None, :]).flatten(1)
        fitted = design @ torch.linalg.lstsq(design, divergence, driver="gelsd").solution
        left = float((divergence - fitted).norm() / divergence.norm())
        if name == "Gaussians":
            yield most("Gaussians: what one quadratic form leaves of the divergences", left, 1e-9)
        else:
            yield least("Bernoulli laws: the same", left, 0.05, "guard")
        yield dots(name, divergence, fitted)
    top = float(divergence.max())
    yield curve("equal", [0.0, top], [0.0, top])
    yield axes("Divergence of pairs, and the best quadratic form", "KL", "quadratic form")
