r"""A layer iterated to its fixed point, as a module.

    z = f_θ(z, x),      y = z

the equilibrium (THEORY B6) of a layer with input injection: infinitely many layers that share their
weights, at the memory of two. Gradients of θ and x are the implicit ones of ``implicit.py``.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution
from exptilt._support.transforms import in_transform
from exptilt.dynamics.fixed_points.options import Options
from exptilt.dynamics.fixed_points.solve import solve


class Equilibrium(nn.Module):
    """A layer whose output z solves ``z = module(z, x)``.

    The state dict is that of `module`, key for key: an equilibrium can be loaded from a layer and a layer
    from an equilibrium. Let `module` be deterministic: with dropout in training there is no fixed point to
    find. Inside `torch.compile` the solver runs eagerly, between the compiled parts around it.

    Args:
        module: called as ``module(z, x)``, or with further inputs by name; returns the shape of z.
        solver: as in `fixed_point`, which explains all options.
        tolerance: of the residual.
        max_steps: most evaluations of `module`.
        event_dims: how many of the last axes of z make up one sample, whose parts may influence each other;
            2 for ``(batch, token, dim)``.
        damping: ω.
        window: of Anderson.
        order: highest order of exact derivatives.
        scale: a number, or a tensor that broadcasts to ``(...)``: the unit of the residuals of small states.
        throw: raise where a sample does not converge. If False, `solution` has the status, and gradients
            are taken at the point where the solver stopped.
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
        order: int = 2,
        scale: float | Tensor | None = None,
        throw: bool = True,
        strict: bool | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise ArgumentError(
                f"Equilibrium: module is a {kind}. Pass an nn.Module that is called as module(z, x)."
            )
        super().__init__()
        self.module = module
        self.options = Options(
            *("Equilibrium", solver, tolerance, max_steps, event_dims, damping, window),
            *(order, scale, throw, strict),
        )
        self._solution: Solution[Tensor] | None = None
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    @property
    def solution(self) -> Solution[Tensor] | None:
        """The `Solution` of the last call, without a graph; None before the first, or under a transform."""
        return self._solution

    def forward(self, x: Any, start: Tensor | None = None, **inputs: Any) -> Tensor:
        """The fixed point z = module(z, x).

        Args:
            x: ``(...)``, or whatever else `module` takes beside z, such as a tuple; injected at every step.
            start: ``(..., *event)``, where the solver begins; default zeros like x, which must then be
                a tensor. The result depends on it only if there are several fixed points.
            **inputs: further inputs, passed on by name: ``module(z, x, mask=mask)``.

        Returns:
            z ``(..., *event)``, like `start`.
        """
        if start is None and not isinstance(x, Tensor):
            raise ArgumentError(
                f"Equilibrium: x is a {type(x).__name__}, which does not say what shape z has. Pass start=, "
                "a tensor where the solver begins, such as torch.zeros(batch, dim)."
            )
        begin = torch.zeros_like(x) if start is None else start
        found = solve(lambda z: self.module(z, x, **inputs), begin, self.options)
        # Tensors of a transform cannot be read once it has ended.
        self._solution = None if in_transform() else replace(found, value=found.value.detach())
        return found.value

    def extra_repr(self) -> str:
        """The options that are set, as ``print`` shows them beside the module."""
        shown = {name: x for name, x in vars(self.options).items() if name != "caller" and x is not None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _without_prefix(self: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _with_prefix(self: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
