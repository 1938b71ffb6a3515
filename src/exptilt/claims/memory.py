"""C1 to C4 and C6: modern and classical Hopfield networks, and their relation to attention."""

import math
from typing import Annotated, Any

import torch
from torch.nn.functional import normalize

from exptilt.claims.evidence import ROUNDING, Findings, axes, curve, dots, least, most, normals, note, same
from exptilt.claims.experiments.capacity import storage_capacity
from exptilt.claims.experiments.cliff import classical_cliff
from exptilt.claims.experiments.equivalence import boltzmann_check, linear_attention_check
from exptilt.claims.exponential_family import Dimensions, Points
from exptilt.claims.ledger import APPENDIX, POSTER, Between, claim
from exptilt.claims.models import crossing
from exptilt.dynamics import Flow, Sphere
from exptilt.families import Empirical, VonMisesFisher
from exptilt.memory import Hopfield, retrieval_error_bound, storage_bound


@claim(
    "C1",
    "The Hopfield update is attention, and lowers its energy",
    r"E(\xi)=-\beta^{-1}\log\sum_n e^{\beta\langle x_n,\xi\rangle}+\tfrac12\langle\xi,\xi\rangle+c,"
    r"\quad \xi\leftarrow\sum_n\mathrm{softmax}_n(\beta\langle x_n,\xi\rangle)\,x_n",
    f"{APPENDIX}, on the quadratic term; {POSTER}, comparison",
)
def energy(
    seed: int,
    *,
    patterns: Points = 24,
    dimensions: Dimensions = 6,
    beta: Annotated[float, Between(0.01, 50)] = 2.0,
) -> Findings:
    """The modern Hopfield energy is −G/β plus ½⟨ξ,ξ⟩; its concave–convex step is attention over the patterns
    and never raises the energy. The quadratic term keeps ∫ e^−βE dξ finite and plays the part of the skip
    connection: ξ − ∇E is the update. With ⟨ξ,ξ⟩ in place of ½⟨ξ,ξ⟩, the same step can raise the energy.

    Experiment:
        Energy and step against formulas written out; the change of energy over 25 steps from many starts;
        ξ − ∇E against the step; the partition function in one dimension over growing intervals, with and
        without the quadratic term.

    Example:
        >>> memory, state = xt.memory.Hopfield(torch.randn(24, 6), beta=2.0), torch.randn(100, 6)
        >>> print(bool((memory.energy(memory.step(state)) <= memory.energy(state) + 1e-5).all()))
        True
    """
    x, states = normals(seed, (patterns, dimensions), (200, dimensions))
    memory, states = Hopfield(x, beta), 2 * states
    largest = x.square().sum(-1).max()
    constant = (math.log(patterns)) / beta + largest / 2
    by_hand = -torch.logsumexp(beta * states @ x.mT, -1) / beta + states.square().sum(-1) / 2 + constant
    start = states.clone().requires_grad_()
    (slope,) = torch.autograd.grad(memory.energy(start).sum(), start)
    path = [memory.energy(states)]
    state, doubled = states, [path[0] + states.square().sum(-1) / 2]
    for _ in range(25):
        state = memory.step(state)
        path.append(memory.energy(state))
        doubled.append(path[-1] + state.square().sum(-1) / 2)
    rises, without = torch.stack(path).diff(dim=0), torch.stack(doubled).diff(dim=0)
    line = torch.linspace(-1, 1, 20_001, dtype=x.dtype)[:, None]

    def log_mass(reach: float, quadratic: float) -> float:
        at = reach * line
        raised = torch.logsumexp(beta * at @ x[:, :1].mT, -1) - beta * quadratic * at[:, 0].square()
        return float(torch.logsumexp(raised, 0) + math.log(reach / 10_000))

    yield same("energy against its formula", memory.energy(states), by_hand)
    yield same("step against the sum", memory.step(states), torch.softmax(beta * states @ x.mT, -1) @ x)
    yield same("ξ − ∇E against the step", states - slope, memory.step(states))
    yield most("largest rise of the energy in a step", rises, 1e-12)
    yield most(
        "log ∫ e^−βE over [−160, 160] less that over [−80, 80]", log_mass(160, 0.5) - log_mass(80, 0.5), 1e-6
    )
    yield least("the same without ½<ξ,ξ>", log_mass(160, 0.0) - log_mass(80, 0.0), 1.0, "guard")
    yield note("with <ξ,ξ> for its half: largest rise", without)
    yield from (curve("", range(26), torch.stack(path)[:, i]) for i in range(4))
    yield axes("Energy of four states, step by step", "step", "E")


