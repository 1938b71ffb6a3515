"""`torch.compile(fullgraph=True)` of a function that calls attend, with gradients."""

import pytest
import torch

import exptilt as xt


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
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


def test_result_object_comes_out_of_a_compiled_function():
    q = torch.randn(1, 2, 8, 4)
    a = torch.compile(lambda x: xt.attend(x, x, x), fullgraph=True, backend="aot_eager")(q)
    assert isinstance(a, xt.Tilted)
    assert torch.allclose(a.entropy, xt.attend(q, q, q).entropy)
    G = torch.compile(lambda x: xt.log_normalizer(x, x), fullgraph=True, backend="aot_eager")(q)
    assert torch.allclose(G, a.log_normalizer)
