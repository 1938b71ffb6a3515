"""Are default starts enough? 100 series, fitted by default, with 20 more starts, and by statsmodels.

Series of 120 to 300 steps of two or three regimes that differ in level, in deviation or in both, close
together or far apart, with or without a lag. A fit by default ends short if one of 20 more starts (another
seed), or statsmodels with `search_reps=20`, reaches a likelihood higher by 0.01. Of statsmodels, an end where
a deviation is below a hundredth of the data's does not count: the likelihood has no bound there. A series
that has been done is not done again.
"""

import time
import warnings
from typing import Any

import numpy as np

import harness
from exptilt.switching import markov_autoregression, markov_regression
from harness import Goal, print_goals, print_table, save

SERIES, SHORT = 100, 0.01


def made(seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """A series, and the model that is fitted to it; the numbers of draws were chosen on seeds from 0."""
    rng = np.random.default_rng(1000 + seed)
    M, T = int(rng.choice([2, 2, 3])), int(rng.integers(120, 301))
    what = [("intercept",), ("intercept", "deviation"), ("deviation",)][seed % 3]
    order = int(rng.choice([0, 0, 1]))
    level = np.arange(M) * rng.uniform(1.0, 4.0) * ("intercept" in what)
    deviation = np.exp(np.arange(M) * rng.uniform(0.4, 1.2) * ("deviation" in what))
    stay, regime, y = rng.uniform(0.8, 0.98, M), 0, np.zeros(T)
    phi, carried = (rng.uniform(0.2, 0.7) if order else 0.0), 0.0
    for t in range(T):
        if rng.random() > stay[regime]:
            regime = int(rng.choice([k for k in range(M) if k != regime]))
        carried = phi * carried + deviation[regime] * rng.normal()
        y[t] = level[regime] + carried
    return y, {"regimes": M, "switching": what, "order": order}


def fit_here(y: np.ndarray, regimes: int, switching: tuple[str, ...], order: int, **more: Any) -> Any:
    """The fit by this package."""
    options = {"regimes": regimes, "switching": switching, **more}
    return markov_autoregression(y, order=order, **options) if order else markov_regression(y, **options)


def fit_statsmodels(y: np.ndarray, regimes: int, switching: tuple[str, ...], order: int, seed: int) -> Any:
    """The fit by statsmodels from 20 random starts."""
    from statsmodels.tsa.api import MarkovAutoregression, MarkovRegression

    np.random.seed(seed)  # noqa: NPY002, its starts are drawn from the global state
    variance = "deviation" in switching
    options = {"k_regimes": regimes, "switching_variance": variance}
    if "intercept" not in switching:
        options["switching_trend"] = False
    if order:
        model = MarkovAutoregression(y, order=order, switching_ar=False, **options)
    else:
        model = MarkovRegression(y, **options)
    return model.fit(search_reps=20, disp=False)


def one(seed: int) -> dict[str, Any]:
    """The likelihoods of a series, and the seconds that each fit took."""
    y, options = made(seed)
    row: dict[str, Any] = {"options": {**options, "switching": list(options["switching"])}, "T": len(y)}
    for name, more in (("default", {}), ("20 more", {"starts": 21, "seed": 5000 + seed})):
        begin = time.process_time()
        fit = fit_here(y, **options, **more)
        row[name] = {
            "log_likelihood": fit.log_likelihood,
            "status": fit.status.name,
            "seconds": time.process_time() - begin,
        }
    begin = time.process_time()
    try:
        theirs = fit_statsmodels(y, **options, seed=seed)
        spread = [v for n, v in zip(theirs.model.param_names, theirs.params, strict=True) if "sigma2" in n]
        proper = bool(min(spread) > (0.01 * y.std()) ** 2)
        row["statsmodels"] = {"log_likelihood": float(theirs.llf), "proper": proper}
    except Exception as problem:
        row["statsmodels"] = {"log_likelihood": None, "proper": False, "problem": str(problem)[:200]}
    row["statsmodels"]["seconds"] = time.process_time() - begin
    return row


def main() -> None:
    arguments = harness.start(__doc__)
    warnings.simplefilter("ignore")
    folder, count = harness.folder(arguments.quick), 3 if arguments.quick else SERIES
    there = folder / "switching_fits.json"
    kept = harness.read(there)["series"] if there.exists() and not arguments.quick else {}
    for seed in range(count):
        if str(seed) not in kept:
            kept[str(seed)] = one(seed)
            save("switching_fits", {"series": kept}, folder=folder)
    rows = list(kept.values())
    ours = np.array([row["default"]["log_likelihood"] for row in rows])
    more = np.array([row["20 more"]["log_likelihood"] for row in rows])
    theirs = np.array([row["statsmodels"]["log_likelihood"] or -np.inf for row in rows])
    proper = np.array([row["statsmodels"]["proper"] for row in rows])
    found = int((more > ours + SHORT).sum())
    other = int(((theirs > ours + SHORT) & proper).sum())
    behind = int((theirs < ours - SHORT).sum())
    seconds = {
        name: sum(row[name]["seconds"] for row in rows) for name in ("default", "20 more", "statsmodels")
    }
    converged = sum(row["default"]["status"] == "CONVERGED" for row in rows)
    print_table(
        ("of " + str(len(rows)) + " series", "count"),
        [
            ("20 more starts find a higher end", found),
            ("statsmodels with search_reps=20 finds a higher one", other),
            ("statsmodels ends lower", behind),
            ("converged by default", converged),
            *((f"seconds of the processor, {name}", round(value, 1)) for name, value in seconds.items()),
        ],
    )
    short = float(((more > ours + SHORT) | ((theirs > ours + SHORT) & proper)).mean())
    goals = [Goal("share of series where more starts find better", found / len(rows), 0.05)]
    goals.append(Goal("share where more starts or statsmodels do", short, 0.05))
    print_goals(goals)
    save("switching_fits", {"series": kept, "goals": goals, "seconds": seconds}, folder=folder)


if __name__ == "__main__":
    main()
