"""What Stata, EViews and statsmodels print of Markov regressions, and what the builders here find.

Series, models and numbers are those of statsmodels' own tests, read from the installed package; each model is
fitted here from its default starts. The table goes into docs/switching.md between its two markers.
"""

import argparse
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from exptilt.switching import markov_autoregression, markov_regression

PAGE = Path(__file__).resolve().parents[1] / "docs" / "switching.md"
MARKERS = "<!-- what others print: written by benchmarks/what_others_print.py -->", "<!-- end -->"
HEAD = (
    "model",
    "log-likelihood, theirs",
    "ours",
    "largest difference of estimates",
    "of standard errors",
    "of smoothed probabilities",
)


def cases() -> list[tuple[str, Any, Callable[[], Any]]]:
    """Name, statsmodels' test case, and the fit here."""
    from statsmodels.tsa.regime_switching.tests import test_markov_autoregression as lags
    from statsmodels.tsa.regime_switching.tests import test_markov_regression as plain

    rate, returns, mumps = (np.array(x) for x in (plain.fedfunds, plain.areturns, plain.mumpspc))
    output, both = np.array(lags.rgnp), ("intercept", "coefficients", "deviation")
    known = np.c_[rate[3:-1], np.array(plain.ogap)[4:], np.array(plain.inf)[4:]]
    table = lags.pd.read_csv(Path(lags.current_path) / "results" / "mar_filardo.csv")
    production, leading = table["dlip"].to_numpy()[1:], table["dmdlleading"].to_numpy()[:-1]

    def regress(y: Any, x: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: markov_regression(y, x, **options)

    def lagged(y: Any, order: int, **options: Any) -> Callable[[], Any]:
        return lambda: markov_autoregression(y, order=order, **options)

    own = ("intercept", "autoregression")
    return [
        ("federal funds, constant", plain.TestFedFundsConst, regress(rate)),
        ("federal funds, lag", plain.TestFedFundsConstL1, regress(rate[1:], rate[:-1])),
        ("federal funds, lag, gap and inflation", plain.TestFedFundsConstL1Exog, regress(rate[4:], known)),
        ("the same, three regimes", plain.TestFedFundsConstL1Exog3, regress(rate[4:], known, regimes=3)),
        (
            "stock returns, lag and variance",
            plain.TestAreturnsConstL1Variance,
            regress(returns[1:], returns[:-1], switching=both),
        ),
        (
            "mumps, lag and variance, no constant",
            plain.TestMumpspcNoconstL1Variance,
            regress(mumps[1:], mumps[:-1], switching=both[1:], fixed={"intercept": 0.0}),
        ),
        ("Hamilton, four lags", lags.TestHamiltonAR4, lagged(output, 4, switching="intercept")),
        ("Hamilton, two lags that switch", lags.TestHamiltonAR2Switch, lagged(output, 2, switching=own)),
        ("Hamilton, a lag that switches", lags.TestHamiltonAR1Switch, lagged(output, 1, switching=own)),
        (
            "the same, transitions by recessions",
            lags.TestHamiltonAR1SwitchTVTP,
            lagged(output, 1, switching=own, transition_inputs=np.array(lags.rec)),
        ),
        (
            "Filardo, transitions by leading index",
            lags.TestFilardo,
            lagged(production, 4, switching="intercept", transition_inputs=leading),
        ),
    ]


def theirs_of(case: Any, table: dict[str, np.ndarray], order: list[int], errors: bool) -> np.ndarray:
    """Our numbers in statsmodels' order, regimes renumbered; variances and driven transitions are NaN."""
    regimes, parts = len(order), list[np.ndarray]()
    P = table["transition"][np.ix_(order, order)]
    model = case.model
    driven = model.tvtp
    parts.append(np.full(2 * regimes, np.nan) if driven else P[:, : regimes - 1].T.reshape(-1))
    value = {name: array[order] for name, array in table.items()}
    if model.trend != "n":
        parts.append(value["intercept"])
    if "coefficients" in value and value["coefficients"].shape[-1]:
        parts.append(value["coefficients"].T.reshape(-1))
    many = regimes if model.switching_variance else 1
    parts.append(np.full(many, np.nan) if errors else value["deviation"][:many] ** 2)
    if "autoregression" in value:
        lagged = value["autoregression"]
        parts.append(lagged.T.reshape(-1) if model.switching_ar[0] else lagged[0])
    return np.concatenate(parts)


def row(name: str, case: Any, fit: Any) -> tuple[str, ...]:
    """One row of the table."""
    true, regimes = case.true, fit.regimes
    published = float(max(true["llf"], true["llf_fit"]))
    cells = [name, f"{published:.4f}", f"{fit.log_likelihood:.4f}"]
    if abs(fit.log_likelihood - float(true["llf"])) > 1e-3:
        told = "a higher maximum" if fit.log_likelihood > published + 1e-3 else "printed at a lower point"
        return (*cells, told, "", "")
    params = np.asarray(true["params"], float)
    orders = [list(order) for order in itertools.permutations(range(regimes))]

    def far(order: list[int]) -> float:
        return float(np.nanmax(np.abs(theirs_of(case, fit.estimates, order, False) - params)))

    order = min(orders, key=far)
    cells.append(f"{far(order):.0e}")
    if "bse_oim" in true:
        gap = theirs_of(case, fit.standard_errors, order, True) - true["bse_oim"]
        cells.append(f"{np.nanmax(np.abs(gap)):.0e}")
    else:
        cells.append("none printed")
    ours = np.asarray(fit.regime_probability())[:, order]
    gap = ours - np.asarray(case.result.smoothed_marginal_probabilities)[-len(ours) :]
    return (*cells, f"{np.abs(gap).max():.0e}")


def main() -> None:
    """Print the table, and put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-page", action="store_true", help="print only")
    quiet = parser.parse_args().no_page
    warnings.simplefilter("ignore")  # statsmodels says much
    rows = []
    for name, case, fit in cases():
        case.setup_class()
        rows.append(row(name, case, fit()))
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *rows)]
    print("\n".join(lines))
    if not quiet:
        text = PAGE.read_text("utf-8")
        before, rest = text.split(MARKERS[0])
        _, after = rest.split(MARKERS[1], 1)
        PAGE.write_text(f"{before}{MARKERS[0]}\n\n{chr(10).join(lines)}\n\n{MARKERS[1]}{after}", "utf-8")


if __name__ == "__main__":
    main()
