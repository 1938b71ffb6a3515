"""`torch.compile(fullgraph=True)` of a function that calls attend, with gradients."""

import pytest
import torch

import exptilt as xt
from tilting.cases import normal


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fullgraph(compiler):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3)]
    sink = torch.randn(4, requires_grad=True)
    bias = torch.randn(4, 1, 33, requires_grad=True)

    def loss(q, k, v, sink, bias):
        a = xt.attend(q.sin(), k, v, causal=True, sink=sink, bias=bias, key_mass=True)
        statistics = a.entropy.square() + a.log_normalizer + a.score_variance + a.score_mean + a.score_max
        return a.output.cos().sum() + statistics.sum() + a.key_mass.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=compiler)
    inputs = (*tensors, sink, bias)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


def test_gradients_that_are_the_same_sum():
    """Bias and log-weight that differ by key alone have one gradient, and each gets its own copy."""
    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    inputs = [torch.zeros(shape, requires_grad=True) for shape in ((1, 2, 1, 6), (1, 2, 6))]

    def loss(bias, log_weight):
        a = xt.attend(x, x, x, bias=bias, log_weight=log_weight, key_mass=True)
        return a.output.sin().sum() + a.key_mass.square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_result_object_comes_out_of_a_compiled_function():
    q = torch.randn(1, 2, 8, 4)
    a = torch.compile(lambda x: xt.attend(x, x, x), fullgraph=True, backend="aot_eager")(q)
    assert isinstance(a, xt.AttentionResult)
    assert torch.allclose(a.entropy, xt.attend(q, q, q).entropy)
    G = torch.compile(lambda x: xt.log_normalizer(x, x), fullgraph=True, backend="aot_eager")(q)
    assert torch.allclose(G, a.log_normalizer)


@pytest.mark.slow
def test_transforms_inside_and_around_a_compiled_function():
    """Where the compiler would not see a rule's derivative it must get the right number, not a zero."""
    g = torch.Generator().manual_seed(0)
    q, v = torch.randn(3, dtype=torch.float64, generator=g), torch.randn(3, dtype=torch.float64, generator=g)
    k = torch.randn(1, 9, 3, dtype=torch.float64, generator=g)

    def output(q):
        return xt.attend(q[None, None], k, k).output[0, 0]

    def G(q):
        return xt.log_normalizer(q[None, None], k).sum()

    def dual(q):
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(
                output(torch.autograd.forward_ad.make_dual(q, v))
            ).tangent

    inside = {
        "jvp": lambda q: torch.func.jvp(output, (q,), (v,))[1],
        "per sample": lambda q: torch.func.vmap(torch.func.grad(G))(torch.stack([q, 2 * q])),
        "dual": dual,
    }
    for name, f in inside.items():
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(f, backend="eager")(q), f(q), msg=lambda text, name=name: f"{name}: {text}"
        )
    torch._dynamo.reset()
    around = torch.compile(G, backend="eager")
    torch.testing.assert_close(torch.func.grad(around)(q), torch.func.grad(G)(q))


def test_fisher_product_between_compiled_parts():
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in (normal(0, 2, 5, 4), normal(1, 1, 9, 4), normal(2, 2, 5, 4))]

    def product(q, k, v):
        return xt.fisher_vector_product(q.sin(), k, v, causal=True, softcap=3.0).cos().sum()

    expected = torch.autograd.grad(product(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(product, backend="aot_eager")(*inputs), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
