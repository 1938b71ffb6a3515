r"""Maximum likelihood of a switching family: transition matrix, discounts and laws of rest.

They are functions of free numbers: rows of the transition matrix of logits, the last of them against the
diagonal's; a discount of its logit; a positive parameter of a law of rest of its logarithm. The
log-likelihood of the compiled filter is climbed with gradients by central differences, a few microseconds
an observation each. Standard errors are from its curvature, by the delta method.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import generator as check_generator
from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError
from exptilt.families import ExponentialFamily

from ..learning.maximum_likelihood import FitStatus, Objective, climb, curvature, delta_method, starts_around
from .dynamics import Discounted

if TYPE_CHECKING:
    from .compiled import Compiled
    from .model import SwitchingFamily

PARTS = ("transition", "discount", "rest")
LEAST = 1e-6  # discount: below it nothing is left of what was known


@dataclass(frozen=True)
class FamilyFit:
    """What maximum likelihood found.

    Attributes:
        model: with the parameters found.
        log_likelihood: of all series.
        standard_errors: by name: "transition" ``(M, M)``, "discount" ``(M,)`` and the fields of the laws of
            rest, such as "shape" ``(M, D)``, with their "mean" ``(M, D)`` where it is one of x; NaN where the
            curvature does not tell.
        status: why it stopped; ``status.value`` says it in words.
        free_parameters: how many were learned.
        observations: how many numbers were observed.
        restarts: the log-likelihood at the end of each start.
    """

    model: "SwitchingFamily"
    log_likelihood: float
    standard_errors: dict[str, np.ndarray]
    status: FitStatus
    free_parameters: int
    observations: int
    restarts: tuple[float, ...] = field(default=())

    @property
    def aic(self) -> float:
        """Akaike's criterion."""
        return 2 * self.free_parameters - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """Schwarz's criterion."""
        return self.free_parameters * float(np.log(self.observations)) - 2 * self.log_likelihood


class Free:
    """The free numbers of a model, and what they stand for."""

    def __init__(self, model: "SwitchingFamily", fixed: Sequence[str]) -> None:
        self.moves = [move for move in model.dynamics if isinstance(move, Discounted)]
        self.M, self.kind = len(self.moves), type(model.prior)
        self.transition = model.transition.detach().double()
        names = [name for name, rank in self.kind.event_dims.items() if rank == 1]
        self.parts = {
            name: torch.stack([getattr(move.rest, name).detach().double() for move in self.moves])
            for name in names
        }
        self.learned = [name for name in PARTS if name not in fixed and (name != "transition" or self.M > 1)]

    def start(self) -> np.ndarray:
        """The numbers of the model itself."""
        found = []
        if "transition" in self.learned:
            logs = self.transition.clamp_min(1e-6).log()
            found.append((logs - logs.diagonal().unsqueeze(-1))[~torch.eye(self.M, dtype=torch.bool)])
        if "discount" in self.learned:
            discount = torch.tensor([float(move.discount) for move in self.moves], dtype=torch.float64)
            found.append(torch.logit(discount.clamp(0.01, 0.99)))
        if "rest" in self.learned:
            found += [
                (x.log() if name in self.kind._positive else x).reshape(-1) for name, x in self.parts.items()
            ]
        return torch.cat(found).numpy() if found else np.zeros(0)

    def natural(self, theta: Tensor) -> dict[str, Tensor]:
        """What the numbers stand for, by name."""
        out = dict[str, Tensor]()
        M, off = self.M, ~torch.eye(self.M, dtype=torch.bool)
        if "transition" in self.learned:
            logits = theta.new_zeros(M, M).masked_scatter(off, theta[: M * (M - 1)])
            out["transition"], theta = torch.softmax(logits, -1), theta[M * (M - 1) :]
        if "discount" in self.learned:
            out["discount"], theta = torch.sigmoid(theta[:M]).clamp_min(LEAST), theta[M:]
        if "rest" in self.learned:
            for name, x in self.parts.items():
                value, theta = theta[: x.numel()].reshape(x.shape), theta[x.numel() :]
                out[name] = value.exp() if name in self.kind._positive else value
            member = self.kind(**{name: out[name] for name in self.parts})
            if self.kind.identity_coordinate:
                out["mean"] = member.event_mean
        return out

    def rest(self, natural: dict[str, Tensor]) -> ExponentialFamily:
        """The laws of rest, batch ``(M,)``."""
        fields: Any = {name: natural.get(name, x) for name, x in self.parts.items()}
        return self.kind(**fields)


