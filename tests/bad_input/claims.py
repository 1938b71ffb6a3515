"""Bad input to claims and to the experiments behind them."""

import math

from exptilt import claims
from exptilt.claims.experiments.circle import metastable_counts
from exptilt.claims.experiments.divergence import divergence_rate
from exptilt.claims.experiments.equal_cosine import equal_cosine
from exptilt.claims.experiments.sweep import equilibrium_sweep
from exptilt.claims.experiments.theorem_one import theorem_one

ROWS = [
    (lambda: divergence_rate(steps=0), "steps", "steps 0"),
    (lambda: divergence_rate(patterns=1), "patterns", "patterns >= 2"),
    (lambda: metastable_counts(beta=0.0), "beta", "beta > 0"),
    (lambda: metastable_counts(seeds=0), "seeds", "seeds 0"),
    (lambda: metastable_counts(time=0.1, step=0.5), "time", "time >= step"),
    (lambda: metastable_counts(noise=-1.0), "noise", "noise >= 0"),
    (lambda: equal_cosine(samples=1), "samples", "samples >= 2"),
    (lambda: equal_cosine(time=0.0), "time", "time > 0"),
    (lambda: equal_cosine(time=math.inf), "time", "time inf"),
    (lambda: equal_cosine(dimensions=16), "dimensions", "Pass a tuple"),
    (lambda: metastable_counts(time=math.inf), "time", "time inf"),
    (lambda: equilibrium_sweep(counts=20), "counts", r"counts is 20. Pass a tuple .* \(20,\)"),
    (lambda: equilibrium_sweep(starts="gaussian"), "starts", "starts is 'gaussian'. Pass a tuple"),
    (lambda: equilibrium_sweep(starts=("gaussian", "cauchy")), "start", "start is 'cauchy'"),
    (lambda: equilibrium_sweep(renormalizers=("sphere", "norm")), "renormalize", "renormalize is 'norm'"),
    (lambda: equilibrium_sweep(seeds=0), "seeds", "seeds is 0"),
    (lambda: theorem_one(steps=-1), "steps", "steps is -1"),
    (lambda: theorem_one(count=0), "count", "count is 0"),
    (lambda: claims.find("A16"), "A16", r"no claim \'A16\' \(did you mean A"),
    (
        lambda: claims.find("A1").run({"dimension": 3}),
        "dimension",
        r"no setting \'dimension\' \(did you mean dimensions\?\)",
    ),
    (lambda: claims.find("A1").run({"dimensions": 65}), "dimensions", "from 1 to 64"),
    (lambda: claims.find("A1").run({"dimensions": "2.5"}), "dimensions", "Pass a whole number"),
    (lambda: list(claims.run(["A1", "A2"], settings={"wings": 3})), "wings", "no setting 'wings'"),
]
