"""Second derivatives in every order of nesting, of functions that torch gets wrong in some of them."""

import pytest
import torch
import transformers as tf
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import exptilt as xt

pytestmark = pytest.mark.filterwarnings(
    "ignore:differentiable. .* none of its attention",
    "ignore:There is a performance drop",
    "ignore:.torch.jit",
)
C = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4).sin()


def square(w):
    return w[:9].reshape(3, 3)


CASES = {
    "layer_norm": lambda w: F.layer_norm(w[8:20].reshape(3, 4), (4,), w[:4], w[4:8]) * C,
    "layer_norm, no weight": lambda w: F.layer_norm(w[:12].reshape(3, 4), (4,)) * C,
    "torch.layer_norm": lambda w: torch.layer_norm(w[8:20].reshape(3, 4), (4,), w[:4], w[4:8]) * C,
    "batch_norm": lambda w: F.batch_norm(w[8:20].reshape(3, 4), None, None, w[:4], w[4:8], True) * C,
    "instance_norm": lambda w: F.instance_norm(w[8:20].reshape(1, 3, 4), None, None, w[:3], w[4:7])[0] * C,
    "det": lambda w: torch.linalg.det(square(w)),
    "slogdet": lambda w: torch.linalg.slogdet(square(w)).logabsdet,
    "logdet": lambda w: torch.logdet(square(w) @ square(w).T),
    "solve": lambda w: torch.linalg.solve(square(w), w[9:12]),
    "solve, from the right": lambda w: torch.linalg.solve(square(w), w[9:15].reshape(2, 3), left=False),
    "weight_norm": lambda w: torch._weight_norm(w[3:15].reshape(3, 4), w[:3, None], 0) * C,
    # some that torch gets right, to see that they stay so
    "group_norm": lambda w: F.group_norm(w[8:20].reshape(1, 4, 3), 2, w[:4], w[4:8]),
    "rms_norm": lambda w: F.rms_norm(w[8:20].reshape(3, 4), (4,), w[:4]) * C,
    "batch_norm, evaluation": lambda w: F.batch_norm(
        w[8:20].reshape(3, 4), torch.zeros(4).double(), torch.ones(4).double(), w[:4], w[4:8]
    ),
}


def plain(loss, w, along):
    """A plain backward pass over what `along` makes of a leaf."""
    x = w.clone().requires_grad_()
    return torch.autograd.grad(along(loss, x), x)[0]


def level(loss, w, v):
    x = w.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(x, v))).tangent
        return torch.autograd.grad(tangent, x)[0]


NESTINGS = {
    "jvp of grad": lambda f, w, v: jvp(grad(f), (w,), (v,))[1],
    "grad of jvp": lambda f, w, v: grad(lambda w: jvp(f, (w,), (v,))[1])(w),
    "hessian": lambda f, w, v: hessian(f)(w) @ v,
    "jacrev twice": lambda f, w, v: jacrev(jacrev(f))(w) @ v,
    "jacfwd twice": lambda f, w, v: jacfwd(jacfwd(f))(w) @ v,
    "backward over jvp": lambda f, w, v: plain(f, w, lambda f, x: jvp(f, (x,), (v,))[1]),
    "backward over grad": lambda f, w, v: plain(f, w, lambda f, x: grad(f)(x) @ v),
    "backward over vmap of vjp": lambda f, w, v: plain(
        f, w, lambda f, x: vmap(vjp(f, x)[1])(torch.ones(1).double())[0][0] @ v
    ),
    "backward over vmap of grad": lambda f, w, v: plain(f, w, lambda f, x: vmap(grad(f))(x[None])[0] @ v),
    "backward over a forward level": level,
}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, w):
        return self.function(w).tanh().square().sum()


@pytest.mark.parametrize("name", CASES)
def test_every_nesting_is_the_derivative_of_the_gradient(name):
    g = torch.Generator().manual_seed(0)
    w, v = torch.randn(2, 20, dtype=torch.float64, generator=g)
    loss = Function(CASES[name])

    def slope(step):
        ends = [plain(loss, w + sign * step * v, lambda f, x: f(x)) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    wanted = (4 * slope(1e-4) - slope(2e-4)) / 3
    with xt.differentiable(loss):
        for nesting, way in NESTINGS.items():
            found = way(loss, w, v)
            assert (found - wanted).abs().max() < 1e-7 * wanted.abs().max(), nesting
        value = loss(w)
    torch.testing.assert_close(value, loss(w), rtol=1e-12, atol=1e-12)


def test_values_under_a_forward_derivative_are_those_of_torch():
    """Also in bfloat16 with float32 weights, as under autocast, and running statistics move once."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 4, generator=g), torch.randn(4, generator=g)
    wanted = F.layer_norm(x.bfloat16(), (4,), weight, weight)
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other(x)
    layer = nn.LayerNorm(4)
    with xt.differentiable(layer):
        found = jvp(lambda x: F.layer_norm(x, (4,), weight, weight), (x.bfloat16(),), (x.bfloat16(),))[0]
        with forward_ad.dual_level():  # torch.func refuses to move running statistics
            norm(forward_ad.make_dual(x, x))
        A = torch.randn(2, 3, 3, generator=g)
        functions = (torch.linalg.det, lambda A: A.slogdet()[0], torch.logdet)
        pairs = [(f(A), jvp(f, (A,), (A,))[0]) for f in functions]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(norm.running_var, other.running_var)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_a_model_that_attends_by_the_interface_alone_is_corrected_too():
    """A GPT-2: the gradient of a forward derivative was wrong by 10 % and more."""
    g = torch.Generator().manual_seed(1)
    sizes = {"vocab_size": 7, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8, "n_inner": 6}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()
    weights = {k: p.detach() + 0.3 * torch.randn(p.shape, generator=g) for k, p in model.named_parameters()}
    along = {k: torch.randn(p.shape, generator=g).double() for k, p in weights.items()}
    ids = torch.randint(7, (2, 5), generator=g)

    def loss(w):
        return functional_call(model, w, (ids,), {"use_cache": False}).logits.tanh().square().sum()

    with xt.differentiable(model):
        wanted = jvp(grad(loss), (weights,), (along,))[1]
        found = grad(lambda w: jvp(loss, (w,), (along,))[1])(weights)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9)
