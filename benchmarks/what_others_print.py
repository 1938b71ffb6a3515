"""What Stata, EViews and statsmodels print of Markov regressions, and what the builders here find.

Series, models and numbers are those of statsmodels' own tests, read from the installed package. Each model is
held twice against them: with all parameters at the printed values, and fitted from its default starts. The
table goes into docs/switching.md between its two markers.
"""

import argparse
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, logit

from exptilt.switching import markov_autoregression, markov_regression
from exptilt.switching.learning.climb import FitStatus

PAGE = Path(__file__).resolve().parents[1] / "docs" / "switching.md"
MARKERS = "<!-- what others print: written by benchmarks/what_others_print.py -->", "<!-- end -->"
HEAD = (
    "model",
    "log-likelihood at the printed parameters",
    "ours there",
    "smoothed probabilities there, difference",
    "highest printed log-likelihood",
    "ours",
    "estimates, difference",
    "standard errors, difference",
    "remark",
)
Parts = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model of statsmodels' tests.

    Attributes:
        name: for the table.
        theirs: the test class.
        fit: the fit here; takes `fixed`.
        smoothed: the printed smoothed probabilities, and of which regime; None where none are printed.
    """

    name: str
    theirs: Any
    fit: Callable[..., Any]
    smoothed: Callable[[], tuple[Any, int]] | None = None


def cases() -> list[Case]:
    """Every model of the suite whose likelihood is tested; those tested twice stand once."""
    from statsmodels.tsa.regime_switching.tests import test_markov_autoregression as lags
    from statsmodels.tsa.regime_switching.tests import test_markov_regression as plain

    rate, returns, mumps = (np.array(x) for x in (plain.fedfunds, plain.areturns, plain.mumpspc))
    output, both = np.array(lags.rgnp), ("intercept", "coefficients", "deviation")
    known = np.c_[rate[3:-1], np.array(plain.ogap)[4:], np.array(plain.inf)[4:]]
    filardo = lags.pd.read_csv(Path(lags.current_path) / "results" / "mar_filardo.csv")
    production, leading = filardo["dlip"].to_numpy()[1:], filardo["dmdlleading"].to_numpy()[:-1]

    def regress(y: Any, x: Any = None, **options: Any) -> Callable[..., Any]:
        return lambda fixed=None: markov_regression(
            y,
            x,
            fixed=(fixed or {}) | options.get("fixed", {}),
            **{k: v for k, v in options.items() if k != "fixed"},
        )

    def lagged(y: Any, order: int, **options: Any) -> Callable[..., Any]:
        return lambda fixed=None: markov_autoregression(y, order=order, fixed=fixed, **options)

    own, level = ("intercept", "autoregression"), "intercept"
    none = {"switching": both[1:], "fixed": {"intercept": 0.0}}
    drift = {"switching": own, "transition_inputs": np.array(lags.rec)}
    leads = {"switching": level, "transition_inputs": leading}
    return [
        Case(
            "federal funds, constant",
            plain.TestFedFundsConst,
            regress(rate),
            lambda: (plain.TestFedFundsConst.true["smoothed0"], 0),
        ),
        Case("the same, its last ten quarters", plain.TestFedFundsConstShort, regress(rate[-10:])),
        Case("federal funds, lag", plain.TestFedFundsConstL1, regress(rate[1:], rate[:-1])),
        Case(
            "federal funds, lag, gap and inflation", plain.TestFedFundsConstL1Exog, regress(rate[4:], known)
        ),
        Case("the same, three regimes", plain.TestFedFundsConstL1Exog3, regress(rate[4:], known, regimes=3)),
        Case(
            "stock returns, lag and variance",
            plain.TestAreturnsConstL1Variance,
            regress(returns[1:], returns[:-1], switching=both),
        ),
        Case(
            "mumps, lag and variance, no constant",
            plain.TestMumpspcNoconstL1Variance,
            regress(mumps[1:], mumps[:-1], **none),
        ),
        Case(
            "Hamilton, four lags",
            lags.TestHamiltonAR4,
            lagged(output, 4, switching=level),
            lambda: (lags.hamilton_ar4_smoothed, 1),
        ),
        Case(
            "Hamilton, two lags, ten quarters",
            lags.TestHamiltonAR2Short,
            lagged(output[-10:], 2, switching=level),
        ),
        Case(
            "Hamilton, two lags that switch",
            lags.TestHamiltonAR2Switch,
            lagged(output, 2, switching=own),
            lambda: (lags.TestHamiltonAR2Switch.true["smoothed0"], 0),
        ),
        Case(
            "Hamilton, a lag that switches",
            lags.TestHamiltonAR1Switch,
            lagged(output, 1, switching=own),
            lambda: (lags.hamilton_ar1_switch_smoothed, 0),
        ),
        Case(
            "the same, transitions by recessions",
            lags.TestHamiltonAR1SwitchTVTP,
            lagged(output, 1, **drift),
            lambda: (lags.hamilton_ar1_switch_tvtp_smoothed, 0),
        ),
        Case(
            "Filardo, transitions by leading index",
            lags.TestFilardo,
            lagged(production, 4, **leads),
            lambda: (filardo["smoothed_0"].iloc[5:], 0),
        ),
    ]


def ours_of(model: Any, vector: np.ndarray, errors: bool = False) -> Parts:
    """Parts as they are named here, from statsmodels' vector of parameters, or of their standard errors.

    What the vector does not tell is NaN: standard errors of variances, and of what is 1 less the others.
    """
    left, M = list(vector), model.k_regimes

    def take(count: int) -> np.ndarray:
        out = np.array(left[:count], dtype=float)
        del left[:count]
        return out

    parts: Parts = {}
    if model.tvtp:
        chance, slope = expit(take(2)), take(2)
        parts["transition"] = np.c_[chance, 1 - chance]
        parts["transition_input"] = np.array([[[0], [-slope[0]]], [[slope[1]], [0]]])
    else:
        block = take(M * (M - 1)).reshape(M - 1, M).T
        rest = np.full(M, np.nan) if errors else np.maximum(1 - block.sum(1), 0.0)
        parts["transition"] = np.c_[block, np.where(rest < 1e-9, 0.0, rest)]
    if model.trend != "n":
        parts["intercept"] = take(M)
    order, variances = getattr(model, "order", 0), M if model.switching_variance else 1
    lags = order * (M if order and model.switching_ar[0] else 1)
    if regressors := (len(left) - variances - lags) // M:
        parts["coefficients"] = take(M * regressors).reshape(regressors, M).T
    variance = np.resize(take(variances), M)
    parts["deviation"] = np.full(M, np.nan) if errors else np.sqrt(variance)
    if lags:
        parts["autoregression"] = np.broadcast_to(take(lags).reshape(order, -1).T, (M, order))
    return parts


def theirs_of(model: Any, parts: Parts) -> np.ndarray:
    """Statsmodels' vector of parameters, from parts as they are named here."""
    P, M = parts["transition"], model.k_regimes
    if model.tvtp:
        slope = parts["transition_input"][:, :, 0]
        out = [logit(P[:, 0]), np.array([-slope[0, 1], slope[1, 0]])]
    else:
        out = [P[:, : M - 1].T]
    if model.trend != "n":
        out.append(parts["intercept"])
    if parts.get("coefficients", np.zeros(0)).size:
        out.append(parts["coefficients"].T)
    out.append(parts["deviation"][: M if model.switching_variance else 1] ** 2)
    if "autoregression" in parts:
        lagged = parts["autoregression"]
        out.append(lagged.T if model.switching_ar[0] else lagged[0])
    return np.concatenate([np.reshape(part, -1) for part in out])


