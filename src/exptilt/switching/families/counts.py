"""Ready model of counts: each regime has a rate, and the current rate wanders around it."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError
from exptilt.families import Gamma, Poisson

from ..learning.summary import Fit
from .dynamics import DiscountedDynamics
from .model import SwitchingFamily


def fit_counts(
    y: ArrayLike | Tensor, *, modes: int = 2, starts: int = 5, seed: int = 0, progress: bool | None = None
) -> Fit[SwitchingFamily]:
    """Fit regimes of Poisson counts: Gamma beliefs about the rate, drawn towards a law of each regime.

    The first start divides the sorted counts into equal parts. Regimes are numbered from low to high rates.

    Args:
        y: ``(T, D)`` or ``(T,)``, whole numbers of at least 0; a row of NaN is missing.
        modes: how many regimes.
        starts: how many starts of the fit.
        seed: of the starts after the first.
        progress: show a bar: True, False, or None for only on a terminal.

    Example:
        >>> fit = fit_counts([2, 3, 1, 2, 4, 2, 30, 28, 35, 31, 29, 33, 2, 1, 3, 2, 2, 3], starts=1)
        >>> [round(float(move.rest.event_mean)) for move in fit.model.dynamics]
        [2, 31]
    """
    modes, starts = whole("fit_counts", "modes", modes), whole("fit_counts", "starts", starts)
    rows = torch.as_tensor(np.asarray(y, dtype=np.float64))
    rows = rows.unsqueeze(-1) if rows.ndim == 1 else rows
    if rows.ndim != 2:
        raise ArgumentError(f"fit_counts: y has shape {tuple(rows.shape)}. Pass one series, (T,) or (T, D).")
    there = rows[~rows.isnan().any(-1)]
    if len(there) < 2 * modes:
        raise ArgumentError(f"fit_counts: {len(there)} rows for {modes} regimes. Pass a longer series.")
    parts = torch.tensor_split(there[there.sum(-1).argsort()], modes)
    level = torch.stack([part.mean(0) for part in parts]).clamp_min(0.1)
    rests = Gamma(torch.full_like(level, 4.0), 4.0 / level)
    stay = 0.9 if modes > 1 else 1.0
    transition = torch.full((modes, modes), (1 - stay) / max(modes - 1, 1), dtype=torch.float64)
    model = SwitchingFamily(
        transition.fill_diagonal_(stay), rests, Poisson, [DiscountedDynamics(0.7, rest) for rest in rests]
    )
    fit = model.fit(
        rows, restarts=starts - 1, generator=torch.Generator().manual_seed(seed), progress=progress
    )
    means = torch.stack([move.rest.event_mean.sum() for move in _moves(fit.model)])
    order = means.argsort()
    found, tables = fit.model, (fit.standard_errors, fit.estimates)
    errors, values = ({name: x[order.numpy()] for name, x in table.items()} for table in tables)
    for table in (errors, values):
        if "transition" in table:
            table["transition"] = table["transition"][:, order.numpy()]
    ranked = SwitchingFamily(
        found.transition[order][:, order],
        found.prior[order],
        Poisson,
        [found.dynamics[int(k)] for k in order],
        found.initial_probability[order],
    )
    return replace(fit, model=ranked, standard_errors=errors, estimates=values)


def _moves(model: SwitchingFamily) -> list[DiscountedDynamics]:
    return [move for move in model.dynamics if isinstance(move, DiscountedDynamics)]
