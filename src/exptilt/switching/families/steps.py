"""A pass step by step with the families' own functions: any beliefs and dynamics, derivatives kept."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.families import ExponentialFamily, Mixture, log_marginal_likelihood, posterior, project, stack

from .compiled import Passed, impossible, reached

if TYPE_CHECKING:
    from .model import SwitchingFamily


def moved(model: "SwitchingFamily", belief: ExponentialFamily) -> ExponentialFamily:
    """D_j(belief), the modes j along a last batch axis; a belief ``(..., M)`` is moved mode by mode."""
    found: ExponentialFamily = stack([move(belief) for move in model.dynamics], -1)
    return found


def own(model: "SwitchingFamily", belief: ExponentialFamily) -> ExponentialFamily:
    """D_j(belief_j) of a belief ``(..., M)``."""
    found: ExponentialFamily = stack([move(belief[..., j]) for j, move in enumerate(model.dynamics)], -1)
    return found


def seen(model: "SwitchingFamily", belief: ExponentialFamily, y: Tensor) -> tuple[ExponentialFamily, Tensor]:
    """The belief after an observation, and its log marginal likelihood."""
    wide = y.expand(*belief.batch_shape, 1, len(y))
    return posterior(belief, model.likelihood, wide), log_marginal_likelihood(belief, model.likelihood, wide)


def merged(log_weight: Tensor, belief: ExponentialFamily) -> ExponentialFamily:
    """One member for each mixture ``(..., K)``; where all weights are 0 they count as equal."""
    nothing = log_weight.isneginf().all(-1, keepdim=True)
    return project(Mixture(torch.where(nothing, 0.0, log_weight), belief), type(belief))


def by_steps(model: "SwitchingFamily", y: Tensor, there: Tensor, method: str, what: str) -> Passed:
    """The pass over B series, one after the other."""
    found = [_one(model, *one, method, what) for one in zip(y, there, strict=True)]
    terms, levels, beliefs, mixings = zip(*found, strict=True)
    belief: ExponentialFamily = stack(beliefs, 0)
    return Passed(torch.stack(terms), torch.stack(levels), belief, torch.stack(mixings))


def _one(model: "SwitchingFamily", y: Tensor, there: Tensor, method: str, what: str) -> Passed:
    M = len(model.dynamics)
    assert model.initial_probability is not None
    level, log_transition, belief = (
        model.initial_probability.log(),
        model.transition.log(),
        model._started(),
    )
    terms, levels, beliefs, mixings = [], [], [], []
    for step, row in enumerate(y):
        joint, before = level.unsqueeze(-1) + log_transition, level  # [i, j]
        try:
            if method == "gpb2":
                after = moved(model, belief)
                if there[step]:
                    after, gain = seen(model, after, row)
                    joint = joint + gain
                belief = merged(reached(joint, before).mT, after.reshape(M, M).map(_turned))
                level = torch.logsumexp(joint, 0)
            else:
                level = torch.logsumexp(joint, 0)
                if method == "imm":
                    each = belief.expand((M, M))  # [j, i]
                    belief = own(model, merged(reached(joint, before).mT, each))
                else:
                    belief = moved(model, merged(joint.logsumexp(1), belief))
                if there[step]:
                    belief, gain = seen(model, belief, row)
                    level = level + gain
        except ArgumentError as error:
            raise ArgumentError(
                f"SwitchingFamily.{what}: at step {step}, y = {row.tolist()}: {error}"
            ) from None
        total = torch.logsumexp(level, 0)
        if not bool(total.isfinite()):
            raise ArgumentError(impossible(what, step, row))
        mixings.append(torch.softmax(reached(joint, before), 0))
        level = level - total
        terms.append(total)
        levels.append(level)
        beliefs.append(belief)
    return Passed(torch.stack(terms), torch.stack(levels), stack(beliefs, 0), torch.stack(mixings))


def _turned(leaf: Tensor, event: int) -> Tensor:
    """A tensor of a belief with batch axes (i, j), as (j, i)."""
    return leaf.transpose(-1 - event, -2 - event)
