"""What a hidden key or its value holds reaches no result; what a visible one holds does.

Caches are longer than what has been written to them, and padding holds anything: NaN, infinities, numbers
near the end of the range. Results, gradients, tangents and second derivatives must be those of other numbers
in their place.
"""

import math

import pytest
import torch
from torch.func import grad, jvp

import exptilt as xt
from oracles.tilting_fuzz import small_tiles
from tilting.cases import normal

ROWS = ("output", "log_normalizer", "entropy", "score_mean", "score_variance", "score_max")
INPUTS = ("query", "key", "value", "bias", "log_weight")
# queries, keys, dim, value dim, query heads, key heads: few queries, few keys, several tiles, no values
SIZES = [(3, 40, 7, 5, 2, 2), (20, 6, 16, 8, 2, 1), (30, 70, 9, 17, 4, 2), (10, 37, 8, 0, 8, 1)]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


def problem(sizes, dtype, seed=0):
    Q, K, D, Dv, heads, key_heads = sizes
    g = torch.Generator().manual_seed(seed)
    shapes = (2, heads, Q, D), (2, key_heads, K, D), (2, key_heads, K, Dv), (Q, K), (key_heads, K)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype if i < 3 else wide) for i, x in enumerate(made)]


def everything(tensors, options):
    """Results and derivatives of all orders, by name."""

    def results(*tensors):
        query, key, value, bias, log_weight = tensors
        a = xt.attend(
            query, key, value, bias=bias, log_weight=log_weight, key_mass=True, check=False, **options
        )
        return {name: getattr(a, name) for name in (*ROWS, "key_mass")}

    def loss(*tensors):
        found = results(*tensors)
        return sum(torch.where(found[name].isinf(), 0.0, found[name].double()).sin().sum() for name in ROWS)

    def rows(*tensors):
        return tuple(results(*tensors)[name] for name in ROWS)

    dots = tuple(torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape).to(x) for x in tensors)
    slopes = grad(loss, tuple(range(5)))
    found = results(*tensors)
    found |= {f"d {name}": x for name, x in zip(INPUTS, slopes(*tensors), strict=True)}
    found |= {
        f"tangent of {name}": x for name, x in zip(ROWS, jvp(rows, tuple(tensors), dots)[1], strict=True)
    }
    second = jvp(slopes, tuple(tensors), dots)[1]
    return found | {f"second {name}": x for name, x in zip(INPUTS, second, strict=True)}


