"""Do intervals of 95 % cover? Simulated series, and the intervals that a fit's summary prints.

Two regimes that differ in level and deviation, T = 400: 500 series with a lag, 500 without one.
A parameter's interval covers if the value that made the series lies in it. A share of 95 % has a standard
error of 1 % of 500 series. Fits have one start, and the five of default where that ends at no proper maximum;
the few that end at a lower maximum count as they are. A series that has been done is not done again.
"""

from typing import Any

import numpy as np

import harness
from exptilt.switching import FitStatus, markov_autoregression, markov_regression
from harness import Goal, print_goals, print_table, save

T = 400
LEVEL, DEVIATION, STAY = (0.0, 3.0), (1.0, 1.5), (0.95, 0.9)
LAG = {"levels and a lag": (0.5, 500), "levels": (0.0, 500)}


def truth(phi: float) -> dict[str, float]:
    """The value of each parameter, by the name that a summary gives it."""
    out = {f"intercept[{k}]": LEVEL[k] for k in (0, 1)} | {f"deviation[{k}]": DEVIATION[k] for k in (0, 1)}
    out |= {f"transition[{k}, {k}]": STAY[k] for k in (0, 1)}
    return out | ({"autoregression[0]": phi} if phi else {})


def one(seed: int, phi: float) -> dict[str, Any]:
    """Of each parameter estimate, standard error, and whether the interval and the plain one cover."""
    rng, y, regime, carried = np.random.default_rng(7000 + seed), np.zeros(T), 0, 0.0
    for t in range(T):
        regime = regime if rng.random() < STAY[regime] else 1 - regime
        carried = phi * carried + DEVIATION[regime] * rng.normal()
        y[t] = LEVEL[regime] + carried
    for starts in (1, 5):
        options: dict[str, Any] = {"switching": ("intercept", "deviation"), "starts": starts}
        fit = markov_autoregression(y, order=1, **options) if phi else markov_regression(y, **options)
        if fit.status is FitStatus.CONVERGED:
            break
    table = fit.summary().to_frame()
    row: dict[str, Any] = {"status": fit.status.name}
    for name, value in truth(phi).items():
        found, error, low, high = table.loc[name, ["estimate", "standard error", "low", "high"]]
        plain = abs(found - value) <= 1.959964 * error
        row[name] = [float(found), float(error), bool(low <= value <= high), bool(plain)]
    return row


def main() -> None:
    arguments = harness.start(__doc__)
    folder = harness.folder(arguments.quick)
    there = folder / "switching_coverage.json"
    kept = harness.read(there)["series"] if there.exists() and not arguments.quick else {}
    goals, rows = [], []
    for kind, (phi, series) in LAG.items():
        own = kept.setdefault(kind, {})
        for seed in range(5 if arguments.quick else series):
            if str(seed) not in own:
                own[str(seed)] = one(seed, phi)
                if seed % 10 == 9:
                    save("switching_coverage", {"series": kept}, folder=folder)
        for name, value in truth(phi).items():
            cells = np.array([row[name] for row in own.values()], dtype=float)
            found, error, covers, plain = cells.T
            share = float(covers.mean())
            rows.append(
                (kind, name, value, found.mean(), found.std(), np.nanmean(error), share, plain.mean())
            )
            goals.append(Goal(f"{kind}, {name}: |coverage − 95 %|", abs(share - 0.95), 0.02))
    header = ("series", "parameter", "truth", "mean", "scatter", "standard error", "covers", "± 1.96 s.e.")
    print_table(header, [tuple(x if isinstance(x, str) else round(float(x), 4) for x in row) for row in rows])
    print_goals(goals)
    table = [dict(zip(header, row, strict=True)) for row in rows]
    save("switching_coverage", {"series": kept, "table": table, "goals": goals}, folder=folder)


if __name__ == "__main__":
    main()
