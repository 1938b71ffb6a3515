"""A15, C5, E7, E10, F1 to F3, F6 and F7: questions to trained transformers.

The bounds for a yes were written down first, in ``kept/predictions.json``. Every number is also measured on
the same model with random weights: one that passes there too says nothing about training, and does not count.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from exptilt.claims.evidence import (
    Check,
    Findings,
    Picture,
    axes,
    covariance_of,
    dots,
    least,
    most,
    normals,
    note,
    same,
)
from exptilt.claims.ledger import APPENDIX, FILTER, MODEL, POSTER, Between, claim
from exptilt.claims.models import subjects
from exptilt.claims.models.subjects import WINDOWS, Profile
from exptilt.families import BernoulliProduct, Gaussian, Poisson, fit_linear_link

Tokens = Annotated[int, Between(128, 100_000)]
Numbers = dict[str, float]
Answer = Callable[[Profile, Profile], Numbers]
ASKED = ("A15", "C5", "E7", "E10", "F1", "F2", "F3", "F6", "F7")  # the ids of the questions below
FEATURES = "head, from the first layer to the last"
_ANSWERS: dict[str, Answer] = {}


@cache
def predictions() -> dict[str, Any]:
    """The bounds and expectations of every question, with their date and the models looked at before."""
    found: dict[str, Any] = json.loads(
        (Path(__file__).parent / "kept" / "predictions.json").read_text("utf-8")
    )
    return found


def asked(
    id: str,
    title: str,
    formula: str,
    source: str,
    *,
    picture: Picture,
    shown: str,
    more: Callable[[str, int, int], Iterator[Check]] | None = None,
) -> Callable[[Answer], Answer]:
    """Register the function below as the answer to a question of the drafts; it takes the profiles of a model
    and of its control.

    Args:
        id: as for `claim`.
        title: as for `claim`.
        formula: as for `claim`.
        source: as for `claim`.
        picture: the axes of its picture.
        shown: name of the number, by head or by layer, that the picture shows.
        more: further checks, from a model's name, how many tokens it reads, and a seed.
    """

    def register(answer: Answer) -> Answer:
        def experiment(seed: int, *, model: str = MODEL, tokens: Tokens = 512) -> Findings:
            trained, random = (subjects.profile(model, kind, tokens, seed) for kind in ("trained", "random"))
            yield from judged(id, trained, random)
            yield from () if model != MODEL else elsewhere(id)
            yield from () if more is None else more(model, tokens, seed)
            for one in (trained, random):
                y = one.head(shown) if shown in one.heads else one.layer(shown)
                if shown == "forward":
                    y = np.array([one.value(f"forward_{n}") for n in WINDOWS])
                yield dots(one.weights, WINDOWS if shown == "forward" else range(len(y)), y)
            yield picture

        experiment.__doc__ = answer.__doc__
        _ANSWERS[id] = answer
        claim(id, title, formula, source, question=True, seeds=1)(experiment)
        return answer

    return register


def judged(id: str, trained: Profile, random: Profile) -> Iterator[Check]:
    """Checks of a trained model's numbers against the bounds; the control's numbers are notes."""
    answer = _ANSWERS[id]
    found, control = answer(trained, random), answer(random, random)
    bounds = predictions()["bounds"][id]
    for key, bound in bounds.items():
        wide = {"most": bound.get("most", np.inf), "least": bound.get("least", -np.inf)}
        one, other = (
            Check(bound["text"], (value[key],), role="measured", signed=True, **wide)
            for value in (found, control)
        )
        if np.isnan(one.mean):
            continue  # this model has no such number
        blind = one.passed and other.passed
        yield (
            one._replace(role="note", name=f"{one.name} (random weights pass too: says nothing)")
            if blind
            else one
        )
        yield note(f"random weights: {bound['text']}", control[key], signed=True)
    for key, value in found.items():
        if key not in bounds and not np.isnan(value):
            yield note(key, value, signed=True)


def elsewhere(id: str) -> Iterator[Check]:
    """Share of models measured after the bounds were set that keep all bounds, from the kept profiles."""
    pairs = _kept_pairs()
    checks = [list(judged(id, *pair)) for m, pair in pairs.items() if m not in predictions()["seen"]]
    needed = [sum(c.role == "measured" and c.passed for c in some) for some in checks]
    asked = [sum(bool(c.bound) and c.role in ("measured", "note") for c in some) for some in checks]
    kept = [a == b > 0 for a, b in zip(needed, asked, strict=True)]
    text = (
        "other models, asked after the bounds were set: share that keep every bound, and random weights not"
    )
    yield least(text, float(np.mean(kept)), 1.0, "measured")


def _kept_pairs() -> dict[str, tuple[Profile, Profile]]:
    """Kept profiles by model: as trained, and with random weights."""
    found = {(one.model, one.weights): one for one in subjects.kept()}
    return {m: (one, found[m, "random"]) for (m, weights), one in found.items() if weights == "trained"}


def columns(id: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of all measured models: numbers as trained, and with random weights."""
    bounds = predictions()["bounds"][id]
    pairs = _kept_pairs()
    answers = {m: (_ANSWERS[id](t, r), _ANSWERS[id](r, r)) for m, (t, r) in pairs.items()}
    rows = []
    for key, bound in bounds.items():
        limit = f"at most {bound['most']:g}" if "most" in bound else f"at least {bound['least']:g}"
        cells = [f"{t[key]:.3g} ({r[key]:.3g})" if not np.isnan(t[key]) else "–" for t, r in answers.values()]
        rows.append([bound["text"], limit, bound["expect"], *cells])
    return ["number (random weights in brackets)", "a yes needs", "expected", *pairs], rows