@claim(
    "C2",
    "Separated patterns are retrieved in one step; capacity grows exponentially",
    r"\text{error}\le 2(N-1)M e^{-\beta(\Delta_i-2rM)},\quad N\ge\sqrt p\,c^{(d-1)/4},\quad "
    r"c=3.1546,\ 1.3718;\quad \text{classical: } 0.138\,N",
    f"{APPENDIX}, on exponential storage capacity",
    seeds=2,
)
def capacity(
    seed: int,
    *,
    units: Annotated[int, Between(100, 4000)] = 400,
    most_patterns: Annotated[int, Between(16, 65536)] = 1024,
    noise: Annotated[float, Between(0, 0.5)] = 0.2,
) -> Findings:
    """One step retrieves a separated pattern up to an exponentially small error. From noisy cues, random
    patterns are recalled in a number that grows exponentially with the dimension, and not like a power of
    it; in these dimensions the theorem promises less than one pattern. A classical network forgets all
    patterns at a load of about 0.138. If β is too small to tell patterns apart, their average is retrieved.

    Experiment:
        The constants of the theorem, to the printed digits; one step from patterns against its bound. The
        largest number N of random patterns that are all recalled from cues a fifth of their length away, in
        4 to 19 dimensions: the slope of log N in d, its 95 % interval over draws, and the squares left by a
        power of d over those left by an exponential (below 1 if growth is like a power). Recall of a Hebbian
        network at loads of 0.10 and 0.22; the fixed point at a small β against the mean of all patterns.

    Example:
        >>> print(round(xt.memory.storage_bound(20, radius=3.0).base, 4))
        3.1546
    """
    c20, c75 = storage_bound(20, radius=3.0).base, storage_bound(75).base
    (x,) = normals(seed, (32, 16))
    x = 4 * torch.nn.functional.normalize(x, dim=-1)
    memory = Hopfield(x, 1.0)
    distance = (memory.step(x) - x).norm(dim=-1)
    bound = retrieval_error_bound(
        memory.separation(), torch.zeros(32, dtype=x.dtype), count=32, beta=1.0, size=4.0
    )
    found = storage_capacity([4, 7, 10, 13, 16, 19], noise=noise, seeds=3, most=most_patterns, seed=seed)
    cliff = classical_cliff((0.10, 0.22), units=units, seeds=1, seed=seed)
    blurred = Hopfield(x, 0.01).retrieve(x).value
    rate, low, high = found.exponent
    d = list(found.dimensions)
    yield least("c for β = 1, K = 3, d = 20, less the printed 3.1546", c20 - 3.1546, 0.0)
    yield least("c for β = 1, K = 1, d = 75, less the printed 1.3718", c75 - 1.3718, 0.0)
    yield most(
        "the same two: largest distance from what is printed", max(c20 - 3.1546, c75 - 1.3718), 1e-4, "guard"
    )
    yield most("error of one step, less its bound", distance - bound, 0.0, signed=True)
    yield least("exponent of N in d: lower end of its 95 % interval", low, 0.0, "measured", signed=True)
    yield least(
        "squares left by a power of d over those by an exponential", found.against_polynomial, 1.0, "measured"
    )
    yield least("classical, load 0.10: share recalled", cliff.mean[0], 0.9, "measured")
    yield most("classical, load 0.22: share recalled", cliff.mean[1], 0.5, "measured")
    yield same("small β: fixed point against the mean", blurred, x.mean(0).expand_as(x), 0.1, "measured")
    yield note("exponent of N in d", rate)
    yield note("upper end of its 95 % interval", high)
    yield note("patterns recalled in 19 dimensions", found.mean[-1])
    yield note("patterns promised by the theorem there", found.bounds[-1].count)
    yield dots("measured", d, found.mean)
    yield curve("promised", d, [b.count for b in found.bounds])
    yield axes("Random patterns that are all recalled from noisy cues", "dimension", "patterns", log_y=True)


