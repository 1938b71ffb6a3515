"""Markov regressions: fits here and by statsmodels, of the same model from the same series, in turn.

Hamilton's model of output (an autoregression of order 4 whose level switches) and the federal funds rate (a
level that switches). Both start once, from where they start by themselves; how their likelihoods differ is
part of the table.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import harness
from exptilt.switching import markov_autoregression, markov_regression
from harness import Goal, compare, print_goals, print_table, save

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "markov_series.json"


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each model, a fit here and one by statsmodels."""
    from statsmodels.tsa.api import MarkovAutoregression, MarkovRegression

    series = {name: np.array(values) for name, values in json.loads(DATA.read_text()).items()}
    output, funds = series["rgnp"], series["fedfunds"]
    return {
        "Hamilton, order 4": (
            lambda: markov_autoregression(output, order=4, switching="intercept", starts=1),
            lambda: MarkovAutoregression(output, k_regimes=2, order=4, switching_ar=False).fit(disp=False),
        ),
        "federal funds": (
            lambda: markov_regression(funds, switching="intercept", starts=1),
            lambda: MarkovRegression(funds, k_regimes=2).fit(disp=False),
        ),
    }


def main() -> None:
    arguments = harness.start(__doc__)
    warnings.simplefilter("ignore")  # statsmodels says much
    rows, goals, results = [], [], {}
    for name, (ours, theirs) in cases().items():
        difference = ours().log_likelihood - theirs().llf
        few, rounds = (2, 3) if arguments.quick else (5, 9)
        both = {"exptilt": ours, "statsmodels": theirs}
        times = compare(both, "exptilt", rounds=rounds, slow={"statsmodels": few}, label=name)
        best = {who: times[who].best for who in times}
        faster = best["statsmodels"] / best["exptilt"]
        milli = [f"{1e3 * best[who]:.1f}" for who in ("exptilt", "statsmodels")]
        rows.append((name, *milli, f"{faster:.1f}", f"{difference:.1e}"))
        goals.append(Goal(f"{name}, share of statsmodels' time", 1 / faster, 1 / 20))
        results[name] = {"times": times, "difference": difference}
    header = ("fit", "ms", "statsmodels, ms", "× faster", "log-likelihood beyond theirs")
    print_table(header, rows)
    print_goals(goals)
    if not arguments.quick:
        save("markov", {"fits": results, "goals": goals}, folder=harness.folder(False))


if __name__ == "__main__":
    main()
