"""What was found in a series, for a terminal."""

from exptilt.report.regimes.payload import Regimes
from exptilt.report.tokens import plain


def text(found: Regimes) -> str:
    """The summary as lines of text; names from the file cannot upset the terminal."""
    names = [plain(name) for name in found.columns]
    center, deviation = ("level", "sd") if found.kind == "level" else ("pace", "noise sd")
    rows, M = len(found.y), len(found.share)
    lines = [
        f"{plain(found.source)}: {rows} rows of {', '.join(names)}; {M} regimes, model {found.kind!r}",
        "rows are numbered" if found.index is None else f"rows are named by column {plain(found.index)!r}",
        f"log-likelihood {found.log_likelihood:.4f}   AIC {found.aic:.2f}   BIC {found.bic:.2f}   "
        f"{found.free_parameters} free parameters",
        found.status,
        "",
        "regime   share   lasts" + "".join(f"   {name} {center} (s.e.)   {deviation}" for name in names),
    ]
    for k in range(M):
        numbers = zip(found.center[k], found.center_error[k], found.deviation[k], strict=True)
        cells = "".join(f"   {value:.4g} ({error:.2g})   {spread:.4g}" for value, error, spread in numbers)
        lines.append(f"{k:>6}   {100 * found.share[k]:4.1f}%   {found.duration[k]:5.1f}{cells}")
    lines.append("")
    for k, row in enumerate(found.transition):
        lines.append(f"from regime {k}: " + "  ".join(f"to {j}: {p:.4f}" for j, p in enumerate(row)))
    last = ", ".join(f"{k}: {p:.3f}" for k, p in enumerate(found.filtered[-1]))
    return "\n".join([*lines, f"probability of the regimes at the last row: {last}"])