def assert_same(found, expected, tolerance):
    for name, x in expected.items():
        scale = 1 + (x[x.isfinite()].abs().max() if x.isfinite().any() else 0)
        torch.testing.assert_close(
            found[name] / scale,
            x / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def filled(tensors, hidden):
    """The tensors with garbage in hidden keys and their values, another kind in each."""
    full = [x.clone() for x in tensors]
    kinds = math.nan, math.inf, -math.inf, torch.finfo(tensors[0].dtype).max
    for i, place in enumerate(hidden.nonzero()[:, 0].tolist()):
        full[1][..., place, :] = full[2][..., place, :] = kinds[i % 4]
    return full


@pytest.mark.parametrize(
    ("dtype", "softcap", "small"),
    [
        (torch.float32, None, False),
        (torch.float32, 3.0, False),
        (torch.float32, 3.0, True),
        (torch.float64, 3.0, True),
        (torch.bfloat16, 3.0, False),
        (torch.float16, None, True),
    ],
)
@pytest.mark.parametrize("sizes", SIZES)
def test_masked_keys_may_hold_anything(sizes, dtype, softcap, small):
    tensors, hidden = problem(sizes, dtype), torch.arange(sizes[1]) % 3 == 0
    options = {"mask": ~hidden, "softcap": softcap}
    with small_tiles(small):
        found, expected = everything(filled(tensors, hidden), options), everything(tensors, options)
    assert_same(found, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_keys_outside_of_the_window_may_hold_anything(sizes, softcap):
    tensors = problem(sizes, torch.float32)
    Q, K = sizes[:2]
    options = {"causal": True, "window": 3, "softcap": softcap}
    hidden = torch.arange(K) < K - Q - 2  # no query sees these
    assert_same(everything(filled(tensors, hidden), options), everything(tensors, options), 3e-4)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("place", [3, 4])  # bias, log_weight
@pytest.mark.parametrize("sizes", SIZES)
def test_values_of_weight_zero_may_hold_anything(sizes, place, small):
    """A key is also hidden by a bias or a log-weight of −inf; its score must be a number then."""
    tensors = problem(sizes, torch.float32)
    hidden = torch.arange(sizes[1]) % 3 == 0
    tensors[place][..., hidden] = -math.inf
    full = [x.clone() for x in tensors]
    full[2][..., hidden, :] = math.nan
    with small_tiles(small):
        assert_same(everything(full, {}), everything(tensors, {}), 3e-4)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("sizes", [(3, 40, 7, 5, 2, 2), (40, 40, 9, 17, 4, 2)])
def test_a_key_reaches_those_that_see_it_and_no_other(sizes, small):
    """Key and value 30 are NaN: earlier queries of a causal model know nothing of it, later ones all."""
    query, key, value, bias, log_weight = problem(sizes, torch.float32)
    Q, K = sizes[:2]
    key[..., 30, :] = math.nan
    value[..., 30, :] = math.nan
    sees = torch.arange(Q) + K - Q >= 30
    options = {"bias": bias, "log_weight": log_weight, "causal": True, "check": False}
    query.requires_grad_()
    with small_tiles(small):
        a = xt.attend(query, key, value, **options)
        (slope,) = torch.autograd.grad(a.output[:, :, ~sees].sum() + a.entropy[:, :, ~sees].sum(), query)
    for name in ("output", "log_normalizer", "entropy"):
        x = getattr(a, name)
        assert x[:, :, sees].isnan().all(), name
        assert x[:, :, ~sees].isfinite().all(), name
    assert slope[:, :, ~sees].isfinite().all()


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("sizes", SIZES[:3])
def test_a_visible_value_reaches_output_and_derivatives(sizes, small):
    query, key, value, _, _ = problem(sizes, torch.float32)
    value[..., 1, 2] = math.nan
    query.requires_grad_()
    value.requires_grad_()
    with small_tiles(small):
        a = xt.attend(query, key, value, check=False)
        assert a.output[..., 2].isnan().all()
        assert a.output[..., [0, 1, 3, 4]].isfinite().all()
        assert a.log_normalizer.isfinite().all()
        by_query, by_value = torch.autograd.grad(a.output.sum(), (query, value))
        pushed = jvp(
            lambda q: xt.attend(q, key, value, check=False).output, (query,), (torch.ones_like(query),)
        )[1]
    assert by_query.isnan().all()
    assert by_value.isfinite().all()
    assert pushed[..., 2].isnan().all()
    assert pushed[..., [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("hide", ["mask", "causal"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_key_that_is_no_number(backend, queries, hide, bad):
    """What no query sees reaches neither a result, nor a gradient, nor a tangent."""
    K = 30
    q, k, v = normal(0, 1, queries, 4), normal(1, 1, K, 4), normal(2, 1, K, 3)
    place = K - 1 if hide == "causal" else 7
    k_bad = k.clone()
    k_bad[0, place] = bad
    seen = torch.ones(K, dtype=torch.bool)
    seen[place] = False
    if hide == "causal":  # the last key is hidden from all but the last query, which is left out
        padded = torch.cat([q, q[:, :1]], 1)

        def function(q_, k_):
            a = xt.attend(
                torch.cat([q_, padded[:, -1:]], 1), k_, v, causal=True, backend=backend, check=False
            )
            return a.output[:, :-1], a.entropy[:, :-1], a.score_variance[:, :-1], a.score_max[:, :-1]
    else:

        def function(q_, k_):
            a = xt.attend(q_, k_, v, backend=backend, key_mass=True, mask=seen)
            return a.output, a.entropy, a.score_variance, a.score_max, a.key_mass

    for x, y in zip(function(q, k_bad), function(q, k), strict=True):
        torch.testing.assert_close(x, y)
    if hide == "causal":
        moved = torch.func.jvp(lambda x: function(x, k_bad), (q,), (torch.ones_like(q),))[1]
    else:
        leaf, leaf_k = q.clone().requires_grad_(), k_bad.clone().requires_grad_()
        slopes = torch.autograd.grad(sum(x.sin().sum() for x in function(leaf, leaf_k)), (leaf, leaf_k))
        assert slopes[0].isfinite().all()
        assert slopes[1].isfinite().all()
        moved = torch.func.jvp(lambda x: function(x, k_bad), (q,), (torch.ones_like(q),))[1]
    for x, y in zip(
        moved, torch.func.jvp(lambda x: function(x, k), (q,), (torch.ones_like(q),))[1], strict=True
    ):
        torch.testing.assert_close(x, y)
