"""Every rule of the forward Laplacian equals the trace of torch's Hessian; all else is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import exptilt as xt
from exptilt.taylor import rules
from exptilt.taylor.jets import NoRuleError, words

F64 = torch.float64
X = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(1))


def holds(function, x=X):
    """Value, gradient and Laplacian equal torch's, to 1e-10 of their size."""
    found = xt.laplacian(function, x)
    value = function(x)
    gradient = torch.func.jacrev(function)(x)
    hessian = torch.func.hessian(function)(x).reshape(*value.shape, x.numel(), x.numel())
    for ours, theirs in zip(
        found, (value, gradient, hessian.diagonal(dim1=-2, dim2=-1).sum(-1)), strict=True
    ):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-10 * (1 + theirs.abs().max())


POSITIVE = words("log log1p log2 log10 sqrt rsqrt lgamma digamma float_power")
INSIDE = {  # of functions that are not defined everywhere
    **dict.fromkeys(POSITIVE, lambda x: x.square() + 0.3),
    **dict.fromkeys(words("asin acos atanh erfinv"), lambda x: 0.9 * torch.tanh(x)),
    "acosh": lambda x: x.square() + 1.3,
    "logit": torch.sigmoid,
}
ARGUMENTS = {
    "pow": (3,),
    "float_power": (2.5,),
    "clamp": (-0.4, 0.9),
    "clip": (-0.4, 0.9),
    "clamp_min": (0.1,),
    "clamp_max": (0.1,),
}


@pytest.mark.parametrize("name", sorted(rules.ELEMENTWISE - {"log_sigmoid"}))
def test_elementwise(name):
    place = next(x for x in (torch, F, torch.special) if hasattr(x, name.removeprefix("special_")))
    function = getattr(place, name.removeprefix("special_"))
    inner = INSIDE.get(name, lambda x: x * 1.1)
    holds(lambda x: function(inner(x), *ARGUMENTS.get(name, ())).sum(-1))


LINEAR = {
    "view": (2, 6),
    "reshape": (6, 2),
    "view_as": (torch.empty(2, 6),),
    "reshape_as": (torch.empty(2, 6),),
    "transpose": (0, 1),
    "permute": (1, 0),
    "swapaxes": (0, 1),
    "swapdims": (-1, -2),
    "movedim": (0, 1),
    "expand": (2, 3, 4),
    "expand_as": (torch.empty(2, 3, 4),),
    "broadcast_to": ((2, 3, 4),),
    "unsqueeze": (1,),
    "flatten": (),
    "unflatten": (1, (2, 2)),
    "select": (1, 2),
    "narrow": (1, 1, 2),
    "split": (2, 1),
    "chunk": (2, -1),
    "unbind": (0,),
    "tensor_split": (2, 1),
    "split_with_sizes": ([1, 3], 1),
    "unfold": (1, 2, 1),
    "flip": (0,),
    "roll": (1, 0),
    "diagonal": (),
    "sum": (0,),
    "mean": (-1,),
    "cumsum": (1,),
    "to": (F64,),
    "type_as": (X,),
    "repeat": (2, 1),
    "repeat_interleave": (2, 1),
    "tile": (2, 1),
    "gather": (1, torch.tensor([[0, 2], [1, 1], [3, 0]])),
    "index_select": (1, torch.tensor([2, 0])),
    "take_along_dim": (torch.tensor([[0], [2], [1]]), 1),
    "take": (torch.tensor([0, 5]),),
    "sum_to_size": (1, 4),
    "unsafe_chunk": (2, 1),
    "unsafe_split": (2, 1),
    "hsplit": (2,),
    "vsplit": (3,),
}
ALONE = words("t T mT squeeze ravel tril triu trace neg positive contiguous clone double nansum conj diff")
ELSEWHERE = words("float half bfloat16 diag diag_embed rot90 real dsplit avg_pool1d adaptive_avg_pool1d")


def test_every_linear_name_is_tested():
    assert set(LINEAR) | ALONE | ELSEWHERE == rules.LINEAR


@pytest.mark.parametrize("name", sorted({*LINEAR, *ALONE}))
def test_linear(name):
    def function(x):
        y = torch.tanh(x @ W)
        found = getattr(y, name)
        found = found(*LINEAR.get(name, ())) if callable(found) and not isinstance(found, Tensor) else found
        return found if isinstance(found, Tensor) else torch.cat([part.flatten() for part in found])

    holds(function)


