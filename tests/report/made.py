"""Made-up numbers for pages: every kind of value they must show, and names that try to break out."""

import numpy as np

from exptilt.lens import Study
from exptilt.lens.studying.results import (
    HeadDetail,
    HeadMeasure,
    Histogram,
    LayerMeasure,
    TokenMass,
    Training,
)
from exptilt.report.regimes import Regimes

HOSTILE = "</script><script>window.bad=1</script>"
WORDS = [
    "<s>",
    " To",
    " be",
    ",",
    " or",
    " not",
    "\n",
    HOSTILE,
    "\t",
    " q\u202eq",
    " that",
    "",
    "&lt;b&gt;",
    " \x1b[2J",
    "é",
    " 'tis",
]


def make_study(
    layers=4, heads=4, size=16, steps=(0, 1, 3, 10, 30, 100, 300, 1000, 3000), seed=0, name="made <b>up</b>"
):
    rng = np.random.default_rng(seed)
    shape = (layers, heads)

    def head(title, value, *, unit="", span=(None, None), error=True, baseline=None):
        return HeadMeasure(
            title,
            unit,
            f"What {title} tells.",
            f"what {title} assumes",
            value,
            0.02 * np.abs(value) if error else None,
            "",
            baseline,
            span,
        )

    entropy = rng.uniform(0.2, 3.0, shape)
    missing = rng.uniform(0, 1, shape)
    missing[0, 1] = np.nan
    measures = {
        "entropy": head("entropy", entropy, unit="nats", span=(0.0, None)),
        "effective_keys": head("effective keys", np.exp(entropy), span=(1.0, None)),
        "first_token_mass": head("mass on the first token", rng.beta(1, 3, shape), span=(0.0, 1.0)),
        "score_variance": head("score variance", 10 ** rng.uniform(-3, 2, shape), span=(0.0, None)),
        "ascent": head(
            "ascent cosine",
            rng.uniform(-0.4, 0.6, shape),
            span=(-1.0, 1.0),
            baseline=rng.normal(0, 0.05, shape),
        ),
        "symmetry": head("symmetry of the link", missing, span=(0.0, 1.0), error=False),
        "definite": HeadMeasure(
            "definiteness",
            "",
            "Whether the link is a gradient.",
            "square W",
            None,
            None,
            "queries and keys are of different sizes.",
        ),
    }
    places = ["embedding", *(f"after layer {index}" for index in range(layers))]
    norms = np.cumsum(rng.uniform(0.5, 2, layers + 1))
    spectrum = np.sort(rng.gamma(0.5, 1.0, (layers + 1, 12)), axis=1)[:, ::-1] + 1e-3
    curves = {
        "norm": LayerMeasure(
            "norm of the hidden state", "", "How long hidden states are.", "", norms, places, 0.05 * norms
        ),
        "spectrum": LayerMeasure("spectrum", "", "Variance by component.", "", spectrum, places),
        "expansion": LayerMeasure(
            "expansion by attention",
            "",
            "Spread after over before.",
            "",
            rng.uniform(0.8, 1.4, layers),
            places[1:],
        ),
        "gaussian": LayerMeasure(
            "Gaussianity", "", "p-value.", "", None, places, None, "fewer than 100 tokens."
        ),
    }
    tokens = [WORDS[index % len(WORDS)] for index in range(size)]
    details = []
    for layer in range(layers):
        for which in range(heads):
            strip = np.tril(rng.gamma(0.4, 1.0, (size, size))) + 1e-9 * np.eye(size)
            counts = rng.integers(0, 50, 20).astype(float)
            details.append(
                HeadDetail(
                    layer,
                    which,
                    {
                        "entropy": Histogram(np.linspace(0, 3, 21), counts),
                        "log_normalizer": Histogram(np.linspace(-2, 9, 21), counts[::-1]),
                    },
                    [
                        TokenMass(token, float(mass), 3, float(9 * mass))
                        for token, mass in zip(WORDS, np.sort(rng.uniform(0, 0.6, 16))[::-1], strict=True)
                    ],
                    strip / strip.sum(1, keepdims=True),
                )
            )
    training = None
    if steps:
        grow = np.linspace(0, 1, len(steps))[:, None, None]
        over = {
            key: measure.value * (0.3 + 0.7 * grow)
            for key, measure in measures.items()
            if measure.value is not None
        }
        training = Training(
            np.array(steps, float),
            np.linspace(4.2, 1.6, len(steps)),
            over,
            {"norm": norms * (0.5 + 0.5 * grow[:, 0])},
        )
    return Study(
        name,
        {"architecture": "GPT-2", "layers": layers, "heads": heads, "parameters": 1_234_567},
        {"text": "made <i>text</i>", "tokens": 1024},
        measures,
        curves,
        details,
        tokens,
        training,
        ("One text was longer than the context and was cut into pieces.",),
        seed,
    )


def make_regimes(kind="level", columns=("price", "volume"), rows=40, seed=0):
    """Made-up regimes: three of them, one after the other, labels that need quotes."""
    rng = np.random.default_rng(seed)
    M, m, h = 3, len(columns), 4
    path = np.arange(rows) * M // rows
    probability = np.full((rows, M), 0.05)
    probability[np.arange(rows), path] = 0.9
    center = np.arange(1.0, M + 1)[:, None] * np.ones(m)
    error = np.full((M, m), 0.1)
    error[1, 0] = np.nan
    signal = center[path]
    y = signal + rng.normal(size=(rows, m))
    y[3, 0] = np.nan
    labels = tuple(f'row "{t}",\r{t}' for t in range(rows))
    transition = np.array([[0.9, 0.1, 0.0], [0.0, 0.8, 0.2], [0.0, 0.0, 1.0]])
    duration = np.array([10.0, 5.0, np.inf])
    ahead = {name: np.full((h, m), value) for name, value in (("forecast", 3), ("lower", 1), ("upper", 5))}
    return Regimes(
        source="data <b>.csv",
        columns=tuple(columns),
        labels=labels,
        y=y,
        kind=kind,
        seed=seed,
        log_likelihood=-12.5,
        aic=40.0,
        bic=50.0,
        free_parameters=8,
        observations=79,
        status="converged",
        transition=transition,
        duration=duration,
        share=probability.mean(0),
        center=center,
        center_error=error,
        deviation=np.ones((M, m)),
        filtered=probability,
        smoothed=probability,
        path=path,
        signal=signal,
        forecast_probability=np.full((h, M), 1 / M),
        level=0.9,
        **ahead,
    )