def fit_family(
    model: "SwitchingFamily",
    compiled: "Compiled",
    method: str,
    fixed: Sequence[str],
    restarts: int,
    spread: float,
    max_steps: int,
    tolerance: float,
    generator: torch.Generator | None,
    progress: bool | None,
) -> FamilyFit:
    """The fit; arguments as for `SwitchingFamily.fit`."""
    caller = "SwitchingFamily.fit"
    unknown = [name for name in fixed if name not in PARTS]
    if isinstance(fixed, str) or unknown:
        raise ArgumentError(f"{caller}: fixed is {fixed!r}. Pass some of {list(PARTS)} in a tuple.")
    restarts = whole(caller, "restarts", restarts, least=0)
    max_steps = whole(caller, "max_steps", max_steps)
    spread, tolerance = (
        number(caller, name, x, above=0) for name, x in (("spread", spread), ("tolerance", tolerance))
    )
    check_generator(caller, generator)
    free = Free(model, fixed)
    origin = free.start()
    if not len(origin):
        raise ArgumentError(f"{caller}: fixed is {list(fixed)}, so that nothing is left to learn.")

    def value(theta: np.ndarray) -> float:
        with torch.no_grad(), np.errstate(all="ignore"):
            try:
                found = free.natural(torch.from_numpy(theta))
                if "transition" in found:
                    compiled.log_transition = np.log(found["transition"].numpy())
                if "discount" in found:
                    compiled.discount = found["discount"].numpy()
                if "rest" in free.learned:
                    compiled.rest = compiled.about(free.rest(found)).natural_parameter.numpy()
            except ArgumentError:  # a parameter beyond float64
                return np.inf
            terms, *_, failure = compiled.arrays(method)
        return -float(terms.sum()) if (failure[:, 0] < 0).all() else np.inf

    evaluate = _with_slope(value)
    ends: list[tuple[float, np.ndarray, FitStatus]] = []
    for point in starts_around(origin, restarts, spread, generator):
        try:
            end, status, _ = climb(evaluate, point, max_steps, tolerance, progress)
        except ArgumentError:
            if not ends and point is origin:
                raise ArgumentError(f"{caller}: this model cannot give the data at all.") from None
            continue
        ends.append((-value(end), end, status))
    best, end, status = max(ends, key=lambda found: found[0])
    errors = delta_method(free.natural, end, curvature(evaluate, end))
    natural = free.natural(torch.from_numpy(end))
    prior, rests = model.prior, free.rest(natural)
    discount = natural.get("discount", torch.tensor([float(move.discount) for move in free.moves]))
    found = type(model)(
        natural.get("transition", free.transition).to(model.transition),
        prior,
        model.likelihood,
        [Discounted(float(discount[j]), rests[j].to(prior.dtype)) for j in range(free.M)],
        model.initial_probability,
    )
    seen = int(compiled.there.sum()) * compiled.rows.shape[-1]
    return FamilyFit(found, best, errors, status, len(origin), seen, tuple(value for value, _, _ in ends))


def _with_slope(value: Any) -> Objective:
    """A function and its gradient by central differences, +inf where it has no value."""

    def evaluate(theta: np.ndarray) -> tuple[float, np.ndarray]:
        here, slope = value(theta), np.zeros_like(theta)
        if not np.isfinite(here):
            return np.inf, slope
        for k in range(len(theta)):
            step = np.zeros_like(theta)
            step[k] = 1e-5 * max(1.0, abs(theta[k]))
            up, down = value(theta + step), value(theta - step)
            slope[k] = (up - down) / (2 * step[k]) if np.isfinite(up + down) else 0.0
        return here, slope

    return evaluate
