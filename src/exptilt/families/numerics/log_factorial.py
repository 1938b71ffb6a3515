r"""Expected log-factorials of counts, by an integral.

    log Γ(x + a) − log Γ(a) = ∫₀^∞ [x e^{−t} − e^{−at} (1 − e^{−xt}) / (1 − e^{−t})] dt/t      (Malmstén)

For random x only the expectation M(t) = E e^{−xt} is needed, which is elementary although the entropy of
counts is not (Knessl 1998); a = 1 gives log x!. In s = log t the integrands are analytic in |Im s| < π/2 and
fall exponentially at both ends, so the trapezoidal rule converges exponentially.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_NODES = 512  # at most 100 units of s in steps of 0.2, with an error below e^{−π²/0.2}


def nodes(least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes ``(..., N)`` and step ``(..., 1)`` for ∫ f(t) dt/t, f negligible outside of least < t < most."""
    low, high = least.log().unsqueeze(-1), most.log().unsqueeze(-1)
    step = (high - low) / (_NODES - 1)
    index = torch.arange(_NODES, dtype=least.dtype, device=least.device)
    return (low + step * index).exp(), step


def expected_log_ratio(a: Tensor, b: Tensor, mean: Tensor, lost: Callable[[Tensor], Tensor]) -> Tensor:
    r"""E[log Γ(x+a)/Γ(a) − log Γ(x+b)/Γ(b)] of counts x, entry by entry, in float64.

    ∫ (e^{−bt} − e^{−at}) (1 − M(t)) / (1 − e^{−t}) dt/t

    Args:
        a: ``(...)``.
        b: ``(...)``.
        mean: ``(...)``, E[x].
        lost: 1 − M(t) ``(..., N)``, as a function of 1 − e^{−t}.
    """
    a, b, mean = torch.broadcast_tensors(a.double(), b.double(), mean)
    t, step = nodes(_TINY / (1 + mean) / (1 + torch.maximum(a, b)), 45 / torch.minimum(a, b))
    one, least, gap = -torch.expm1(-t), torch.minimum(a, b).unsqueeze(-1), (a - b).unsqueeze(-1)
    difference = torch.exp(-least * t) * -torch.expm1(-gap.abs() * t) * gap.sign()
    return (difference * lost(one) / one * step).sum(-1)


def expected_log_coefficient(total: Tensor, log_probability: Tensor) -> Tensor:
    r"""E[log n!/Πx_k!] of multinomial x, ``(...)`` and ``(..., K)`` to ``(...)``, in float64.

    ∫ [Σ_k (1 − M_k(t)) − (1 − e^{−nt})] e^{−t} / (1 − e^{−t}) dt/t,     M_k(t) = (1 − p_k (1 − e^{−t}))^n
    """
    n, p = total.double(), log_probability.double().exp()
    n = n.expand(torch.broadcast_shapes(n.shape, p.shape[:-1]))
    t, step = nodes(_TINY / n**2, torch.full_like(n, 45.0))
    one, many = -torch.expm1(-t), n.unsqueeze(-1)
    each = -torch.expm1(many.unsqueeze(-1) * torch.log1p(-p.unsqueeze(-1) * one.unsqueeze(-2)))
    bracket = each.sum(-2) + torch.expm1(-many * t)
    return (bracket * torch.exp(-t) / one * step).sum(-1)


_TINY = 1e-17
