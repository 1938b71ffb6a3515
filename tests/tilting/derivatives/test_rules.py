"""Every derivative of every statistic: against finite differences and torch's own of the reference."""

import pytest
import torch
from hypothesis import given, settings
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import exptilt as xt
from exptilt.tilting.backends import cpu, layout
from tilting.cases import BACKENDS, FIELDS, normal, problems

OPTIONS = [
    {},
    {"causal": True, "sink": 4},
    {"softcap": 1.5, "window": 3, "bias": (4, 5, 6)},
    {"bias": (1, 1, 5, 1), "log_weight": (2, 2, 6)},
    {"softcap": 1.5, "causal": True, "bias": (4, 1, 6), "sink": 4, "log_weight": (1, 6)},
    {"bias": (2, 1, 5, 6), "mask": (5, 6)},
]


def setting(options, requires_grad=True, seed=0):
    """A small problem: names and tensors to differentiate by, and the options that are not differentiable."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_(requires_grad)

    tensors = {"query": random(2, 4, 5, 3), "key": random(2, 2, 6, 3), "value": random(2, 2, 6, 2)}
    rest = {}
    for name, x in options.items():
        if name == "mask":
            rest[name] = torch.rand(x, generator=g) < 0.7
        elif name in ("bias", "log_weight", "sink"):
            tensors[name] = random(*(x if isinstance(x, tuple) else (x,)))
        else:
            rest[name] = x
    return tensors, rest


def function(names, rest, backend, fields=FIELDS):
    def attend(*tensors):
        a = xt.attend(
            **dict(zip(names, tensors, strict=True)), **rest, key_mass="key_mass" in fields, backend=backend
        )
        return tuple(torch.where(x == -torch.inf, 0.0, x) for x in (getattr(a, name) for name in fields))

    return attend


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_gradcheck(options, backend):
    tensors, rest = setting(options)
    f = function(tensors, rest, backend)
    assert gradcheck(f, tuple(tensors.values()), check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS[::2], ids=lambda o: "+".join(o) or "plain")
def test_gradgradcheck(options):
    tensors, rest = setting(options)
    f = function(tensors, rest, "cpu", FIELDS[:-1])
    assert gradgradcheck(f, tuple(tensors.values()), fast_mode=True, check_fwd_over_rev=True)


def scalar(attend, seed=1):
    """A loss that mixes all outputs with random weights, some of them nonlinearly."""
    g = torch.Generator().manual_seed(seed)

    def loss(*tensors):
        g.manual_seed(seed)
        total = torch.zeros((), dtype=torch.float64)
        for x in attend(*tensors):
            total = (
                total + (torch.randn(x.shape, generator=g, dtype=torch.float64) * (x + 0.1 * x.sin())).sum()
            )
        return total

    return loss


def largest_gap(a, b):
    a, b = torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b)
    assert len(a) == len(b)
    return max(float(((x - y).abs() / (1 + y.abs())).max()) for x, y in zip(a, b, strict=True) if y.numel())


ORDERS = {
    "forward": lambda f, x, u, w: jvp(f, x, u)[1],
    "backward": lambda f, x, u, w: grad(f, argnums=tuple(range(len(x))))(*x),
    "forward over backward": lambda f, x, u, w: jvp(grad(f, argnums=tuple(range(len(x)))), x, u)[1],
    "backward over forward": lambda f, x, u, w: grad(
        lambda *y: jvp(f, y, u)[1], argnums=tuple(range(len(x)))
    )(*x),
    "backward over backward": lambda f, x, u, w: vjp(grad(f, argnums=tuple(range(len(x)))), *x)[1](u),
    "forward over forward": lambda f, x, u, w: jvp(lambda *y: jvp(f, y, u)[1], x, w)[1],
    "third: backward over forward over backward": lambda f, x, u, w: grad(
        lambda *y: sum(
            (a * b).sum() for a, b in zip(jvp(grad(f, argnums=tuple(range(len(x)))), y, u)[1], w, strict=True)
        )
    )(*x),
    "third: forward three times": lambda f, x, u, w: jvp(
        lambda *z: jvp(lambda *y: jvp(f, y, u)[1], z, w)[1], x, u
    )[1],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options", [OPTIONS[0], OPTIONS[4], OPTIONS[5]], ids=lambda o: "+".join(o) or "plain"
)
def test_orders_against_reference(order, options):
    tensors, rest = setting(options, requires_grad=False)
    x = tuple(tensors.values())
    g = torch.Generator().manual_seed(2)
    u, w = (tuple(torch.randn(y.shape, generator=g, dtype=y.dtype) for y in x) for _ in range(2))
    found = ORDERS[order](scalar(function(tensors, rest, "cpu")), x, u, w)
    expected = ORDERS[order](scalar(function(tensors, rest, "reference")), x, u, w)
    assert largest_gap(found, expected) < 1e-10


@pytest.mark.parametrize("field", ["output", "log_normalizer", "entropy", "score_variance", "key_mass"])
def test_jacobians_and_hessians(field):
    tensors, rest = setting({"sink": 4}, requires_grad=False)
    x = tuple(y[:1, :, :3] if y.dim() == 4 else y for y in tensors.values())
    every = tuple(range(len(x)))
    ours, oracle = (function(tensors, rest, backend, (field,)) for backend in ("cpu", "reference"))
    for transform in (jacrev, jacfwd):
        assert largest_gap(transform(ours, argnums=every)(*x), transform(oracle, argnums=every)(*x)) < 1e-12
    second = [hessian(lambda *y, f=f: f(*y)[0].sin().sum(), argnums=(0, 1))(*x) for f in (ours, oracle)]
    assert largest_gap(*second) < 1e-12


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problem=problems(largest=9, least_keys=1))
def test_gradients_over_random_options(problem):
    query, key, value, rest = problem
    tensors = {"query": query, "key": key, "value": value}
    tensors |= {name: rest.pop(name) for name in ("bias", "log_weight", "sink") if name in rest}
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"].clamp(min=-50)
    x = tuple(tensors.values())
    found, expected = (
        grad(scalar(function(tensors, rest, b)), argnums=tuple(range(len(x))))(*x)
        for b in ("cpu", "reference")
    )
    assert largest_gap(found, expected) < 1e-9
    found, expected = (jvp(scalar(function(tensors, rest, b)), x, x)[1] for b in ("cpu", "reference"))
    assert largest_gap(found, expected) < 1e-9


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_gradients_over_many_tiles(threads):
    """Several tiles each way, few key heads: the queries of a head are dealt out to several units."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, 2, 700, 8).double(),
            torch.randn(1, 1, 900, 8).double(),
            torch.randn(1, 1, 900, 8).double(),
        )
        bias = torch.randn(1, 700, 900).double()
        x, u = (q, k, v, bias), tuple(torch.randn_like(y) for y in (q, k, v, bias))
        names = ("query", "key", "value", "bias")
        fields = ("output", "entropy", "log_normalizer")
        ours, oracle = (scalar(function(names, {"causal": True}, b, fields)) for b in ("cpu", "reference"))
        for order in ("backward", "forward", "forward over backward"):
            assert largest_gap(ORDERS[order](ours, x, u, u), ORDERS[order](oracle, x, u, u)) < 1e-9, order
    finally:
        torch.set_num_threads(before)


