r"""A8 to A14: kernel regression, conjugate duality, divergences, maximum entropy, expected statistics."""

from typing import Annotated

import torch
from torch import Tensor

from exptilt.claims.evidence import (
    ROUNDING,
    Findings,
    axes,
    curve,
    dots,
    least,
    most,
    normals,
    note,
    off,
    same,
)
from exptilt.claims.exponential_family import Dimensions, Points
from exptilt.claims.ledger import FAMILY, POSTER, TEMPLATE, Between, claim
from exptilt.families import Empirical, kl, maximum_entropy
from exptilt.tilting import attend


@claim(
    "A8",
    "Attention is kernel regression",
    r"\nabla G(q)=\frac{\sum_n e^{\langle q,k_n\rangle}v_n}{\sum_n e^{\langle q,k_n\rangle}},\quad "
    r"\text{Gaussian kernel: } \log h_n=-\tfrac12\|k_n\|^2",
    f"{FAMILY}, equation 7",
)
def kernel_regression(seed: int, *, points: Points = 60, dimensions: Dimensions = 4) -> Findings:
    """Attention is Nadaraya–Watson regression with the kernel e^⟨q,k⟩. It equals regression with a Gaussian
    kernel if all keys are equally long, or if keys carry the log-weight −‖k‖²/2, and not otherwise.

    Experiment:
        Regression with both kernels written out against attention: keys of length one, keys of any length
        with the weights, and keys of any length without.

    Example:
        >>> q, k, v = torch.randn(1, 3, 4), torch.randn(1, 60, 4), torch.randn(1, 60, 2)
        >>> w = torch.exp(-(torch.cdist(q, k) ** 2) / 2)
        >>> theirs = w @ v / w.sum(-1, keepdim=True)
        >>> ours = xt.attend(q, k, v, scale=1.0, log_weight=-k.square().sum(-1) / 2).output
        >>> print(torch.allclose(ours, theirs, atol=1e-5))
        True
    """
    q, k, v = normals(seed, (1, 8, dimensions), (1, points, dimensions), (1, points, 2))
    unit = torch.nn.functional.normalize(k, dim=-1)
    plain = (q @ k.mT).exp()

    def gaussian(keys: torch.Tensor) -> torch.Tensor:
        w = (-(q.unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(-1) / 2).exp()
        return w @ v / w.sum(-1, keepdim=True)

    weighted = attend(q, k, v, scale=1.0, log_weight=-k.square().sum(-1) / 2).output
    without = attend(q, k, v, scale=1.0).output
    spread = torch.linspace(0, 1, 11, dtype=torch.float64)
    apart = [
        off(attend(q, keys, v, scale=1.0).output, gaussian(keys))
        for s in spread
        for keys in (unit * k.norm(dim=-1, keepdim=True) ** s,)
    ]
    yield same("kernel e^<q,k>", without, plain @ v / plain.sum(-1, keepdim=True))
    yield same("Gaussian kernel, keys of one length", attend(q, unit, v, scale=1.0).output, gaussian(unit))
    yield same("Gaussian kernel, log-weights −‖k‖²/2", weighted, gaussian(k))
    yield same("Gaussian kernel, keys of any length", without, gaussian(k), role="reach")
    yield curve("", spread, apart)
    yield axes(
        "Without weights, unequal keys take attention away from Gaussian regression",
        "spread s of key lengths, ‖k‖^s",
        "largest difference",
    )


@claim(
    "A9",
    "Natural parameters and means are dual",
    r"G^*(m)=\sup_\eta\langle m,\eta\rangle-G(\eta),\quad \eta=\nabla G^*(m),\quad "
    r"\mathrm{H}=G(\eta)-\langle\eta,\nabla G(\eta)\rangle",
    f"{POSTER}, Information Geometry; {TEMPLATE}, section 2.3",
)
def duality(seed: int, *, points: Points = 40, dimensions: Dimensions = 4) -> Findings:
    """Each mean inside the hull belongs to one η, which is the gradient of the conjugate G* there. For
    counted points the entropy of the tilted measure is G(η) − ⟨η, ∇G(η)⟩, that is −G*.

    Experiment:
        From η to the mean and back; the gradient of G* by differences; the supremum against other η; the
        entropy against −Σ p log p.

    Example:
        >>> h = xt.Empirical(torch.randn(40, 4, dtype=torch.float64))
        >>> eta = torch.tensor([0.5, -0.2, 0.1, 0.3], dtype=torch.float64)
        >>> print(torch.allclose(h.natural(h.mean(eta)).or_raise(), eta, atol=1e-6))
        True
    """
    x, eta, others = normals(seed, (points + dimensions, dimensions), (dimensions,), (200, dimensions))
    h = Empirical(x)
    eta = eta / 2
    m = h.mean(eta)
    p = torch.softmax(x @ eta, 0)
    entropy = -(p * p.log()).sum()
    conjugate = h.conjugate(m)
    step = 1e-5 * torch.eye(dimensions, dtype=torch.float64)
    slope = (h.conjugate(m + step) - h.conjugate(m - step)) / 2e-5
    rivals = others @ m - h.log_normalizer(others)
    t = torch.linspace(-2, 2, 41, dtype=torch.float64)
    line = h.log_normalizer(t[:, None] * eta)
    yield same("η to its mean and back", h.natural(m).or_raise(), eta, 1e-6)
    yield same("∇G*(m), by differences, against η", slope, eta, 1e-6)
    yield most("G*(m) + G(η) − <m,η>", abs(conjugate + h.log_normalizer(eta) - m @ eta), 1e-8)
    yield most("largest <m,η'> − G(η') over others, less G*(m)", rivals - conjugate, 1e-9)
    yield most("entropy against G − <η,∇G>", abs(h.log_normalizer(eta) - eta @ m - entropy), ROUNDING)
    yield most("entropy of the tilted measure", abs(h.tilt(eta).entropy() - entropy), ROUNDING)
    yield curve("<m,tη> − G(tη)", t, (t * (m @ eta) - line))
    yield curve("−entropy", t, [float(-entropy)] * len(t))
    yield axes("<m,tη> − G(tη) is largest at t = 1, where it is G*(m)", "t", "")


@claim(
    "A10",
    "The Bregman divergence of G is KL, arguments swapped",
    r"B_G(\eta_1,\eta_2)=\mathrm{KL}(p_{\eta_2}\|p_{\eta_1}),\quad B_{G^*}(m_1,m_2)=\mathrm{KL}(p_1\|p_2)",
    f"{POSTER}, Information Geometry",
    printed=r"B_G(\eta_1,\eta_2)=\mathrm{KL}(p_{\eta_1}\|p_{\eta_2}),\quad "
    r"B_{G^*}(m_1,m_2)=\mathrm{KL}(p_2\|p_1)",
)
def bregman(seed: int, *, points: Points = 40, dimensions: Dimensions = 4) -> Findings:
    """With the usual B_G(a,b) = G(a) − G(b) − ⟨∇G(b), a−b⟩, the divergence of G at η₁, η₂ is that of p₂ from
    p₁, and the divergence of G* at the means is that of p₁ from p₂. The poster has both orders swapped.

    Experiment:
        Both divergences against Σ p log p/q written out, in both orders, for random pairs.

    Example:
        >>> h = xt.Empirical(torch.randn(40, 4))
        >>> a, b = torch.randn(4), torch.randn(4)
        >>> right, printed = xt.kl(h.tilt(b), h.tilt(a)), xt.kl(h.tilt(a), h.tilt(b))
        >>> print(abs(h.bregman(a, b) - right.value) < 1e-4, abs(h.bregman(a, b) - printed.value) > 1e-2)
        tensor(True) tensor(True)
    """
    x, a, b = normals(seed, (points, dimensions), (12, dimensions), (12, dimensions))
    h = Empirical(x)
    p, q = torch.softmax(a @ x.mT, -1), torch.softmax(b @ x.mT, -1)
    forward, backward = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    found = h.bregman(a, b)
    mean_a, mean_b = h.mean(a), h.mean(b)
    dual = h.conjugate(mean_a) - h.conjugate(mean_b) - (b * (mean_a - mean_b)).sum(-1)
    library = torch.stack([kl(h.tilt(v), h.tilt(u)).value for u, v in zip(a, b, strict=True)])
    yield same("B_G(η₁,η₂) − KL(p₂‖p₁)", found, backward, 1e-9)
    yield same("B_G* at the means − KL(p₁‖p₂)", dual, forward, 1e-6)
    yield same("the library's kl(p₂, p₁)", library, backward, 1e-9)
    yield same("as printed: B_G(η₁,η₂) − KL(p₁‖p₂)", found, forward, 1e-9, "printed")
    yield same("as printed: B_G* at the means − KL(p₂‖p₁)", dual, backward, 1e-6, "printed")
    yield dots("KL(p₂‖p₁)", found, backward)
    yield dots("KL(p₁‖p₂), as printed", found, forward)
    yield curve("equal", [0.0, float(found.max())], [0.0, float(found.max())])
    yield axes("B_G against both orders of KL: on the line for KL(p₂‖p₁)", "B_G(η₁,η₂)", "KL")


@claim(
    "A11",
    "Log-sum-exp is dual to maximum entropy",
    r"\min_x\log\sum_i e^{(Ax+b)_i}=\max_\nu\,\langle b,\nu\rangle-\sum_i\nu_i\log\nu_i"
    r"\ \text{ s.t. } \mathbf 1'\nu=1,\ A'\nu=0,\ \nu\ge 0",
    f"{POSTER}, Why Optimize log Z?; {TEMPLATE}, section 2.3",
)
def entropy(
    seed: int,
    *,
    outcomes: Annotated[int, Between(4, 2000)] = 30,
    constraints: Annotated[int, Between(1, 16)] = 3,
) -> Findings:
    """Minimising log Σ exp y_i with y = Ax + b has as its dual the largest entropy (relative to e^b) under
    the constraints A'ν = 0; the gap is zero and ν = softmax(y*). So the law of maximum entropy under mean
    constraints is the tilted measure.

    Experiment:
        The library's solution: the gap, the constraints, ν against softmax(Ax* + b); and laws that keep the
        constraints but differ from ν, none of which may have more entropy.

    Example:
        >>> A = torch.randn(30, 3, dtype=torch.float64)
        >>> found = xt.maximum_entropy(A - A.mean(0)).value
        >>> print(
        ...     float(found.gap.abs()) < 1e-9, float((found.probability @ (A - A.mean(0))).abs().max()) < 1e-8
        ... )
        True True
    """
    A, b, moves = normals(seed, (outcomes, constraints), (outcomes,), (200, outcomes))
    A = A - A.mean(0)
    solution = maximum_entropy(A, b)
    found = solution.value
    nu = found.probability
    # Directions that keep Σν and A'ν, scaled so that ν stays positive.
    basis = torch.linalg.qr(torch.cat([A, torch.ones(outcomes, 1, dtype=A.dtype)], 1)).Q
    moves = moves - moves @ basis @ basis.mT
    room = (nu / moves.abs()).amin(-1, keepdim=True)
    sizes = torch.linspace(-0.9, 0.9, 37, dtype=A.dtype)
    rivals = nu + sizes[:, None, None] * room * moves
    value = (rivals * b - torch.special.xlogy(rivals, rivals)).sum(-1)
    optimum = (nu * b - torch.special.xlogy(nu, nu)).sum()
    yield most("duality gap", found.gap.abs(), 1e-9)
    yield most("constraints A'ν", (nu @ A).abs(), 1e-8)
    yield same("ν against softmax(Ax* + b)", nu, torch.softmax(A @ found.multiplier + b, 0), 1e-9)
    least_sum = torch.logsumexp(A @ found.multiplier + b, 0)
    yield most("primal against the sum", abs(found.primal - least_sum), 1e-9)
    yield most("entropy of other laws, less that of ν", value - optimum, 1e-12)
    yield from (curve("" if i else "other laws", sizes, value[:, i]) for i in range(12))
    yield axes("Entropy along directions that keep the constraints", "how far from ν", "<b,ν> + H(ν)")


@claim(
    "A12",
    "G is a tight bound: the Gibbs variational principle",
    r"G(\eta)=\max_q\ \mathrm{E}_q[\langle u,\eta\rangle]+\mathrm{H}(q)",
    f"{TEMPLATE}, section 2.3",
)
def gibbs(seed: int, *, points: Points = 40, dimensions: Dimensions = 4) -> Findings:
    """The log-normalizer is minus the least free energy: over all laws q on the points, E_q⟨u,η⟩ + H(q) is
    at most G, and equals it for the attention weights alone. With a latent variable z and u = log p(x,z) the
    same is the ELBO: log p(x) is the log-normalizer. A wake step (the model fitted to q) never lowers it; a
    sleep step (q fitted to the model's own draws) brings q to the posterior, where it is tight.

    Experiment:
        Many random laws and the attention weights; the shortfall of each against KL(q‖p). A model of a latent
        and an observed class with random tables: its ELBO against log p(x) less KL, a wake step and a sleep
        step in closed form.

    Example:
        >>> x, eta = torch.randn(40, 4), torch.randn(4)
        >>> h, q = xt.Empirical(x), torch.softmax(torch.randn(40), 0)
        >>> print(bool(q @ x @ eta - (q * q.log()).sum() < h.log_normalizer(eta)))
        True
    """
    x, eta, logits = normals(seed, (points, dimensions), (dimensions,), (300, points))
    h = Empirical(x)
    G = h.log_normalizer(eta)
    p = h.tilt(eta).log_weight.log_softmax(-1)
    mix = torch.linspace(0, 1, 300, dtype=torch.float64)[:, None]
    log_q = ((1 - mix) * p + mix * 2 * logits).log_softmax(-1)
    q = log_q.exp()
    value = q @ (x @ eta) - (q * log_q).sum(-1)
    gap = (q * (log_q - p)).sum(-1)
    yield most("E_q<u,η> + H(q) − G over all q", value - G, ROUNDING)
    yield most("at the attention weights, less G", abs(value[0] - G), ROUNDING)
    yield same("shortfall against KL(q‖p)", G - value, gap)
    yield least("KL of the others", gap[1:], 0.0)
    latent, data, guess = normals(seed, (5, 7), (7,), (5, 7))
    joint, weight = latent.flatten().softmax(0).view(5, 7), data.softmax(0)  # p(z,x), and how often x is seen
    q = guess.softmax(0)

    def elbo(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (weight * (q * (p.log() - q.log())).sum(0)).sum()

    posterior = joint / joint.sum(0)
    evidence, short = weight @ joint.sum(0).log(), weight @ (q * (q / posterior).log()).sum(0)
    yield same("latent classes: ELBO against log p(x) − KL(q‖posterior)", elbo(joint, q), evidence - short)
    yield least("latent classes: rise of the ELBO in a wake step", elbo(q * weight, q) - elbo(joint, q), 0.0)
    yield same("latent classes: ELBO after a sleep step against log p(x)", elbo(joint, posterior), evidence)
    yield dots("laws q", gap, value)
    yield curve("G", [0.0, float(gap.max())], [float(G)] * 2)
    yield axes("The bound, and how far laws fall below it", "KL(q‖p)", "E_q<u,η> + H(q)")


@claim(
    "A13",
    "Sums of exponentials go with unnormalised KL",
    r"\sum_j h_j e^{s_j}=\max_{m\ge0}\langle s,m\rangle-D(m\|h)+\sum_j h_j,\quad "
    r"D(m\|h)=\sum_j m_j\log\tfrac{m_j}{h_j}-m_j+h_j",
    f"{TEMPLATE}, section 2.3",
)
def unnormalised(seed: int, *, points: Points = 30, dimensions: Dimensions = 3) -> Findings:
    """The sum of exponentials, which is AdaBoost's loss, is to the KL divergence of unnormalised measures
    what the log-sum-exp is to that of laws: its conjugate, and the source of its Bregman divergence. A round
    of AdaBoost tilts the masses of the examples: it projects them, in D, onto the masses under which the rule
    of the round is no better than chance.

    Experiment:
        The maximum over masses m at m = h e^s and around it; the Bregman divergence of M = e^G against D of
        the two tilted measures. Twenty rounds of AdaBoost with stumps on random points: the loss against the
        product of √(1−γ²), γ the edges; the edge of a rule after its round; Pythagoras for D.

    Example:
        >>> x, a, b = (torch.randn(*size, dtype=torch.float64) for size in ((30, 3), (3,), (3,)))
        >>> h, p, q = xt.Empirical(x), (x @ b).exp(), (x @ a).exp()
        >>> bregman = q.sum() - p.sum() - p.sum() * h.mean(b) @ (a - b)  # of M = e^G, the sum of exponentials
        >>> print(torch.allclose(bregman, (p * (p / q).log() - p + q).sum()))
        True
    """
    x, a, b, moves = normals(seed, (points, dimensions), (8, dimensions), (8, dimensions), (300, points))
    h = Empirical(x)
    one = torch.ones(points, dtype=x.dtype)
    best = (x @ a[0]).exp()
    masses = best * (moves * torch.linspace(0, 1, 300, dtype=x.dtype)[:, None]).exp()
    value = masses @ (x @ a[0]) - _unnormalized_kl(masses, one) + points
    M = h.log_normalizer(a[0]).exp()
    D = _unnormalized_kl((b @ x.mT).exp(), (a @ x.mT).exp())
    distance = (masses - best).norm(dim=-1)
    yield most("maximum against Σ e^s", abs(value[0] / M - 1), ROUNDING)
    yield most("other masses, less the maximum", value[1:] / M - 1, ROUNDING)
    yield most("Bregman divergence of M against D", (_bregman_of_mass(h, a, b) / D - 1).abs(), 1e-9)
    yield from _boosting(seed)
    yield dots("masses m", distance, value)
    yield curve("Σ h e^s", [0.0, float(distance.max())], [float(M)] * 2)
    yield axes("<s,m> − D(m‖h) + Σh over masses m", "distance of m from h e^s", "")


def _unnormalized_kl(p: Tensor, q: Tensor) -> Tensor:
    """D(p‖q) = Σ_j p_j log(p_j/q_j) − p_j + q_j of positive masses ``(..., N)``."""
    return (p * (p / q).log() - p + q).sum(-1)


def _bregman_of_mass(h: Empirical, a: Tensor, b: Tensor) -> Tensor:
    """M(a) − M(b) − ⟨∇M(b), a − b⟩ for the mass M = e^G of tilted points."""
    at_a, at_b = h.log_normalizer(a).exp(), h.log_normalizer(b).exp()
    return at_a - at_b - at_b * (h.mean(b) * (a - b)).sum(-1)


def _boosting(seed: int, rounds: int = 20) -> Findings:
    """Checks of twenty rounds of AdaBoost."""
    (x,) = normals(seed, (200, 4))
    label = (x[:, 0] * x[:, 1] + x[:, 2]).sign()
    cuts = torch.linspace(-1.5, 1.5, 13, dtype=x.dtype)
    rules = ((x[:, :, None] > cuts).double() * 2 - 1).flatten(1) * label[:, None]  # +1 where a stump is right
    mass, loss, left = torch.ones(200, dtype=x.dtype), 200.0, 0.0
    gaps = []
    for _ in range(rounds):
        edges = mass @ rules / mass.sum()
        best = int(edges.abs().argmax())
        gamma = edges[best]
        new = mass * (-torch.atanh(gamma) * rules[:, best]).exp()
        loss *= float((1 - gamma**2).sqrt())
        other = mass * (1 + 0.5 * torch.cos(torch.arange(200.0).to(x)))
        other = other * torch.where(
            rules[:, best] > 0,
            1 / (other @ (rules[:, best] > 0).double()),
            1 / (other @ (rules[:, best] < 0).double()),
        )  # masses under which the rule has no edge either
        before, after = _unnormalized_kl(other, mass), _unnormalized_kl(other, new)
        gaps.append(abs(float(before - after - _unnormalized_kl(new, mass))))
        left = max(left, abs(float(new @ rules[:, best])))
        mass = new
    yield most(
        "AdaBoost: loss over the product of √(1−γ²), less 1", abs(float(mass.sum()) / loss - 1), ROUNDING
    )
    yield most("AdaBoost: edge of a rule after its round", left, ROUNDING * 200)
    yield most("AdaBoost: D(m‖before) − D(m‖after) − D(after‖before)", max(gaps), 1e-8)
    yield note("AdaBoost: loss after 20 rounds, over that at the start", float(mass.sum()) / 200)


@claim(
    "A14",
    "Keys as expected statistics: a distribution of distributions",
    r"e^{\langle q_i,k_j\rangle}=e^{\langle q_i,\nabla G(q_j)\rangle}\ \ (k_j=\nabla G(q_j)),\quad "
    r"\langle q,k_j\rangle=G(q)+G^*(k_j)-\mathrm{KL}(p_j\|p_q)",
    f"{POSTER}, Information Geometry",
)
def members(
    seed: int, *, states: Annotated[int, Between(2, 200)] = 20, dimensions: Dimensions = 4
) -> Findings:
    """Hidden states are members of a family, known by natural parameter or by expected statistic. Attention
    whose keys are expected statistics weighs each state by its KL divergence from the member whose natural
    parameter is the query. With natural parameters as keys, the arguments of KL are swapped.

    Experiment:
        States as tilts of a measure of random points. Scores against G + G* − KL, KL written out, for keys
        of both kinds; and, with G* subtracted from the scores, weights against those of e^−KL alone.

    Example:
        >>> points, eta, q = (torch.randn(n, 4, dtype=torch.float64) for n in (50, 20, 1))
        >>> h, q = xt.Empirical(points), q[0]
        >>> k, kl = h.mean(eta), h.bregman(q, eta)  # keys as expected statistics; KL(p_j ‖ p_q)
        >>> print(torch.allclose(k @ q, h.log_normalizer(q) + h.conjugate(k) - kl))
        True
    """
    x, eta, q = normals(seed, (50, dimensions), (states, dimensions), (dimensions,))
    h = Empirical(x)
    p, at = torch.log_softmax(eta @ x.mT, -1), torch.log_softmax(x @ q, 0)
    to, back = (p.exp() * (p - at)).sum(-1), (at.exp() * (at - p)).sum(-1)
    keys, m = h.mean(eta), h.mean(q)
    conjugates = (eta * keys).sum(-1) - h.log_normalizer(eta)
    score = keys @ q
    by_kl = torch.softmax(score - conjugates, 0)
    yield same("k_j against ∇G(q_j)", keys, torch.softmax(eta @ x.mT, -1) @ x)
    yield same("<q,k_j> against G + G* − KL", score, h.log_normalizer(q) + conjugates - to, 1e-9)
    by_natural = h.log_normalizer(eta) + (q @ m - h.log_normalizer(q)) - back
    yield same("<η_j,m> against G + G* − KL", eta @ m, by_natural, 1e-9)
    yield same("weights by divergence against e^−KL", by_kl, torch.softmax(-to, 0), 1e-9)
    yield dots("attention, −G* taken off", to, by_kl)
    yield dots("attention", to, torch.softmax(score, 0))
    yield axes("Without G*, attention falls with KL alone", "KL(p_j‖p_q)", "weight", log_y=True)
