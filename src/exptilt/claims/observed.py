"""A15, E7, F1, F2, F3 and F6: what a trained transformer says. All six read one study of the model.

They run on the small model that comes with the package, or on any that `exptilt report` takes. Bounds say
what a yes would need; they were chosen after a first look at the small model, so that a verdict there
describes it, and only other models test it.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated

import numpy as np
import torch

from exptilt.claims.evidence import (
    Check,
    Findings,
    Role,
    axes,
    covariance_of,
    curve,
    dots,
    least,
    most,
    normals,
    note,
    same,
)
from exptilt.claims.ledger import APPENDIX, FILTER, MODEL, POSTER, Between, claim
from exptilt.families import BernoulliProduct, Gaussian, Poisson, fit_linear_link
from exptilt.lens import Study, models, study

Tokens = Annotated[int, Between(128, 100_000)]
Answer = Callable[[Study], Findings]
CHECKPOINTS = (0, 256, 4096)  # of the model that comes with the package
HEADS = "head, from the first layer to the last"


@lru_cache(maxsize=4)
def studied(model: str, tokens: int, seed: int) -> Study:
    """The study of a model on the text that comes with the package, made once."""
    folder = models.default_folder()
    series = models.find_checkpoints([folder]) if model == MODEL else []
    with models.quiet():
        loaded = models.load_model(series[-1][1] if series else model)
        return study(
            loaded.model,
            loaded.tokenizer,
            {"the text that comes with exptilt": models.read_text(folder / "text.txt")},
            name=model,
            checkpoints=[
                (step, partial(models.load_weights, path)) for step, path in series if step in CHECKPOINTS
            ],
            max_tokens=tokens,
            seed=seed,
            progress=False,
        )


def asked(id: str, title: str, formula: str, source: str) -> Callable[[Answer], Answer]:
    """Register the function below, of the study of a model, as the answer to a question of the drafts."""

    def register(answer: Answer) -> Answer:
        def experiment(seed: int, *, model: str = MODEL, tokens: Tokens = 1024) -> Findings:
            return answer(studied(model, tokens, seed))

        experiment.__doc__ = answer.__doc__
        claim(id, title, formula, source, question=True, seeds=1)(experiment)
        return answer

    return register


def _heads(found: Study, name: str) -> tuple[np.ndarray, float]:
    """One number a head, and the standard error over texts of their mean; NaN where there is none."""
    measure = found.heads[name]
    value = np.full(1, np.nan) if measure.value is None else measure.value[np.isfinite(measure.value)]
    if not len(value):
        value = np.full(1, np.nan)
    if measure.value is None or measure.error is None:
        return value, np.nan
    return value, float(np.sqrt(np.nansum(measure.error**2)) / len(value))


def _by_head(found: Study, *names: str, lowest: float = -np.inf) -> Findings:
    """One row of points a measure, heads in the order of the layers, values below `lowest` drawn there."""
    for name in names:
        value, _ = _heads(found, name)
        yield dots(found.heads[name].title, range(len(value)), np.maximum(value, lowest))


def _mean(text: str, found: Study, name: str, *, at_least: float = -np.inf, at_most: float = np.inf) -> Check:
    """The mean over heads, measured if there is a bound, else only worth knowing."""
    value, error = _heads(found, name)
    role: Role = "measured" if np.isfinite([at_least, at_most]).any() else "note"
    return Check(text, (float(value.mean()),), at_most, at_least, role, error)


@asked(
    "A15",
    "Is Z nearly constant over contexts?",
    r"Z(q)=\sum_n e^{\langle k_n,q\rangle}\approx\mathrm{const}",
    f"{APPENDIX}, on Arora's random walk of language",
)
def constant(found: Study) -> Findings:
    """In the random-walk theory of language that the drafts cite, the normalizer Z is nearly the same for all
    contexts. In heads of a trained transformer it can be measured, and need not be assumed.

    Experiment:
        For each head, the standard deviation of log Z over the queries of a text, log of the number of
        visible keys taken off. Nearly constant would be a quarter of a nat or less.

    Example:
        >>> found = xt.claims.find("A15").run({"tokens": 128})
        >>> print(found.checks[0].values[0] > 0)
        True
    """
    spread, _ = _heads(found, "log_normalizer_variation")
    steady = (spread <= 0.25).mean() if np.isfinite(spread).all() else np.nan
    yield _mean("standard deviation of log Z, mean of heads", found, "log_normalizer_variation", at_most=0.25)
    yield least("share of heads where it is at most a quarter", steady, 0.5, "measured")
    yield note("the steadiest head", spread.min())
    yield _mean("standard deviation of Z over its mean, mean of heads", found, "normalizer_cv")
    yield from _by_head(found, "log_normalizer_variation")
    yield axes("How log Z varies over contexts", HEADS, "nats", log_y=True)


@asked(
    "E7",
    "Are W_q and W_k a linear canonical link?",
    r"e^{\langle f(\eta_i),\mu_j\rangle}\approx e^{\langle\mu_iW_q,\mu_jW_k\rangle},\quad f=\nabla G^*:\ "
    r"W_qW_k'\text{ symmetric, positive definite}",
    f"{FILTER}, equation 15",
)
def link(found: Study) -> Findings:
    """The drafts conjecture that the query and key matrices stand for the canonical link f = ∇G*, as a linear
    approximation. For Gaussians of one covariance that is exact, with the matrix Σ⁻¹; for other families it
    is not. For any gradient map of a convex function the matrix must be symmetric and positive definite,
    which trained heads can be asked for.

    Experiment:
        Linear fits of the exact link of Gaussians, Poisson and Bernoulli laws. In every head of the model
        the part of W_q W_k' that is symmetric (a random matrix has a half) and positive, and how well a
        linear map takes mean keys back to their queries.

    Example:
        >>> law = xt.Gaussian(torch.randn(60, 2), torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        >>> print(round(xt.families.fit_linear_link(law).r_squared, 4))
        1.0
    """
    means, root, other = normals(found.seed, (80, 3), (3, 3), (200, 2))
    covariance = covariance_of(root)
    exact = fit_linear_link(Gaussian(means, covariance))
    counts, bits = (fit_linear_link(kind.from_natural(other)) for kind in (Poisson, BernoulliProduct))
    yield same("Gaussians: matrix against Σ⁻¹", exact.matrix, torch.linalg.inv(covariance), 1e-8)
    yield most("Gaussians: error of the attention weights", exact.worst_weight_error, 1e-8)
    yield least("Gaussians: least eigenvalue", exact.least_eigenvalue, 0.0)
    yield most("Gaussians: asymmetry", exact.asymmetry, 1e-9)
    yield note("Poisson laws: R² of a linear link", counts.r_squared)
    yield note("Bernoulli laws: R² of a linear link", bits.r_squared)
    yield _mean("heads: symmetric part of W_q W_k'", found, "link_symmetry", at_least=0.75)
    yield _mean("heads: positive part of its eigenvalues", found, "link_definiteness", at_least=0.75)
    yield _mean("heads: R² of a linear link", found, "link_r2", at_least=0.5)
    yield from _by_head(found, "link_symmetry", "link_definiteness")
    yield axes("What trained heads have of a link", HEADS, "")


@asked(
    "F1",
    "How are hidden states distributed, over layers and training?",
    r"\eta\sim\mathcal N\,?\quad\text{by layer, by training step}",
    f"{POSTER}, future work",
)
def hidden(found: Study) -> Findings:
    """If the equilibrium of the drafts described transformers, hidden states would be near a Gaussian. Tails
    and tests of Gaussianity say how near they are at each layer, and checkpoints how that came about.

    Experiment:
        A sample of hidden states after each layer: excess kurtosis, sliced Anderson–Darling tests corrected
        for their number, norms, effective rank; at three checkpoints of the training where there are any.

    Example:
        >>> found = xt.claims.find("F1").run({"tokens": 128})
        >>> print(len(found.picture.lines) > 0)
        True
    """
    layers = {
        name: found.layers[name].value for name in ("kurtosis", "gaussian_p", "effective_rank", "hidden_norm")
    }
    kurtosis, p, rank, norm = (np.full(1, np.nan) if v is None else v for v in layers.values())
    places = list(range(len(kurtosis)))
    lines = [curve("trained", places, kurtosis)]
    if found.training is not None:
        steps = zip(found.training.steps, found.training.layers["kurtosis"], strict=True)
        lines = [curve(f"step {step:.0f}", places, values) for step, values in steps]
    yield most("excess kurtosis, largest over layers", np.abs(kurtosis).max(), 1.0, "measured")
    yield least("p-value of Gaussianity, largest over layers", p.max(), 0.05, "measured")
    yield note("effective rank, last layer", rank[-1])
    yield note("norm, last layer over first", norm[-1] / norm[0])
    yield from lines
    yield axes("Excess kurtosis of hidden states (0 for a Gaussian)", "layer", "excess kurtosis")


@asked(
    "F2",
    "Do keys look Gaussian to their queries?",
    r"G(q)\approx\log N+\langle m,q\rangle+\tfrac12q'Cq",
    f"{POSTER}, future work (“local gaussian approximations”)",
)
def local(found: Study) -> Findings:
    """If the keys of a head were Gaussian to its queries, their first two moments would predict G. The drafts
    suggest that this holds locally.

    Experiment:
        R² of the second-order prediction of G over the queries of a text, from all visible keys and from
        the 16 nearest to where the query attends; the same for the output.

    Example:
        >>> found = xt.claims.find("F2").run({"tokens": 128})
        >>> print(found.verdict in (xt.claims.Verdict.PARTLY, xt.claims.Verdict.SCOPED))
        True
    """
    yield _mean("all keys: R² of G", found, "gaussian_r2", at_least=0.5)
    yield _mean("the 16 nearest keys: R² of G", found, "local_gaussian_r2", at_least=0.5)
    yield _mean("all keys: relative error of the output", found, "gaussian_output_error", at_most=0.5)
    yield _mean("the 16 nearest keys: relative error of the output", found, "local_gaussian_output_error")
    yield from _by_head(found, "local_gaussian_r2", "gaussian_r2", lowest=-2.0)
    yield axes("R² of G from two moments", HEADS, "R², cut at −2")


@asked(
    "F3",
    "Does a head climb its own G?",
    r"\cos\big(\text{write},\nabla_hG(hW_q)\big)>0,\qquad G(h+\text{write})>G(h)",
    f"{POSTER}, abstract (“equivalent to a gradient ascent step”)",
)
def climbs(found: Study) -> Findings:
    """Without weights, attention is a step up its own G (B1). A trained head writes through W_v and W_o; the
    angle between what it writes and the gradient of its G, and the change of G after the write, say whether
    it still climbs. Public replications found no monotone energies.

    Experiment:
        For every head: the cosine of write and gradient, the change of G after the write, both against the
        other heads of its layer.

    Example:
        >>> found = xt.claims.find("F3").run({"tokens": 128})
        >>> print(len(found.checks))
        5
    """
    gain, _ = _heads(found, "ascent_gain")
    base = found.heads["ascent_gain"].baseline
    yield _mean("cosine of write and gradient", found, "ascent_cosine", at_least=0.1)
    yield _mean("change of G after the write", found, "ascent_gain", at_least=0.0)
    yield least(
        "share of heads that climb", (gain > 0).mean() if np.isfinite(gain).all() else np.nan, 0.5, "measured"
    )
    yield note("heads of the same layer: change of G", np.nan if base is None else np.nanmean(base))
    yield note("largest climb of a head", gain.max())
    yield from _by_head(found, "ascent_gain")
    yield axes("Change of a head's G after its own write", HEADS, "nats")


@asked(
    "F6",
    "Does attention expand and normalisation contract, layer by layer?",
    r"\frac{\|h+\text{attention}\|}{\|h\|}>1,\qquad\frac{\|\mathrm{norm}(h)\|}{\|h\|}<1",
    f"{POSTER}, abstract",
)
def expansion(found: Study) -> Findings:
    """The drafts see attention expand the cloud of hidden states and normalisation contract it. In a trained
    model both factors can be read off each block.

    Experiment:
        Geometric mean over tokens of the factor by which attention's write, the MLP's write and the norms
        change the length of a hidden state, block by block.

    Example:
        >>> found = xt.claims.find("F6").run({"tokens": 128})
        >>> print([line.label for line in found.picture.lines])
        ['attention', 'MLP', 'norms']
    """
    names = {"attention_expansion": "attention", "mlp_expansion": "MLP", "norm_contraction": "norms"}
    values = {label: found.layers[name].value for name, label in names.items()}
    filled = {label: np.full(1, np.nan) if v is None else v for label, v in values.items()}
    attention, mlp, norms = (np.exp(np.log(v).mean()) for v in filled.values())
    yield least("attention: factor, geometric mean of layers", attention, 1.0, "measured")
    yield least("attention: share of layers that expand", (filled["attention"] > 1).mean(), 1.0, "measured")
    yield most("norms: factor, geometric mean of layers", norms, 1.0, "measured")
    yield note("MLP: factor, geometric mean of layers", mlp)
    yield from (dots(label, range(len(v)), v) for label, v in filled.items())
    yield axes("Factor of the length of a hidden state", "layer", "factor", log_y=True)