def apart(ours: Parts, theirs: Parts, order: list[int]) -> float:
    """The largest difference, regimes here being renumbered by `order`; NaN in theirs is left out."""
    gaps = [np.zeros(1)]
    for name, value in theirs.items():
        if name in ours:
            mine = ours[name][order]
            mine = mine[:, order] if name.startswith("transition") else mine
            gaps.append(np.abs(mine - value).reshape(-1))
    return float(np.nanmax(np.concatenate(gaps)))


def numbering(ours: Parts, theirs: Parts) -> list[int]:
    """The regime here that is each of theirs."""
    orders = itertools.permutations(range(len(theirs["transition"])))
    return min((list(order) for order in orders), key=lambda order: apart(ours, theirs, order))


def row(case: Case) -> tuple[str, ...]:
    """One row of the table."""
    case.theirs.setup_class()
    true, model = case.theirs.true, case.theirs.model
    printed = ours_of(model, np.asarray(true["params"], float))
    there = case.fit(fixed=printed)
    smoothed = np.asarray(there.regime_probability())[:, numbering(there.estimates, printed)]
    if case.smoothed is not None:
        known, regime = case.smoothed()
        far = np.abs(smoothed[:, regime] - np.asarray(known)).max()
    else:
        known = np.asarray(case.theirs.result.smoothed_marginal_probabilities)
        far = np.abs(smoothed - known).max()
    cells = [case.name, f"{true['llf']:.4f}", f"{there.log_likelihood:.4f}"]
    cells.append(f"{far:.0e}" + "*" * (case.smoothed is None))
    highest = float(max(true["llf"], true["llf_fit"]))
    fit = case.fit()
    cells += [f"{highest:.4f}", f"{fit.log_likelihood:.4f}"]
    if fit.log_likelihood > highest + 1e-3 or fit.status is FitStatus.DEGENERATE:
        again = float(model.loglike(theirs_of(model, fit.estimates)))
        kind = "the likelihood has no bound" if fit.status is FitStatus.DEGENERATE else "a higher maximum"
        return (*cells, "", "", f"{kind}; statsmodels computes {again:.4f} at our estimates")
    if highest > float(true["llf"]) + 1e-3:
        return (*cells, "", "", "the printed parameters are those of a lower point")
    order = numbering(fit.estimates, printed)
    cells.append(f"{apart(fit.estimates, printed, order):.0e}")
    if "bse_oim" not in true:
        return (*cells, "none printed", "")
    errors = ours_of(model, np.asarray(true["bse_oim"], float), errors=True)
    return (*cells, f"{apart(fit.standard_errors, errors, order):.0e}", "")


def main() -> None:
    """Print the table, and put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-page", action="store_true", help="print only")
    quiet = parser.parse_args().no_page
    warnings.simplefilter("ignore")  # statsmodels says much
    rows = [row(case) for case in cases()]
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ("---",) * len(HEAD), *rows)]
    print("\n".join(lines))
    if not quiet:
        text = PAGE.read_text("utf-8")
        before, rest = text.split(MARKERS[0])
        _, after = rest.split(MARKERS[1], 1)
        PAGE.write_text(f"{before}{MARKERS[0]}\n\n{chr(10).join(lines)}\n\n{MARKERS[1]}{after}", "utf-8")


if __name__ == "__main__":
    main()
