"""The numbers of the page for counts: a fitted `SwitchingFamily`, smoothed and run on into the future."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exptilt.switching.families import fit_counts

Array = NDArray[np.float64]
LAG, MOST = 3, 64  # lag of the smoother; 1 instead if there are more than MOST sequences of LAG modes


def count_regimes(
    y: Array, modes: int, starts: int, steps: int, level: float, seed: int, progress: bool | None
) -> tuple[Any, dict[str, Any]]:
    """The fit of a model of counts and its fields of `Regimes`; arguments as for `find_regimes`."""
    fit = fit_counts(y, modes=modes, starts=starts, seed=seed, progress=progress)
    model, rows = fit.model, torch.from_numpy(y)
    lag = LAG if modes**LAG <= MOST else 1
    post, back = model.filter(rows), model.smooth(rows, lag=lag)
    laws: Any = [move.rest for move in model.dynamics]  # type: ignore[attr-defined]
    rest = torch.stack([law.event_mean for law in laws])
    spread = torch.stack([law.event_variance + law.event_mean for law in laws])
    later = model.filter(torch.cat([rows, torch.full((steps, y.shape[1]), torch.nan, dtype=rows.dtype)]))
    g = torch.Generator().manual_seed(seed)
    ends = model.forecast(post, steps, levels=(level,), generator=g)[:, 0]
    return fit, {
        "transition": model.transition.numpy(),
        "smoothed": back.mode_probability.numpy(),
        "center": rest.numpy(),
        "center_error": fit.standard_errors["mean"],
        "deviation": spread.sqrt().numpy(),
        "filtered": post.mode_probability.numpy(),
        "path": model.most_likely_path(rows).numpy(),
        "signal": back.state.event_mean.numpy(),
        "forecast": later.state.event_mean[-steps:].numpy(),
        "lower": ends[:, 0].numpy(),
        "upper": ends[:, 1].numpy(),
        "forecast_probability": later.mode_probability[-steps:].numpy(),
    }
