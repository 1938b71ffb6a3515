r"""Maximum likelihood of a switching family: transition matrix, discounts and laws of rest.

Each is a function of unconstrained numbers (`Free`): rows of the transition matrix of logits against the
diagonal entry, a discount of its logit, a positive parameter of a law of rest of its logarithm, a matrix of
its Cholesky factor. The log-likelihood of the compiled filter is climbed with gradients by central
differences. Standard errors come from its curvature, by the delta method.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import generator as check_generator
from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError

from ..learning.climb import best_end, climb_all, delta_method, starts_around
from ..learning.free_parameters import Free
from ..learning.maximum_likelihood import by_differences, check_enough
from ..learning.summary import Fit
from .compiled import Compiled, flat
from .dynamics import DiscountedDynamics

if TYPE_CHECKING:
    from .model import SwitchingFamily

FamilyFit = Fit  # the name in older pickles
PARTS = ("transition", "discount", "rest")
LEAST = 1e-6  # least discount: below it nothing of the earlier belief is left


class Chosen:
    """The learned parameters of a model as functions of a vector of unconstrained numbers."""

    def __init__(self, model: "SwitchingFamily", fixed: Sequence[str]) -> None:
        self.moves = [move for move in model.dynamics if isinstance(move, DiscountedDynamics)]
        self.kind: Any = type(model.prior)
        self.parts = list(self.kind.event_dims)
        rests = {
            name: torch.stack([getattr(move.rest, name).detach().double() for move in self.moves]).numpy()
            for name in self.parts
        }
        discount = np.array([float(move.discount) for move in self.moves])
        self.values = {"transition": flat(model.transition, *model.transition.shape), "discount": discount}
        self.values |= rests
        held = {*fixed, *(self.parts if "rest" in fixed else ())}
        held |= {"transition"} if len(self.moves) == 1 else set()
        masks = {name: np.ones(x.shape, bool) for name, x in self.values.items() if name not in held}
        bounds = {"discount": (0.0, 1.0)} | dict.fromkeys(self.kind._positive, (0.0, np.inf))
        if "degrees" in rests:
            bounds["degrees"] = (rests["location"].shape[-1] - 1.0, np.inf)
        self.begin = self.values | {"discount": discount.clip(0.01, 0.99)}
        self.begin["transition"] = self.values["transition"].clip(1e-6)
        self.free = Free(self.begin, masks, bounds=bounds) if masks else None

    def natural(self, theta: Tensor) -> dict[str, Tensor]:
        """Learned parameters by name, from the vector."""
        assert self.free is not None
        out = self.free.natural(theta)
        if "discount" in out:
            out["discount"] = out["discount"].clamp_min(LEAST)
        if self.parts[0] in out and self.kind.identity_coordinate:
            out["mean"] = self.kind(**{name: out[name] for name in self.parts}).event_mean
        return out

    def every(self, natural: dict[str, Tensor]) -> dict[str, Any]:
        """Transition, discounts and laws of rest (batch ``(M,)``): learned, or the model's where fixed."""
        all_of = {name: torch.from_numpy(x) for name, x in self.values.items()} | natural
        return all_of | {"rest": self.kind(**{name: all_of[name] for name in self.parts})}


def fit_family(
    model: "SwitchingFamily",
    compiled: Compiled,
    method: str,
    fixed: Sequence[str],
    restarts: int,
    spread: float,
    max_steps: int,
    tolerance: float,
    generator: torch.Generator | None,
    progress: bool | None,
) -> Fit[Any]:
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
    learned = Chosen(model, fixed)
    if learned.free is None:
        raise ArgumentError(
            f"{caller}: fixed is {list(fixed)}, so nothing is left to learn. Leave at least one out."
        )

    def value(theta: np.ndarray) -> float:
        with torch.no_grad(), np.errstate(all="ignore"):
            try:
                found = learned.every(learned.natural(torch.from_numpy(theta)))
                compiled.log_transition = np.log(flat(found["transition"], *compiled.log_transition.shape))
                compiled.discount = flat(found["discount"], len(compiled.discount))
                compiled.rest = flat(compiled.about(found["rest"]).natural_parameter, *compiled.rest.shape)
            except ArgumentError:  # a parameter beyond float64
                return np.inf
            last = compiled.arrays(method, every=False)
        return -float(last.terms.sum()) if (last.failure < 0).all() else np.inf

    seen = int(compiled.there.sum()) * compiled.rows.shape[-1]
    check_enough(caller, learned.free.size, seen)
    evaluate, origin = by_differences(value), learned.free.vector(learned.begin)
    try:
        starts = starts_around(origin, restarts, spread, generator)
        ends = climb_all(evaluate, starts, (max_steps, tolerance, progress), None, learned.free.bounded)
    except ArgumentError:
        raise ArgumentError(
            f"{caller}: the data have probability 0 under this model. Start from another transition or "
            "other laws of rest."
        ) from None
    end, same = best_end(ends)
    errors = delta_method(learned.natural, end.point, end.inverse)
    natural = learned.natural(torch.from_numpy(end.point))
    every = learned.every(natural)
    moves = zip(every["discount"].tolist(), every["rest"], strict=True)
    found = type(model)(
        every["transition"].to(model.transition),
        model.prior,
        model.likelihood,
        [DiscountedDynamics(discount, rest.to(model.prior.dtype)) for discount, rest in moves],
        model.initial_probability,
    )
    return Fit._of(
        ends,
        end,
        same,
        learned.free.label,
        model=found,
        estimates={name: value.numpy() for name, value in natural.items()},
        standard_errors=errors,
        free_parameters=len(origin),
        observations=seen,
        regimes=len(learned.moves),
        bounds=learned.free.bounds,
        filter=method,
    )