def test_more_linear_ones():
    holds(lambda x: F.pad(x.sin(), (1, 2), value=3.0))
    holds(lambda x: torch.rot90(x.sin()).real)
    holds(lambda x: torch.diag(x.sin()[0]) + torch.diag_embed(x.cos()).sum(0))
    holds(lambda x: x.sin().reshape(1, 3, 4).dsplit(2)[1])
    holds(lambda x: F.avg_pool1d(x.sin()[None], 2) + F.adaptive_avg_pool1d(x.cos()[None], 2))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
        found = xt.laplacian(lambda x, name=name: getattr(x, name)().square().sum(), X)
        assert (found.laplacian.dtype, found.laplacian.item()) == (dtype, 24)


def square(x):
    return torch.tanh(x @ W)[:, :3] + 2 * torch.eye(3, dtype=F64)


CURVED = {
    "linalg_inv": lambda x: torch.linalg.inv(square(x)),
    "inverse": lambda x: square(x).inverse(),
    "linalg_cholesky": lambda x: torch.linalg.cholesky(square(x) @ square(x).mT),
    "cholesky": lambda x: torch.linalg.cholesky(square(x) @ square(x).mT),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x.sin(), dim=-1),
    "linalg_norm": lambda x: torch.linalg.norm(x.sin()),
    "linalg_matrix_norm": lambda x: torch.linalg.matrix_norm(x.sin()),
    "norm": lambda x: x.sin().norm(dim=-1),
    "dist": lambda x: torch.dist(x.sin(), x.cos()),
    "var": lambda x: x.sin().var(-1),
    "std": lambda x: x.sin().std(0),
    "prod": lambda x: x.sin().prod(-1),
    "cumprod": lambda x: x.sin().cumprod(-1),
    "amax": lambda x: x.sin().amax(-1),
    "amin": lambda x: x.sin().amin(0),
    "maximum": lambda x: torch.maximum(x.sin(), x.cos()),
    "minimum": lambda x: torch.minimum(x.sin(), W[:3]),
    "atan2": lambda x: torch.atan2(x.sin(), x.cos() + 2),
    "hypot": lambda x: torch.hypot(x.sin(), x.cos() + 2),
    "xlogy": lambda x: torch.xlogy(x, x.square() + 1),
    "cross": lambda x: torch.linalg.cross(x[:, :3].sin(), x[:, 1:].cos()),
    "linalg_cross": lambda x: torch.linalg.cross(x[:, :3].sin(), x[:, 1:].cos()),
    "addcmul": lambda x: torch.addcmul(x.sin(), x.cos(), x, value=2),
    "addcdiv": lambda x: torch.addcdiv(x.sin(), x.cos(), x.square() + 1, value=2),
    "lerp": lambda x: torch.lerp(x.sin(), x.cos(), x),
    "index_add": lambda x: x.sin().index_add(0, torch.tensor([0, 0]), x[1:].cos()),
    "index_copy": lambda x: x.sin().index_copy(0, torch.tensor([0, 2]), x[1:].cos()),
    "scatter": lambda x: x.sin().scatter(1, torch.tensor([[1], [0], [2]]), x.cos()[:, :1]),
    "scatter_add": lambda x: x.sin().scatter_add(1, torch.tensor([[1], [0], [2]]), x.cos()[:, :1]),
    "mse_loss": lambda x: F.mse_loss(x.sin(), x.cos()),
    "logcumsumexp": lambda x: x.sin().logcumsumexp(-1),
}


def test_every_curved_name_is_tested():
    assert set(CURVED) == rules.CURVED


@pytest.mark.parametrize("name", sorted(CURVED))
def test_curved(name):
    holds(CURVED[name])


