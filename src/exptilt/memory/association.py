r"""Association: states settle among keys, then read values. One function, which the layers of ``layers.py`` and nothing else wrap.

    ξ ← Σ_n softmax_n(β_h <k_n, ξ>) k_n      (steps − 1 times, or to the fixed point)
    z = Σ_n softmax_n(β_h <k_n, ξ>) v_n

With one step this is attention with scale β_h; β is one number a head, and multiplies that head's queries and no others.
"""

from functools import partial

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.attention import attend
from exptilt.dynamics import fixed_point
from exptilt.memory.patterns import wide


def check_steps(what: str, steps: int | None) -> None:
    """Steps are an integer, at least 1, or None."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ArgumentError(f"{what}: steps is {steps!r}. Pass an integer >= 1, or None for the fixed point.")


def _check_heads(query: Tensor, beta: Tensor) -> None:
    """Beta ``(..., H)`` goes with the heads of the query ``(..., H, Q, D)``."""
    if query.ndim < 3:
        raise ArgumentError(f"associate: query has shape {tuple(query.shape)}. Pass (..., H, Q, D).")
    try:
        fits = torch.broadcast_shapes(beta.shape, query.shape[:-2])[-1] == query.shape[-3]
    except RuntimeError:
        fits = False
    if not fits:
        got = f"beta has shape {tuple(beta.shape)}, query {tuple(query.shape)}"
        raise ArgumentError(
            f"associate: {got}, which has {query.shape[-3]} heads. Pass one beta a head: (..., {query.shape[-3]})."
        )


def associate(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, steps: int | None = 1, mask: Tensor | None = None,
    tolerance: float = 1e-4, max_steps: int = 100, throw: bool = True,
) -> Tensor:  # fmt: skip
    """States that settle among the keys of their head, and read its values.

    Args:
        query: ``(..., H, Q, D)``, the states to begin with.
        key: ``(..., H, N, D)``, the stored patterns.
        value: ``(..., H, N, Dv)``, what they stand for.
        beta: ``(..., H)``, one inverse temperature a head, > 0.
        steps: updates in all, the last of which reads the values; None goes to the fixed point, differentiated implicitly. A fixed point
            does not depend on where one came from, so with None **no gradient reaches query**.
        mask: booleans that broadcast to ``(..., H, Q, N)``, True where a state may see a pattern.
        tolerance: of the fixed point's residual ‖step(ξ) − ξ‖/‖ξ‖.
        max_steps: on the way to it.
        throw: raise where it is not reached; False reads from where the states stand.

    Returns:
        ``(..., H, Q, Dv)``.

    Example:
        >>> x = torch.eye(4)[None]
        >>> associate(x[:, :1], x, x, torch.tensor([20.0])).round(decimals=3)
        tensor([[[1., 0., 0., 0.]]])
    """
    check_steps("associate", steps)
    if not isinstance(beta, Tensor) or not beta.is_floating_point():
        got = f"of dtype {beta.dtype}" if isinstance(beta, Tensor) else f"a {type(beta).__name__}"
        raise ArgumentError(
            f"associate: beta is {got}. Pass a floating tensor (..., H), one number a head: torch.full((H,), beta)."
        )
    if is_concrete(beta) and not bool(((beta > 0) & beta.isfinite()).all()):
        raise ArgumentError(
            f"associate: beta is {beta.tolist()}. It is an inverse temperature: pass finite numbers > 0."
        )
    _check_heads(query, beta)
    factor = beta[..., None, None]

    def sharpened(state: Tensor) -> Tensor:
        return (state * factor).to(state.dtype)  # under autocast states are narrower than β

    def update(state: Tensor, key: Tensor = key) -> Tensor:
        return attend(sharpened(state), key, key, scale=1.0, mask=mask).output

    state = query
    if steps is None:
        exact = wide(query.dtype)  # no half precision comes within the tolerance
        with torch.autocast(query.device.type, enabled=False):
            found = fixed_point(
                partial(update, key=key.to(exact)),
                query.to(exact),
                solver="picard",
                tolerance=tolerance,
                max_steps=max_steps,
                throw=throw,
            )
        state = found.value.to(query.dtype)
    else:
        for _ in range(steps - 1):
            state = update(state)
    return attend(sharpened(state), key, value, scale=1.0, mask=mask).output
