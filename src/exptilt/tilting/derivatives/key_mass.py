"""The key mass Σ_i p_ij and G's Hessian: derivatives of Σ_i G_i, made of the rules' gradient."""

from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import apply, derivatives_wanted, never_compiled
from exptilt.tilting.derivatives.identities import Cotangents, Statistics
from exptilt.tilting.derivatives.rules import GRADIENT, Attend, Gradient, pull_gradient
from exptilt.tilting.problem import MASS, Inputs, InputTangents, Settings


def sum_of_G(
    t: Inputs, shift: Tensor, weight: Tensor, gap: Tensor, variance: Tensor
) -> tuple[Inputs, Cotangents, Statistics]:
    """Inputs, cotangents and statistics of `rules.Gradient` for derivatives of Σ_i G_i."""
    nothing = gap.new_zeros((*gap.shape, 0))
    zero = torch.zeros_like(gap)
    bar = Cotangents(nothing, torch.ones_like(gap), zero, zero)
    return t._replace(value=t.key[..., :0]), bar, Statistics(nothing, shift, weight, gap, variance)


def with_own_weights(t: Inputs) -> Inputs:
    """Inputs with a log-weight for each query head, so that its gradient is the key mass of each head."""
    heads = t.query.shape[-3]
    dtype = torch.promote_types(t.query.dtype, torch.float32)
    if t.log_weight is None:
        weight = t.query.new_zeros((), dtype=dtype).expand(*t.query.shape[:-2], t.key.shape[-2])
        # old compilers know neither _replace nor t[:4]
        return Inputs(t.query, t.key, t.value, t.bias, weight, t.sink, t.mask, t.packing)
    lead, K = t.query.shape[:-3], t.key.shape[-2]
    weight = (
        t.log_weight.unsqueeze(-2)
        .expand(*t.log_weight.shape[:-1], heads // t.log_weight.shape[-2], K)
        .flatten(-3, -2)
    )
    weight = weight.expand(*lead, heads, K)
    return Inputs(t.query, t.key, t.value, t.bias, weight, t.sink, t.mask, t.packing)


def key_mass(
    t: Inputs, shift: Tensor, weight: Tensor, gap: Tensor, variance: Tensor, settings: Settings
) -> Tensor:
    """The key mass (..., Hq, K), with all of its derivatives; t comes from `with_own_weights`."""
    inputs, bar, stats = sum_of_G(t, shift, weight, gap, variance)
    only = Settings(settings.rule, settings.backend, needs=MASS)
    rule = Gradient.apply if derivatives_wanted(t) else Gradient.forward
    return rule(*GRADIENT.flat(only, inputs=inputs, bar=bar, stats=stats))[4]


def pull_key_mass(
    t: Inputs,
    shift: Tensor,
    weight: Tensor,
    gap: Tensor,
    variance: Tensor,
    bar: Tensor,
    settings: Settings,
    wanted: Any,
) -> InputTangents:
    """Gradients by the wanted inputs from a cotangent of the key mass."""
    inputs, ones, stats = sum_of_G(t, shift, weight, gap, variance)
    return pull_gradient(inputs, ones, stats, InputTangents(log_weight=bar), settings, wanted)[0]


@never_compiled
def hessian_product(t: Inputs, vector: Tensor, settings: Settings) -> Tensor:
    """(..., Hq, Q, D): the derivative along vector of ∇(Σ_i G_i) by the query, a second derivative of G."""
    found = [x.detach() for x in apply(Attend, *t, settings)]
    variance, weight, gap, shift = found[4], found[6], found[7], found[8]
    inputs, bar, stats = sum_of_G(t, shift, weight, gap, variance)
    wanted = (True, False, False, False, False, False)
    product = pull_gradient(inputs, bar, stats, InputTangents(query=vector), settings, wanted)[0].query
    assert product is not None
    return product