@claim(
    "C3",
    "Patterns held still retrieve; patterns that move merge",
    r"\text{cross-attention: } \xi\leftarrow\mathrm{RN}(\xi+\nabla G_x(\xi))\ \ (x\text{ fixed});\quad "
    r"\text{self-attention: } x\leftarrow\mathrm{RN}(x+\nabla G_x(x))",
    f"{APPENDIX}, first paragraphs; {POSTER}, comparison",
)
def moving(
    seed: int,
    *,
    patterns: Annotated[int, Between(4, 200)] = 16,
    dimensions: Annotated[int, Between(2, 64)] = 12,
    beta: Annotated[float, Between(0.1, 50)] = 8.0,
    steps: Annotated[int, Between(10, 20000)] = 1000,
) -> Findings:
    """Hopfield's theory holds patterns still, as cross-attention does. In self-attention the patterns are the
    states. The step is the same for both; with patterns held still, states stay at least as far apart.
    Whether a state stays with its own pattern depends on β, dimension and number of patterns, and is
    measured. In a trained encoder–decoder no layer of the decoder moves the patterns that its cross-attention
    reads, and a head recalls the pattern of the next digit in one Hopfield step; before training it does not.

    Experiment:
        Patterns on the sphere, and states near them. The same flow with patterns held still and with
        patterns that move along: how many states can still be told apart at the end (the effective number of
        clusters), and how many are with their pattern. A transformer that reverses strings of digits: in its
        best head of cross-attention, how often one step from the query, with the keys as patterns, is
        nearest to the pattern of the digit to be written. The weights come with the package;
        `examples/train_small_models.py` trains again.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(16, 8, dtype=torch.float64), dim=-1)
        >>> fixed = xt.dynamics.Flow("sphere", beta=8.0, patterns=x).run(x, 500, progress=False).last
        >>> moving = xt.dynamics.Flow("sphere", beta=8.0).run(x, 500, progress=False).last
        >>> print(bool(torch.pdist(moving).mean() < torch.pdist(fixed).mean()))
        True
    """
    x, noise = normals(seed, (patterns, dimensions), (patterns, dimensions))
    sphere = Sphere()
    x = sphere(x)
    start = sphere(x + 0.1 * noise)
    keep = max(1, steps // 40)
    still = Flow("sphere", beta=beta, patterns=x).run(
        start, steps, measure_every=keep, keep="last", progress=False
    )
    free = Flow("sphere", beta=beta).run(start, steps, measure_every=keep, keep="last", progress=False)
    step = Flow(None, beta=beta, patterns=x)(start) - start
    stayed = ((still.last @ x.mT).argmax(-1) == torch.arange(patterns)).double()
    held, moved = (float(path.clusters.effective[-1]) for path in (still, free))
    yield same("the flow's step against Hopfield's", step, Hopfield(x, beta).step(start))
    yield least("states told apart: held still over moving", held / moved, 0.99, "measured")
    model, before = (crossing.measured(untrained, seed) for untrained in (False, True))
    yield least("encoder–decoder: share of digits written right", model["right"], 0.99, "guard")
    yield most("cross-attention: change of patterns between the decoder's layers", model["still"], 0.0)
    yield least("cross-attention: share of patterns recalled in one step", model["recall"], 0.9, "measured")
    yield most("the same before training", before["recall"], 0.5, "guard")
    yield note("cross-attention: weight on the pattern that is due", model["weight"])
    yield note("self-attention: change of patterns between layers, over their size", model["moves"])
    yield note("held still: share with the pattern they began at", stayed.mean())
    yield note("held still: states told apart, over patterns", held / patterns)
    yield note("moving: states told apart, over patterns", moved / patterns)
    yield curve("patterns held still", still.steps, still.clusters.effective)
    yield curve("patterns moving", free.steps, free.clusters.effective)
    yield axes("States that can be told apart", "step", "effective clusters")


@claim(
    "C4",
    "Linear attention, classical Hopfield network and Boltzmann machine are one",
    r"-\log\int e^{-E(\sigma,h)}dh=\beta\Big(E_{\mathrm{Hebb}}(\sigma)-\tfrac P2\Big)-\tfrac P2\log 2\pi,"
    r"\quad \sum_\mu\langle x^\mu,\sigma\rangle x^\mu-P\sigma=N W\sigma",
    f"{APPENDIX}, last paragraph but one",
)
def classical(
    seed: int, *, patterns: Annotated[int, Between(1, 64)] = 5, units: Annotated[int, Between(2, 400)] = 24
) -> Findings:
    """Attention without its exponential, less a diagonal, is a step of the classical Hopfield network; and
    that network is a restricted Boltzmann machine whose Gaussian hidden units have been integrated out.

    Experiment:
        Random patterns of ±1. Free energy by numerical integration over the hidden units against the
        Hebbian energy; a step of linear attention against one of the network.

    Example:
        >>> x = torch.randint(0, 2, (9, 12)) * 2 - 1
        >>> from exptilt.claims.experiments.equivalence import boltzmann_check, linear_attention_check
        >>> print(boltzmann_check(x[:5], x[5:]).gap < 1e-10, linear_attention_check(x[:5], x[5:]).gap < 1e-10)
        True True
    """
    generator = torch.Generator().manual_seed(seed)
    x, s = (torch.randint(0, 2, (n, units), generator=generator).double() * 2 - 1 for n in (patterns, 40))
    machine, linear = boltzmann_check(x, s, beta=0.7), linear_attention_check(x, s)
    yield most("free energy against the Hebbian energy", machine.gap, 1e-10)
    yield most("linear attention against the network", linear.gap, 1e-10)
    yield least("spread of the energies", machine.right.std(), 0.01, "guard")
    yield dots("", machine.right, machine.left)
    yield axes(
        "Integrated over hidden units, and by Hebb's weights", "β(E − P/2) − (P/2) log 2π", "−log ∫ e^−E dh"
    )


@claim(
    "C6",
    "Attention is a mean-field step of spins that take keys as values",
    r"\log Z\ge F(\eta)=\sum_s\big(G(\eta_s)-\langle\eta_s-b_s,m_s\rangle\big)"
    r"+\tfrac12\sum_{sr}J_{sr}\langle m_s,m_r\rangle,\quad m_s=\nabla G(\eta_s):\quad "
    r"\nabla F=0\iff\eta=b+Jm",
    f"{APPENDIX} (“McBal's mean-field approximation interpretation of transformers”: the draft gives the "
    "name, the equations are ours)",
)
def mean_field(
    seed: int, *, keys: Annotated[int, Between(3, 6)] = 5, dimensions: Annotated[int, Between(1, 8)] = 2
) -> Findings:
    """Spins that are coupled by J, each with a measure h of its own, have a mean-field law: a product of
    tilted h. Its bound on log Z is stationary where the parameter of each spin is its own input plus a mix of
    the others' means, η = b + Jm, with m = ∇G(η). If the values of a spin are keys, ∇G is attention with the
    query b + Jm, and b plays the skip connection; if they are the points of a circle, ∇G is a norm. Updates
    of one spin at a time never lower the bound. Updates of all spins at once, as in a layer, can. Attention
    weights used as couplings are not symmetric, so they have no such bound.

    Experiment:
        Four spins whose values are random keys, log Z by enumeration, and four on a circle, by quadrature,
        with random symmetric couplings: the gradient of the bound by autograd against its formula, a step
        against attention written out and against a norm, the bound over 30 rounds. Then 30 rounds of all
        spins at once, with couplings that repel.

    Example:
        >>> keys, mixed = torch.randn(5, 2), torch.randn(4, 2)  # mixed: b + Jm
        >>> step = xt.attend(mixed[None], keys[None], keys[None], scale=1.0).output[0]
        >>> print(bool(torch.allclose(step, xt.Empirical(keys).mean(mixed), atol=1e-6)))
        True
    """
    x, root, b, start = normals(seed, (keys, dimensions), (4, 4), (4, 2), (4, 2))
    b, start = (torch.cat([given] * dimensions, -1)[:, :dimensions] for given in (b, start))
    J = (root + root.mT) / 4
    J.fill_diagonal_(0.0)
    angles = torch.arange(16, dtype=torch.float64) * (math.pi / 8)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    pick = torch.tensor([0, 1 % dimensions])
    kinds: dict[str, tuple[Any, torch.Tensor, float, torch.Tensor, torch.Tensor]] = {
        "keys": (Empirical(x), x, 0.0, b, start),
        "circle": (VonMisesFisher(circle[0] * 0), circle, -math.log(16), b[:, pick], start[:, pick]),
    }
    for name, (h, values, weight, own, eta) in kinds.items():

        def bound(
            eta: torch.Tensor, J: torch.Tensor = J, h: Any = h, own: torch.Tensor = own
        ) -> torch.Tensor:
            m = h.mean(eta)
            total: torch.Tensor = (h.log_normalizer(eta) + ((own - eta) * m + (J @ m) * m / 2).sum(-1)).sum()
            return total

        every = values[torch.cartesian_prod(*[torch.arange(len(values))] * 4)]
        log_z = torch.logsumexp(((own * every) + (J @ every) * every / 2).sum((-2, -1)) + 4 * weight, 0)
        at = eta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(bound(at), at)
        mixed = own + J @ h.mean(eta)
        wanted = (h.covariance(eta) @ (mixed - eta)[..., None])[..., 0]
        yield same(f"{name}: gradient of the bound against Cov (b + Jm − η)", slope, wanted)
        if name == "keys":
            by_hand = torch.softmax(mixed @ x.mT, -1) @ x
            yield same("keys: a step against attention written out", h.mean(mixed), by_hand)
        else:
            yield same(
                "circle: direction of a step against a norm", normalize(h.mean(mixed)), normalize(mixed)
            )
        one, path = eta.clone(), [bound(eta)]
        for n in range(120):
            one[n % 4] = own[n % 4] + J[n % 4] @ h.mean(one)
            path.append(bound(one))
        rounds = torch.stack(path)
        yield most(f"{name}: the bound above log Z", rounds.max() - log_z, ROUNDING, signed=True)
        yield least(
            f"{name}: least change of the bound, one spin at a time",
            rounds.diff().min(),
            -ROUNDING,
            signed=True,
        )
        yield note(f"{name}: what 30 rounds leave of η = b + Jm", (own + J @ h.mean(one) - one).abs())
        yield least(f"{name}: rise of the bound", rounds[-1] - rounds[0], 1e-3, "guard")
        repel = 6 * (torch.eye(4, dtype=J.dtype) - 1)
        together, fall = eta, [bound(eta, repel)]
        for _ in range(30):
            together = own + repel @ h.mean(together)
            fall.append(bound(together, repel))
        least_change = torch.stack(fall).diff().min()
        yield least(
            f"{name}: least change of the bound, all spins at once",
            least_change,
            -ROUNDING,
            "reach",
            signed=True,
        )
        yield curve(f"{name}: one spin at a time", range(31), (log_z - rounds[::4]).clamp_min(1e-12))
    A = torch.softmax(b @ b.mT, -1)
    yield most("attention weights as couplings: asymmetry", (A - A.mT).norm() / A.norm(), ROUNDING, "reach")
    yield axes("How far the mean-field bound is below log Z", "round", "nats", log_y=True)
