"""Every derivative of a model inside `differentiable`, against torch's attention written out, in float64."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning
from oracles import tiny_models as models


def problem(name, side=None):
    model = models.make(name, dtype=torch.float64, attention="sdpa")
    inputs, real = models.inputs(name, side, dtype=torch.float64)
    weights = {label: p.detach() for label, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    along = {label: torch.randn(p.shape, generator=generator).to(p) for label, p in weights.items()}

    def loss(weights, given, real):
        return functional_call(model, weights, (), given)[0][real].square().mean()

    return model, inputs, real, weights, along, loss


def close(found, wanted):
    size = max(float(x.abs().max()) for x in wanted.values())
    for label, x in wanted.items():
        torch.testing.assert_close(found[label], x, rtol=1e-9, atol=1e-12 * size)


@pytest.mark.parametrize(
    ("name", "side"), [("gpt2", None), ("bert", "right"), ("bart", "right"), ("vit", None)]
)
def test_derivatives(name, side):
    model, inputs, real, weights, along, loss = problem(name, side)
    inputs |= {} if name == "vit" else {"use_cache": False}

    def everything():
        slope = jvp(lambda w: loss(w, inputs, real), (weights,), (along,))[1]
        product = jvp(grad(lambda w: loss(w, inputs, real)), (weights,), (along,))[1]
        leaves = {label: x.clone().requires_grad_() for label, x in weights.items()}
        slopes = torch.autograd.grad(
            loss(leaves, inputs, real), list(leaves.values()), create_graph=True, allow_unused=True
        )
        squared = sum(x.square().sum() for x in slopes if x is not None)
        twice = torch.autograd.grad(squared, list(leaves.values()), allow_unused=True)
        kept = {label: x for label, x in zip(leaves, twice, strict=True) if x is not None}
        return slope, product, kept

    with pytest.raises(NotImplementedError, match="forward AD"):
        everything()  # what plain torch does
    with sdpa_kernel(SDPBackend.MATH):
        wanted = everything()
    with xt.differentiable(model):
        found = everything()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=0)
    close(found[1], wanted[1])
    close(found[2], wanted[2])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradients_of_each_text_with_its_own_padding(name):
    model, inputs, _, weights, _, _ = problem(name, "right")

    def one(w, tokens, mask):
        given = {"input_ids": tokens[None], "attention_mask": mask[None]}
        output = functional_call(model, w, (), given | {"use_cache": False})[0]
        return (output.square().mean(-1) * mask).sum()

    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    with xt.differentiable(model):
        found = vmap(grad(one), (None, 0, 0))(weights, tokens, mask)
    with sdpa_kernel(SDPBackend.MATH):
        for text in range(len(tokens)):
            wanted = grad(one)(weights, tokens[text], mask[text])
            close({label: x[text] for label, x in found.items()}, wanted)


def test_modules_of_torch_and_a_jacobian():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(1, 4, 8).double()
    for function in (
        layer,
        lambda x: attention(x, x, x)[0],
        lambda x: attention(x, x, x, need_weights=False)[0],
    ):
        with sdpa_kernel(SDPBackend.MATH):
            wanted = jacfwd(function)(x)
        with xt.differentiable(layer), xt.differentiable(attention):
            torch.testing.assert_close(jacfwd(function)(x), wanted, rtol=1e-10, atol=1e-12)


def test_as_a_decorator_and_inside_itself():
    model, inputs, real, weights, along, loss = problem("gpt2")
    inputs["use_cache"] = False

    @xt.differentiable(model)
    def slope(times):
        if times:
            return slope(times - 1)
        return jvp(lambda w: loss(w, inputs, real), (weights,), (along,))[1]

    with sdpa_kernel(SDPBackend.MATH):
        wanted = jvp(lambda w: loss(w, inputs, real), (weights,), (along,))[1]
    torch.testing.assert_close(slope(2), wanted, rtol=1e-9, atol=0)

    def stop():
        with xt.differentiable(model) as same:
            assert same is model
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        stop()
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_bad_input():
    with pytest.raises(ArgumentError, match="model is a str"):
        xt.differentiable("gpt2")
    model = models.make("gpt2", attention="sdpa", attn_pdrop=0.1).train()
    inputs, _ = models.inputs("gpt2")
    with (
        pytest.raises(ArgumentError, match=r"drops attention weights with probability 0\.1"),
        xt.differentiable(model),
    ):
        model(**inputs)
    layer = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = torch.randn(1, 4, 8)
    with pytest.raises(ArgumentError, match=r"MultiheadAttention drops"), xt.differentiable(layer):
        layer(x, x, x, need_weights=False)


def example(name):
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_of_natural_gradients():
    """Its Fisher product against the matrix written out, its solver against a dense one."""
    natural = example("natural_gradient")
    torch.manual_seed(0)
    model = natural.Counter(width=6).double()
    tokens, _ = natural.task(5, torch.Generator().manual_seed(0))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in weights.values()]
    flat = torch.cat([p.flatten() for p in weights.values()])

    def apart(x):
        parts = x.split(sizes)
        return {name: part.view_as(p) for (name, p), part in zip(weights.items(), parts, strict=True)}

    with sdpa_kernel(SDPBackend.MATH):
        J = jacfwd(lambda x: functional_call(model, apart(x), (tokens,)))(flat)
        p = functional_call(model, weights, (tokens,)).softmax(-1).detach()
    dense = sum(j.T @ (torch.diag(q) - q[:, None] * q) @ j for j, q in zip(J, p, strict=True)) / len(tokens)
    vector = torch.randn(len(flat), generator=torch.Generator().manual_seed(1)).double()
    with xt.differentiable(model):
        product = natural.fisher_product(model, tokens)
        found = product(weights, apart(vector))
        solved = natural.conjugate_gradients(
            lambda v: natural.add(product(weights, v), v, 0.1), apart(vector), 15
        )
    close(found, apart(dense @ vector))
    exact = torch.linalg.solve(dense + 0.1 * torch.eye(len(flat)).double(), vector)
    close(solved, apart(exact))


def test_inside_a_watch_and_around_it():
    model, x = models.make("gpt2"), torch.arange(3, 9)[None]
    states = model.get_input_embeddings()(x).detach()

    def push():
        return torch.func.jvp(lambda e: model(inputs_embeds=e)[0], (states,), (torch.ones_like(states),))[1]

    with xt.differentiable(model):
        expected = push()
    with xt.lens.watch(model) as seen, xt.differentiable(model):
        inside = push()
    with xt.differentiable(model), xt.lens.watch(model) as other:
        around = push()
    assert torch.allclose(inside, expected, atol=1e-5)
    assert torch.allclose(around, expected, atol=1e-5)
    assert len(seen.record.calls) == len(other.record.calls) == 2


def test_a_model_that_cannot_be_taken_over_is_told_of():
    class ByHand(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, -1) @ x

    model, x = ByHand(), torch.randn(2, 3, 4)
    with (
        pytest.warns(ExptiltWarning, match=r"ByHand ran, but none of its attention.*or call xt\.attend"),
        xt.differentiable(model),
    ):
        model(x)


def test_nested_derivatives_through_layer_norm():
    """Torch alone takes the norm's mean and deviation for constants in some; `jvp(grad)` is the oracle."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x, v, c = torch.randn(3, 2, 3, 4, dtype=torch.float64, generator=g)
    w, u = torch.randn(2, 4, dtype=torch.float64, generator=g)

    def loss(x, w):
        return (functional_call(layer, {"norm1.weight": w}, (x,)).tanh() * c).sum()

    def along(x, w):
        return jvp(loss, (x, w), (v, u))[1]

    with xt.differentiable(layer):
        wanted = jvp(grad(loss, argnums=(0, 1)), (x, w), (v, u))[1]
        found = [grad(along, argnums=(0, 1))(x, w)]
        for second in (jacfwd, jacrev):
            H = second(jacrev(loss, argnums=(0, 1)), argnums=(0, 1))(x, w)
            found.append([torch.tensordot(row[0], v, 3) + row[1] @ u for row in H])
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        found.append(torch.autograd.grad(along(*leaves), leaves))
    for way in found:
        for a, b in zip(way, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