def _z(value: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Numbers of heads in standard deviations of those of random weights."""
    scores: np.ndarray = (value - control.mean()) / control.std()
    return scores


@asked(
    "A15",
    "Is Z nearly constant over contexts?",
    r"Z(c)=\sum_w e^{\langle v_w,c\rangle}\approx\mathrm{const}",
    f"{APPENDIX}, on Arora's random walk of language",
    picture=axes("How log Z of a head varies over queries", FEATURES, "nats", log_y=True),
    shown="log_normalizer_variation",
)
def constant(one: Profile, random: Profile) -> Numbers:
    """In the random-walk theory of language that the drafts cite, the normalizer Z, a sum over the
    vocabulary, is nearly the same for all contexts. In a trained model it can be measured: at the output
    softmax, of which the theory speaks, and in the heads beside it.

    Experiment:
        The standard deviation over the contexts of a text of log Z of the output softmax, where a model has
        one; and for each head over its queries, log of the number of visible keys taken off. Nearly constant
        would be a quarter of a nat or less. A check that random weights pass too does not count; a trained
        model that fails it does.

    Example:
        >>> found = xt.claims.find("A15").run({"tokens": 128})
        >>> print(found.checks[0].name)
        output softmax: standard deviation of log Z over contexts
    """
    spread = one.head("log_normalizer_variation")
    return {
        "vocabulary_sd": one.value("vocabulary_sd"),
        "head_sd": float(spread.mean()),
        "head_share": float((spread <= 0.25).mean()) if np.isfinite(spread).all() else np.nan,
        "the steadiest head": float(spread.min()),
    }


def _links(model: str, tokens: int, seed: int) -> Iterator[Check]:
    means, root, other = normals(seed, (80, 3), (3, 3), (200, 2))
    covariance = covariance_of(root)
    exact = fit_linear_link(Gaussian(means, covariance))
    yield same("Gaussians: matrix against Σ⁻¹", exact.matrix, torch.linalg.inv(covariance), 1e-8)
    yield most("Gaussians: error of the attention weights", exact.worst_weight_error, 1e-8)
    yield least("Gaussians: least eigenvalue", exact.least_eigenvalue, 0.0)
    yield most("Gaussians: asymmetry", exact.asymmetry, 1e-9)
    for name, kind in (("Poisson", Poisson), ("Bernoulli", BernoulliProduct)):
        yield note(f"{name} laws: R² of a linear link", fit_linear_link(kind.from_natural(other)).r_squared)


@asked(
    "E7",
    "Are W_q and W_k a linear canonical link?",
    r"e^{\langle f(\eta_i),\mu_j\rangle}\approx e^{\langle\mu_iW_q,\mu_jW_k\rangle},\quad f=\nabla G^*:\ "
    r"W_qW_k'\text{ symmetric, positive definite}",
    f"{FILTER}, equation 15",
    picture=axes("Symmetric part of W_q W_k', a half for random matrices", FEATURES, "share"),
    shown="symmetry",
    more=_links,
)
def link(one: Profile, random: Profile) -> Numbers:
    """The drafts conjecture that the query and key matrices stand for the canonical link f = ∇G*, as a linear
    approximation. For Gaussians of one covariance that is exact, with the matrix Σ⁻¹; for other families it
    is not. For any gradient map of a convex function the matrix must be symmetric and positive definite,
    which can be tested in trained heads layer by layer: the average over all layers hides that the first
    layers are less symmetric than chance, and the last ones more.

    Experiment:
        Linear fits of the exact link of Gaussians, Poisson and Bernoulli laws. In every head the part of
        W_q W_k' that is symmetric and the part that is positive, in standard deviations over random weights,
        and over W_q with the W_k of other heads; and how well a linear map takes mean keys to their queries.

    Example:
        >>> law = xt.Gaussian(torch.randn(60, 2), torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        >>> print(round(xt.families.fit_linear_link(law).r_squared, 4))
        1.0
    """
    z, positive = (_z(one.head(name), random.head(name)) for name in ("symmetry", "definiteness"))
    by_layer = np.array_split(z, 3)  # heads lie in the order of the layers
    return {
        "symmetry_share": float((z > 4).mean()),
        "definiteness_share": float((positive > 4).mean()),
        "symmetry_last": float(by_layer[-1].mean()),
        "link_r2": float(np.median(one.head("link_r2"))),
        "first third of the layers: symmetric part, standard deviations above random weights": float(
            by_layer[0].mean()
        ),
        "share of heads less symmetric than random weights, by 4 standard deviations": float((z < -4).mean()),
        "symmetric part against other heads' W_k, in standard deviations, mean": float(
            one.head("symmetry_z").mean()
        ),
        "positive part against other heads' W_k, in standard deviations, mean": float(
            one.head("definiteness_z").mean()
        ),
    }


@asked(
    "E10",
    "Do heads have a forward transition with a uniform message?",
    r"Ac=\mathbf 1,\ c\ge0\ \text{ has a solution}\iff "
    r"\exists\,P(A'\mid A):\ P(A{=}i\mid A'{=}j)=A_{ij},\ P(A)=1/M",
    f"{FILTER}, equation 12 and the note below it (“σ(A) = 1/M”)",
    picture=axes("Heads that have a forward transition with a uniform message", "tokens", "share"),
    shown="forward",
)
def forward(one: Profile, random: Profile) -> Numbers:
    """E5 corrects the draft twice: attention is the backward transition, and with a uniform message there may
    be no forward one at all. There is one if Ac = 1 has a solution c ≥ 0, c/M being the law of the next mode.
    Of random matrices, half have one at two tokens, and hardly any at six.

    Experiment:
        Attention weights of every head on twenty windows of 2, 3, 4 and 6 tokens: the share in which
        non-negative least squares solve Ac = 1.

    Example:
        >>> from exptilt.claims.mixing import forward_exists
        >>> A = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).numpy()  # rows: P(A | A'), one for each A'
        >>> print(forward_exists(A), forward_exists(A[[0, 0]]))
        True False
    """
    return {f"forward_{n}": one.value(f"forward_{n}") for n in WINDOWS}


@asked(
    "C5",
    "Is the MLP a classical Hopfield layer?",
    r"x\leftarrow x+W_{\mathrm{out}}\,\sigma(W_{\mathrm{in}}x),\quad "
    r"W_{\mathrm{out}}\propto W_{\mathrm{in}}'\,?",
    f"{APPENDIX} (“Perhaps the FC layer … can be seen as original Hopfield network layers”)",
    picture=axes("W_out along W_in', against permuted neurons", "layer", "standard deviations"),
    shown="tied_z",
)
def fully_connected(one: Profile, random: Profile) -> Numbers:
    """A Hopfield network recalls by W'σ(Wx): what a neuron reads is what it writes. An MLP would be such a
    layer if W_out were W_in' up to scale. Then its step climbs an energy; untied, it need not.

    Experiment:
        For every MLP the inner product of W_out and W_in', less that with the neurons of one permuted, in its
        standard deviations over permutations. Ties from training would be far above 0.

    Example:
        >>> W = torch.randn(64, 16)
        >>> print(bool((W * W).sum() > 10 * (W[torch.randperm(64)] * W).sum().abs()))
        True
    """
    tied = one.layer("tied_z")
    return {
        "tied_share": float((tied > 4).mean()),
        "tied_mean": float(tied.mean()),
        "share of MLPs that write against what they read, by 4 standard deviations": float(
            (tied < -4).mean()
        ),
    }


def _hidden_over_training(model: str, tokens: int, seed: int) -> Iterator[Check]:
    far = {step: found[0] for step, found in subjects.over_training(model, seed).items()}
    if far:
        first, *_, last = far.values()
        yield most(
            "training: distance from a Gaussian at its end over its start", last / first, 1.0, "measured"
        )
    yield from (note(f"step {step}: distance from a Gaussian", value) for step, value in far.items())


@asked(
    "F1",
    "Are hidden states Gaussian, over layers and training?",
    r"\eta\sim\mathcal N\,?\quad\text{by layer}",
    f"{POSTER}, future work",
    picture=axes("Excess kurtosis of hidden states (0 for a Gaussian)", "layer", "excess kurtosis"),
    shown="kurtosis",
    more=_hidden_over_training,
)
def hidden(one: Profile, random: Profile) -> Numbers:
    """If the equilibrium of the drafts described transformers, hidden states would be near a Gaussian, and
    nearer than those of random weights. Tails and tests of Gaussianity say how near they are at each layer,
    and, where there are checkpoints, whether training brings them nearer.

    Experiment:
        A sample of hidden states after each layer: excess kurtosis, sliced Anderson–Darling tests corrected
        for their number, norms. At steps 0, 256, 1024 and 4096 of the model that comes with the package, the
        Anderson–Darling statistic of 2,048 tokens, mean of layers: step 0 is the control.

    Example:
        >>> found = xt.claims.find("F1").run({"tokens": 128})
        >>> print([line.label for line in found.picture.lines])
        ['trained', 'random']
    """
    kurtosis, norm = np.abs(one.layer("kurtosis")), one.layer("hidden_norm")
    return {
        "kurtosis": float(kurtosis.max()),
        "gaussian_p": float(one.layer("gaussian_p").max()),
        "length of a hidden state, last place over first": float(norm[-1] / norm[0]),
    }


@asked(
    "F2",
    "Do keys look Gaussian to their queries, at least locally?",
    r"G(q)\approx\log N+\langle m,q\rangle+\tfrac12q'Cq",
    f"{POSTER}, future work (“local gaussian approximations”)",
    picture=axes("Relative error of the output from two moments of the 16 nearest keys", FEATURES, "error"),
    shown="local_gaussian_output_error",
)
def local(one: Profile, random: Profile) -> Numbers:
    """If the keys of a head were Gaussian to its queries, their first two moments would predict G. The drafts
    suggest that this holds locally, "in the spirit of local linear embeddings" (for the embedding itself, see
    F7). Where scores are small, as with random weights, any keys look Gaussian: the control passes every
    bound, and a trained head only says something where it fails one.

    Experiment:
        R² of the second-order prediction of G over the queries of a text, from all visible keys and from
        the 16 nearest to where the query attends; the relative error of the output likewise.

    Example:
        >>> found = xt.claims.find("F2").run({"tokens": 128})
        >>> print(any("random weights" in check.name for check in found.checks))
        True
    """
    names = ("gaussian_r2", "local_gaussian_r2", "gaussian_output_error", "local_gaussian_output_error")
    keys = ("all_r2", "local_r2", "all_error", "local_error")
    return {key: float(np.median(one.head(name))) for key, name in zip(keys, names, strict=True)}


@asked(
    "F7",
    "Are keys mixes of their neighbours, as in a local linear embedding?",
    r"k_i\approx\sum_{j\in\text{16 nearest}}w_{ij}k_j,\qquad\sum_jw_{ij}=1",
    f"{POSTER}, future work (“in the spirit of local linear embeddings”)",
    picture=axes("What neighbours leave of a key, over the same for Gaussian keys", FEATURES, "ratio"),
    shown="mixed",
)
def embedded(one: Profile, random: Profile) -> Numbers:
    """A local linear embedding describes each point as an affine mix of its nearest neighbours. Keys that lie
    on a smooth surface are explained better by their neighbours than Gaussian keys of the same covariance
    are, and if training makes that surface, better than with random weights. Keys from a newly drawn W_k on
    the same hidden states show how much of the effect is due to the heads.

    Experiment:
        Each of 256 keys of every head as the best affine mix of its 16 nearest; what that leaves of their
        variance, over the same for Gaussian draws of the same mean and covariance. Heads as trained are
        compared with those of random weights.

    Example:
        >>> found = xt.claims.find("F7").run({"tokens": 128})
        >>> print([line.label for line in found.picture.lines])
        ['trained', 'random']
    """
    mixed, control = one.head("mixed"), random.head("mixed")
    return {
        "mixed_share": float((_z(mixed, control) < -4).mean()),
        "mixed_ratio": float(np.median(mixed) / np.median(control)),
        "what the 16 nearest leave of a key, over the same for Gaussian keys, median": float(
            np.median(mixed)
        ),
    }


def _alignment_over_training(model: str, tokens: int, seed: int) -> Iterator[Check]:
    along = {step: found[1] for step, found in subjects.over_training(model, seed).items()}
    if along:
        first, *_, last = along.values()
        text = "training: share of heads whose W_v W_o is along W_k W_q', 4 standard deviations above step 0"
        yield least(text, float((_z(last, first) > 4).mean()), 0.5, "measured")
    for step, value in along.items():
        yield note(f"step {step}: cosine of W_v W_o and W_k W_q', mean of heads", value.mean(), signed=True)


@asked(
    "F3",
    "Does a head climb its own G?",
    r"\cos\big(\text{write},\nabla_hG(hW_q)\big)>0,\qquad G(h+\text{write})>G(h),\qquad W_vW_o\sim W_kW_q'",
    f"{POSTER}, abstract (“equivalent to a gradient ascent step”)",
    picture=axes("Change of a head's G after its own write", FEATURES, "nats"),
    shown="ascent_gain",
    more=_alignment_over_training,
)
def climbs(one: Profile, random: Profile) -> Numbers:
    """Without weights, attention is a step up its own G (B1). A trained head writes through W_v and W_o; the
    angle between what it writes and the gradient of its G, and the change of G after the write, say whether
    it still climbs. In the weights alone, W_v W_o would have to lie along W_k W_q'. Public replications found
    no monotone energies.

    Experiment:
        For every head: the cosine of write and gradient, the change of G after the write, and the cosine of
        W_v W_o and W_k W_q' in standard deviations of random weights and of other heads' W_k W_q'; the same
        cosine at steps 0, 256, 1024 and 4096 of the model that comes with the package, against step 0.

    Example:
        >>> found = xt.claims.find("F3").run({"tokens": 128})
        >>> print(found.checks[0].name)
        cosine of what a head writes and the gradient of its G, mean of heads
    """
    gain, along = one.head("ascent_gain"), one.head("alignment")
    return {
        "cosine": float(one.head("ascent_cosine").mean()),
        "gain": float(gain.mean()),
        "climbing": float((gain > 1e-3).mean()) if np.isfinite(gain).all() else np.nan,
        "alignment_share": float((_z(along, random.head("alignment")) > 4).mean()),
        "cosine of W_v W_o and W_k W_q', mean of heads": float(along.mean()),
        "share of heads in which that is negative": float((along < 0).mean()),
        "the same cosine against other heads, in standard deviations, mean": float(
            one.head("alignment_z").mean()
        ),
    }


@asked(
    "F6",
    "Does attention expand and normalisation contract, layer by layer?",
    r"\frac{\|h+\text{attention}\|}{\|h\|}>1,\qquad"
    r"\frac{\|h_{\text{next}}\|}{\|h+\text{attention}+\text{MLP}\|}<1",
    f"{POSTER}, abstract",
    picture=axes("Factor of the length of a hidden state by attention", "layer", "factor", log_y=True),
    shown="attention_expansion",
)
def expansion(one: Profile, random: Profile) -> Numbers:
    """The drafts see attention expand the cloud of hidden states and normalisation contract it. What
    attention does to the length of a hidden state can be read off each block. Norms before a sublayer
    (pre-norm) act on its input and not on the stream, so they do not contract the stream. Norms after it
    (post-norm) do.

    Experiment:
        Geometric mean over tokens of the factor by which attention's write changes the length of a hidden
        state, block by block; and the factor of a whole block over those of attention and of the MLP, which
        is the effect of norms on the stream itself.

    Example:
        >>> found = xt.claims.find("F6").run({"tokens": 128})
        >>> print([line.label for line in found.picture.lines])
        ['trained', 'random']
    """
    attention, mlp, norm = (
        one.layer(name) for name in ("attention_expansion", "mlp_expansion", "hidden_norm")
    )
    whole = np.diff(np.log(norm))
    fits = len(whole) == len(attention) == len(mlp)
    return {
        "attention": float(np.exp(np.log(attention).mean())),
        "share": float((attention > 1.02).mean()),
        "stream": float(np.exp((whole - np.log(attention) - np.log(mlp)).mean())) if fits else np.nan,
        "MLP: factor by which it lengthens a hidden state, geometric mean of layers": float(
            np.exp(np.log(mlp).mean())
        ),
    }