def test_double_backward_of_a_gradient_penalty():
    tensors, rest = setting({"causal": True})
    values = []
    for backend in ("cpu", "reference"):
        x = [y.detach().clone().requires_grad_() for y in tensors.values()]
        output = function(tensors, rest, backend, ("output",))(*x)[0]
        (g,) = torch.autograd.grad(output.square().sum(), x[0], create_graph=True)
        g.square().sum().backward()
        values.append([y.grad for y in x])
    assert largest_gap(*values) < 1e-11


def test_dual_numbers():
    tensors, rest = setting({}, requires_grad=False)
    x = tuple(tensors.values())
    dots = tuple(torch.randn_like(y) for y in x)
    found = []
    for backend in ("cpu", "reference"):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(a, b) for a, b in zip(x, dots, strict=True)]
            found.append(
                [forward_ad.unpack_dual(y).tangent for y in function(tensors, rest, backend)(*duals)]
            )
    assert largest_gap(*found) < 1e-12


def test_vmap():
    torch.manual_seed(0)
    q, k = torch.randn(7, 3, 2, 5, 4).double(), torch.randn(3, 2, 6, 4).double()
    bias = torch.randn(2, 1, 6).double()
    a = vmap(lambda x: xt.attend(x, k, k, bias=bias, key_mass=True))(q)
    b = xt.attend(
        q, k.expand(7, 3, 2, 6, 4), k.expand(7, 3, 2, 6, 4), bias=bias, key_mass=True, backend="reference"
    )
    for name in FIELDS:
        assert torch.allclose(getattr(a, name), getattr(b, name), atol=1e-12), name

    def loss(backend):
        return lambda x, y, z: xt.attend(x, y, y, bias=z, backend=backend).entropy.sin().sum()

    for in_dims in ((0, None, None), (0, None, 0), (None, None, 0)):
        z = torch.randn(7, 2, 1, 6).double() if in_dims[2] == 0 else bias
        x = q if in_dims[0] == 0 else q[0]
        found, expected = (
            vmap(grad(loss(b), argnums=(0, 1, 2)), in_dims=in_dims)(x, k, z) for b in ("cpu", "reference")
        )
        assert largest_gap(found, expected) < 1e-11