MIXED = {
    "sums": lambda x: (
        1 - (2 + x.sin() - W[0]) + torch.add(W[:3], x, alpha=3) - torch.sub(1.0 * x, x.cos(), alpha=2)
    ),
    "wider": lambda x: x[0].sin() + W * x[1].cos() - torch.ones(2, 4, 4, dtype=F64),
    "quotients": lambda x: x / (x.square() + 1) + 1 / (x.square() + 2) + x / 3 + W[:3] / (2 + x.sin()),
    "powers": lambda x: (x.square() + 1) ** 1.5 + 2**x + (x.square() + 1) ** x,
    "products": lambda x: (x @ W) @ x.sin().mT,
    "vectors": lambda x: (
        x[0] @ x[1].sin() + x[0] @ W @ x[2] + torch.dot(x[0], x[1]) + torch.inner(x[1], x[2])
    ),
    "more products": lambda x: (
        torch.outer(x[0], x[1].sin()) + torch.addmm(W, x.mT, x.cos(), alpha=2) + W.mv(x[0])
    ),
    "batched": lambda x: (
        torch.bmm(x[:, :, None], x.sin()[:, None])
        + torch.baddbmm(W.expand(3, 4, 4), x[:, :, None], x[:, None])
    ),
    "linear": lambda x: F.linear(x.sin(), W, W[0]) + F.linear(x, x.cos())[:, :1],
    "einsum": lambda x: torch.einsum("id,jd->ij", x, x.sin()) + torch.einsum("id->i", x.cos()),
    "three": lambda x: torch.einsum("id,jd,ij->", x, x.sin(), torch.ones(3, 3, dtype=F64)),
    "where": lambda x: torch.where(x > 0, x.sin(), W[:3]) + x.cos().masked_fill(x < 0, 2.0),
    "joined": lambda x: torch.cat([x, x.cos(), torch.ones(3, 1, dtype=F64)], -1).square().sum(0),
    "stacked": lambda x: torch.stack([x, W[:3]], 1).sin(),
    "cut": lambda x: x[[0, 2]] * x[1:3, None, :].sum(1).sin() + x[..., -1:].cos()[1:],
    "chosen": lambda x: x[torch.tensor([True, False, True])].sin(),
    "rows": lambda x: sum(row.square().sum() for row in x),
    "softmax": lambda x: (x @ W).softmax(0) + F.log_softmax(x @ W, -1) + x.logsumexp(-1, keepdim=True),
    "logaddexp": lambda x: torch.logaddexp(x, x.sin()) + torch.logaddexp(x[0], W[:3]),
    "logsumexp": lambda x: torch.logsumexp(x.sin(), 0) + torch.logsumexp(x.sin(), (0, 1)),
    "determinants": lambda x: torch.linalg.slogdet(square(x))[1] + torch.det(square(x)) + square(x).det(),
    "logdet": lambda x: torch.logdet(square(x) @ square(x).mT),
    "norms": lambda x: (
        F.layer_norm(x, (4,), W[0], W[1]) + F.rms_norm(x, (4,), W[0]) + F.layer_norm(x, (3, 4))
    ),
    "normalize": lambda x: F.normalize(x, dim=-1) + F.softplus(x, beta=2.0) + F.gelu(x, approximate="tanh"),
    "distances": lambda x: ((x[:, None] - x[None]).square().sum(-1) + torch.eye(3, dtype=F64)).sqrt(),
    "constants": lambda x: x.sin() * x.detach().sign() + torch.zeros_like(x) + x.shape[0] + (x > 0).double(),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_functions(name):
    holds(MIXED[name])


@pytest.mark.parametrize("gap", [0.0, 30.0, -30.0, 800.0, -800.0])
def test_logaddexp_of_terms_far_apart(gap):
    """The curvature of log(e^x + e^y) is that of a coin, p (1 − p) each way; torch's own is NaN."""
    x = torch.tensor([gap, 0.0], dtype=F64)
    found = xt.laplacian(lambda z: torch.logaddexp(z[0], z[1]), x)
    p = torch.sigmoid(-x[0].abs())
    torch.testing.assert_close(found.value, torch.logaddexp(x[0], x[1]))
    torch.testing.assert_close(found.laplacian, 2 * p * (1 - p), rtol=1e-10, atol=0.0)


def test_modules_run_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.RMSNorm(8), nn.Dropout()
    )
    holds(model.to(F64).eval())


def test_a_function_that_does_not_depend_on_x():
    found = xt.laplacian(lambda x: torch.ones(2), X)
    assert found.laplacian.tolist() == [0, 0]
    assert found.gradient.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.clone().add_(1), "add_"),
        (lambda x: F.relu(x, inplace=True), "relu"),
        (lambda x: torch.sin(x, out=torch.empty(3, 4)), "sin"),
        (lambda x: torch.fft.fft(x).real, "fft_fft"),
        (lambda x: nn.BatchNorm1d(4).to(F64)(x), "batch_norm"),
        (lambda x: F.dropout(x, 0.1), "dropout"),
        (lambda x: torch.bernoulli(x), "bernoulli"),
        (lambda x: x.sort()[0], "sort"),
        (lambda x: torch.linalg.solve(square(x), x), "linalg_solve"),  # torch bends it wrongly
        (lambda x: torch.cdist(x, x), "cdist"),
        (lambda x: torch.as_tensor(x.numpy()), "numpy"),
        (lambda x: xt.fisher_vector_product(x, x, x), "fisher_vector_product"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(function, name):
    with pytest.raises(NoRuleError, match=f"no rule for .*{name}"):
        xt.laplacian(function, X)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda x: torch.func.vmap(torch.sin)(x).sum(),
        lambda x: torch.func.grad(lambda y: y.sin().sum())(x).sum(),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1].sum(),
    ],
)
def test_derivatives_are_never_lost_in_silence(hidden):
    with pytest.raises(NoRuleError):
        xt.laplacian(hidden, X)


def test_writing_into_a_jet_is_refused():
    def function(x):
        y = x.sin()
        y[0] = 0.0
        return y

    with pytest.raises(NoRuleError, match="setitem"):
        xt.laplacian(function, X)
