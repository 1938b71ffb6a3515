r"""A layer iterated to its fixed point, as a module.

    z = f_θ(z, x),      y = z

the equilibrium (THEORY B6) of a layer with input injection: infinitely many layers that share their weights, at the memory of two.
Gradients of θ and x are the implicit ones of ``implicit.py``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution
from exptilt._support.transforms import in_transform
from exptilt.dynamics.fixed_points.options import Options
from exptilt.dynamics.fixed_points.solve import fixed_point


class Equilibrium(nn.Module):
    """Solve ``z = module(z, x)`` for z.

    The state dict is that of `module`, key for key: an equilibrium can be loaded from a layer and a layer from an equilibrium. Let
    `module` be deterministic: with dropout in training there is no fixed point to find. Inside `torch.compile` the solver runs eagerly,
    between the compiled parts around it.

    Args:
        module: called as ``module(z, x)``; returns the shape of z.
        solver: as in `fixed_point`, like all that is not explained here.
        tolerance: of the residual.
        max_steps: most evaluations of `module`.
        event_dims: how many of the last axes of z make up one sample, whose parts may influence each other; 2 for ``(batch, token, dim)``.
        damping: of Picard and Anderson.
        window: of all solvers but Picard.
        regularization: of Anderson.
        order: of the derivatives that are exact.
        scale: a number, or a tensor that broadcasts to ``(...)``, in which small states are measured.
        throw: raise where a sample does not converge. If False, `solution` tells, and gradients belong to the point where it stopped.
        strict: raise where a derivative does not exist. Default: as throw.

    Example:
        >>> import torch
        >>> class Layer(torch.nn.Module):
        ...     def forward(self, z, x):
        ...         return 0.5 * torch.cos(z) + x
        >>> layer = Equilibrium(Layer())
        >>> z = layer(torch.zeros(1, 2, dtype=torch.float64))
        >>> z, layer.solution.status.name
        (tensor([[0.4502, 0.4502]], dtype=torch.float64), 'CONVERGED')
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        solver: str = "anderson",
        tolerance: float | None = None,
        max_steps: int = 500,
        event_dims: int = 1,
        damping: float | None = None,
        window: int | None = None,
        regularization: float | None = None,
        order: int = 2,
        scale: float | Tensor | None = None,
        throw: bool = True,
        strict: bool | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ArgumentError(
                f"Equilibrium: module is a {type(module).__name__}. Pass an nn.Module that is called as module(z, x)."
            )
        super().__init__()
        self.module = module
        self.options = Options(
            "Equilibrium",
            solver,
            tolerance,
            max_steps,
            event_dims,
            damping,
            window,
            regularization,
            order,
            scale,
            throw,
            strict,
        )
        self._solution: Solution[Tensor] | None = None
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    @property
    def solution(self) -> Solution[Tensor] | None:
        """How the last call went: its value and residuals, without any graph. None before the first call."""
        return self._solution

    def forward(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """The fixed point.

        Args:
            x: ``(...)``, whatever `module` takes; injected at every step.
            start: ``(..., *event)``, where the solver begins; default zeros like x. Unless there are several fixed points it does not
                matter which is passed.

        Returns:
            z ``(..., *event)``, like `start`.
        """
        begin = torch.zeros_like(x) if start is None else start
        given = {name: value for name, value in vars(self.options).items() if name != "caller"}
        found = fixed_point(lambda z: self.module(z, x), begin, **given)
        # Under a transform there is nothing to look at once it has ended.
        inside = in_transform()
        self._solution = (
            None
            if inside
            else Solution(
                found.value.detach(), found.code, found.residual, found.steps, found.distance, found.trace
            )
        )
        return found.value

    def extra_repr(self) -> str:
        """What ``print`` shows beside the module."""
        shown = {
            name: value
            for name, value in vars(self.options).items()
            if name != "caller" and value is not None
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _without_prefix(self: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _with_prefix(self: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