def test_only_what_is_asked_for_gets_a_gradient():
    q, k, v = (
        torch.randn(1, 4, 8, requires_grad=True),
        torch.randn(1, 4, 8),
        torch.randn(1, 4, 8, requires_grad=True),
    )
    a = xt.attend(q, k, v)
    a.entropy.sum().backward(retain_graph=True)
    assert v.grad is None
    a.output.sum().backward()
    assert v.grad is not None
    assert k.grad is None


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_gradients_where_nothing_is_seen(backend):
    """A dead row passes nothing back, whatever comes in."""
    q = torch.randn(1, 3, 4, requires_grad=True)
    k = torch.randn(1, 5, 4, requires_grad=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    a = xt.attend(q, k, k, mask=mask, backend=backend)
    loss = a.output.sum() + a.log_normalizer.square().sum() + a.score_max.sum() + a.entropy.sum()
    gq, gk = torch.autograd.grad(loss, (q, k))
    assert torch.isfinite(gq).all()
    assert torch.isfinite(gk).all()
    assert (gq[0, 1] == 0).all()


def test_fisher_is_the_covariance_of_the_keys():
    torch.manual_seed(0)
    q, k, u = (
        torch.randn(2, 4, 3, 5).double(),
        torch.randn(2, 2, 7, 5).double(),
        torch.randn(2, 4, 3, 5).double(),
    )
    scale = 0.6
    found = xt.fisher_vector_product(q, k, u, scale=scale)
    keys = k.repeat_interleave(2, 1)
    p = torch.softmax(scale * q @ keys.mT, -1)
    mean = p @ keys
    covariance = (
        torch.einsum("nhij,nhja,nhjb->nhiab", p, keys, keys) - mean[..., :, None] * mean[..., None, :]
    )
    assert torch.allclose(found, scale**2 * (covariance @ u[..., None])[..., 0], atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_fisher_is_the_hessian(options):
    tensors, rest = setting(options)
    q, k = tensors.pop("query"), tensors.pop("key")
    tensors.pop("value")
    u = torch.randn_like(q)
    products = [
        xt.fisher_vector_product(q, k, u, **tensors, **rest, backend=b) for b in ("cpu", "tiled", "reference")
    ]
    assert largest_gap(products[0], products[2]) < 1e-12
    assert largest_gap(products[1], products[2]) < 1e-12
    found, expected = (torch.autograd.grad(x.sin().sum(), (q, k)) for x in (products[0], products[2]))
    assert largest_gap(found, expected) < 1e-11


def test_attention_is_the_gradient_of_G():
    """THEORY A1: with keys as values and scale 1, the output is ∇G."""
    q, k = (
        torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(1, 6, 4, dtype=torch.float64),
    )
    (g,) = torch.autograd.grad(xt.log_normalizer(q, k, scale=1.0).sum(), q)
    assert torch.allclose(g, xt.attend(q, k, k, scale=1.0).output, atol=1e-12)


def test_float32_gradients_are_as_good_as_plain_torch():
    torch.manual_seed(0)
    x = [torch.randn(1, 2, 300, 16) for _ in range(3)]
    u = [torch.randn(1, 2, 300, 16) for _ in range(3)]
    names, fields = ("query", "key", "value"), ("output", "entropy", "score_variance", "log_normalizer")

    def all_of(backend, dtype):
        f = scalar(function(names, {"causal": True}, backend, fields))
        y, w = tuple(a.to(dtype) for a in x), tuple(a.to(dtype) for a in u)
        return [
            *ORDERS["backward"](f, y, w, w),
            ORDERS["forward"](f, y, w, w),
            *ORDERS["forward over backward"](f, y, w, w),
        ]

    exact, plain, ours = (
        all_of("reference", torch.float64),
        all_of("reference", torch.float32),
        all_of("cpu", torch.float32),
    )
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6 * (1 + e.abs().max())


ONE_SWEEP = [
    {},
    {"causal": True},
    {"window": 9, "bias": (4, 30, 70)},
    {"mask": (30, 70), "log_weight": (2, 70), "bias": (30, 1)},
]


@pytest.mark.parametrize("options", ONE_SWEEP, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize(
    "fields", [("output", "entropy", "score_variance"), ("log_normalizer", "score_mean")]
)
def test_second_derivatives_over_several_tiles(options, fields, monkeypatch):
    """Of a sweep cut into the smallest tiles, against the whole matrix."""
    g = torch.Generator().manual_seed(4)

    def random(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    tensors = {"query": random(4, 30, 5), "key": random(2, 70, 5), "value": random(2, 70, 3)}
    tensors |= {name: random(*options[name]) for name in ("bias", "log_weight") if name in options}
    rest = {name: x for name, x in options.items() if name not in tensors}
    if "mask" in rest:
        rest["mask"] = torch.rand(rest["mask"], generator=g) < 0.5
        rest["mask"][7] = False  # a row that sees nothing
    leaves = [x.requires_grad_() for x in tensors.values()]
    least = layout.Tuning(cache_bytes=1, backward_rows=13, worth_a_thread=1 << 40)
    monkeypatch.setattr(cpu, "tuning", lambda: least)

    def twice(backend):
        outs = [
            torch.where(x == -torch.inf, 0.0, x) for x in function(tensors, rest, backend, fields)(*leaves)
        ]
        g.manual_seed(5)
        bars = [random(*x.shape).requires_grad_() for x in outs]
        first = torch.autograd.grad(outs, leaves, bars, create_graph=True, allow_unused=True)
        first = [x for x in first if x is not None]
        return torch.autograd.grad(
            first, [*leaves, *bars], [random(*x.shape) for x in first], allow_unused=True
        )

    found, right = ([x for x in twice(backend) if x is not None] for backend in ("cpu", "reference"))
    assert largest_gap(found, right) < 1e-10


def test_third_derivatives_by_backward_passes():
    """Three backward passes."""
    tensors, rest = setting({"causal": True, "bias": (4, 5, 6)})
    x = tuple(tensors.values())
    found = []
    for backend in ("cpu", "reference"):
        order = [scalar(function(tensors, rest, backend))(*x)]
        for seed in range(3):
            g = torch.Generator().manual_seed(seed)
            bars = [torch.randn(y.shape, generator=g, dtype=y.dtype) for y in order]
            order = torch.autograd.grad(order, x, bars, create_graph=True)
        found.append([y.detach() for y in order])
    assert largest_gap(*found) < 1e-9


def _everything(q, k, backend, **options):
    a = xt.attend(q, k, k, key_mass=True, backend=backend, **options)
    return torch.cat(
        [a.output.flatten(), a.entropy.flatten(), a.score_variance.flatten(), a.key_mass.flatten()]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_gradients(backend):
    """`is_grads_batched=True`: many cotangents in one go, as one by one."""
    q, k = (normal(i, 1, n, 3, dtype=torch.float64).requires_grad_() for i, n in ((0, 4), (1, 6)))
    y = _everything(q, k, backend, causal=True, sink=torch.tensor([0.2], dtype=torch.float64))
    bars = normal(2, 5, len(y), dtype=torch.float64)
    found = torch.autograd.grad(y, (q, k), bars, is_grads_batched=True, retain_graph=True)
    expected = [
        torch.stack(x)
        for x in zip(*(torch.autograd.grad(y, (q, k), b, retain_graph=True) for b in bars), strict=True)
    ]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian(backend, strategy):
    q, k = normal(0, 1, 3, 2, dtype=torch.float64), normal(1, 1, 4, 2, dtype=torch.float64)

    def function(q, k):
        return _everything(q, k, backend, scale=0.7)

    jacobian = torch.autograd.functional.jacobian
    found = jacobian(function, (q, k), vectorize=True, strategy=strategy)
    for a, b in zip(found, jacobian(function, (q, k)), strict=True):
        torch.testing.assert_close(a, b)
