"""Means and covariances through attention: against loops, Jacobians of the whole layer, and Monte Carlo."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from exptilt.attention import Moments, propagate
from exptilt.tilting import attend

F64 = torch.float64
BATCH, LENGTH, SIZE, HEADS, KEY_HEADS, D, DV = 2, 5, 6, 4, 2, 3, 2
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 2, "scale": 0.7},
    "softcap": {"softcap": 1.5},
    "weights": {"log_weight": True, "bias": True, "sink": True},
    "mask": {"mask": True},
}


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def norm(x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:])


class Layer:
    """An attention layer of which everything is known, and its input's moments."""

    def __init__(self, options: dict) -> None:
        self.mean = randn(BATCH, LENGTH, SIZE)
        root = 0.3 * randn(BATCH, LENGTH, SIZE, SIZE, seed=1)
        self.full, self.diagonal = root @ root.mT, 0.1 * randn(BATCH, LENGTH, SIZE, seed=2).square()
        self.factor = 0.3 * randn(BATCH, LENGTH, SIZE, 2, seed=3)
        self.query, self.key = randn(HEADS, D, SIZE, seed=4), randn(KEY_HEADS, D, SIZE, seed=5)
        self.value, self.output = randn(KEY_HEADS, DV, SIZE, seed=6), randn(SIZE, HEADS * DV, seed=7)
        self.value_bias, self.output_bias = randn(KEY_HEADS, DV, seed=8), randn(SIZE, seed=9)
        given = {
            "log_weight": randn(BATCH, KEY_HEADS, LENGTH, seed=10),
            "bias": randn(HEADS, LENGTH, LENGTH, seed=11),
            "sink": randn(BATCH, HEADS, seed=12),
            "mask": randn(BATCH, 1, LENGTH, LENGTH, seed=13) > -0.3,
        }
        given["mask"][0, 0, 2] = False  # a query that sees nothing
        self.options = {name: given.get(name, value) for name, value in options.items()}

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("...ie,hde->...hid", x, weight)

    def call(self, x: Tensor, fixed: Tensor | None = None) -> Tensor:
        """Each head's output; query and key from `fixed` if that is given."""
        at = x if fixed is None else fixed
        value = self.heads(x, self.value) + self.value_bias[:, None]
        return attend(self.heads(at, self.query), self.heads(at, self.key), value, **self.options).output

    def mapped(self, x: Tensor, fixed: Tensor | None = None) -> Tensor:
        """With the output map."""
        return self.call(x, fixed).transpose(-2, -3).flatten(-2) @ self.output.mT + self.output_bias

    def weights(self, x: Tensor) -> Tensor:
        """A ``(..., Hq, Q, K)``, as the output for values that are unit vectors."""
        unit = torch.eye(LENGTH, dtype=F64).expand(BATCH, KEY_HEADS, -1, -1)
        return attend(self.heads(x, self.query), self.heads(x, self.key), unit, **self.options).output

    def propagate(self, covariance: Tensor, **more: object) -> tuple[Tensor, Tensor]:
        arguments = {"value_bias": self.value_bias, **self.options, **more}
        query, key = self.heads(self.mean, self.query), self.heads(self.mean, self.key)
        return propagate(self.mean, covariance, query, key, self.value, **arguments)  # type: ignore[arg-type]


def by_jacobian(function, mean: Tensor, full: Tensor) -> Tensor:
    """J Σ J' at each position, of independent positions."""
    found = []
    for item, cov in zip(range(BATCH), full, strict=True):

        def one(x: Tensor, item: int = item) -> Tensor:
            return function(torch.cat([mean[:item], x[None], mean[item + 1 :]]))[item]

        J = torch.func.jacrev(one)(mean[item])  # (..., Q, E', K, E)
        found.append(torch.einsum("...oie,ief,...pif->...op", J, cov, J))
    return torch.stack(found)


def mixture_by_loops(layer: Layer, full: Tensor) -> tuple[Tensor, Tensor]:
    A = layer.weights(layer.mean)
    mean = torch.zeros(BATCH, HEADS, LENGTH, DV, dtype=F64)
    cov = torch.zeros(BATCH, HEADS, LENGTH, DV, DV, dtype=F64)
    for b, h, j in itertools.product(range(BATCH), range(HEADS), range(LENGTH)):
        W, shift = layer.value[h // 2], layer.value_bias[h // 2]
        values = [W @ layer.mean[b, i] + shift for i in range(LENGTH)]
        mean[b, h, j] = sum(A[b, h, j, i] * values[i] for i in range(LENGTH))
        for i in range(LENGTH):
            d = values[i] - mean[b, h, j]
            cov[b, h, j] += A[b, h, j, i] * (W @ full[b, i] @ W.T + torch.outer(d, d))
        seen = A[b, h, j].sum()
        cov[b, h, j] += (1 - seen) * torch.outer(mean[b, h, j], mean[b, h, j])  # the sink, or nothing
    return mean, cov


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mixture_is_what_loops_say(options: dict) -> None:
    layer = Layer(options)
    mean, cov = mixture_by_loops(layer, layer.full)
    got = layer.propagate(layer.full)
    torch.testing.assert_close(got, (mean, cov))
    mean, cov = mixture_by_loops(layer, torch.diag_embed(layer.diagonal))
    got = layer.propagate(layer.diagonal)
    torch.testing.assert_close(got, (mean, cov.diagonal(dim1=-2, dim2=-1)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dependent", [False, True])
def test_average_is_the_delta_method(options: dict, dependent: bool) -> None:
    layer = Layer(options)
    more: dict = {"reading": "average"}
    if dependent:
        more |= {"query_weight": layer.query, "key_weight": layer.key}

    def heads(x: Tensor) -> Tensor:
        return layer.call(x, None if dependent else layer.mean)

    def mapped(x: Tensor) -> Tensor:
        return layer.mapped(x, None if dependent else layer.mean)

    output = {"output_weight": layer.output, "output_bias": layer.output_bias}
    for function, extra in ((heads, {}), (mapped, output)):
        wanted = function(layer.mean)
        mean, cov = layer.propagate(layer.full, **more, **extra)
        torch.testing.assert_close(mean, wanted)
        torch.testing.assert_close(cov, by_jacobian(function, layer.mean, layer.full))
        mean, factor = layer.propagate(layer.factor, **more, **extra)
        torch.testing.assert_close(mean, wanted)
        pushes = [torch.func.jvp(function, (layer.mean,), (layer.factor[..., k],))[1] for k in range(2)]
        torch.testing.assert_close(factor, torch.stack(pushes, -1))
        mean, variance = layer.propagate(layer.diagonal, **more, **extra)
        torch.testing.assert_close(mean, wanted)
        exact = by_jacobian(function, layer.mean, torch.diag_embed(layer.diagonal)).diagonal(dim1=-2, dim2=-1)
        if dependent or not extra:
            torch.testing.assert_close(variance, exact)


def test_streamed_diagonal_takes_heads_as_independent() -> None:
    layer = Layer({"causal": True})
    _, variance = layer.propagate(layer.diagonal, reading="average", output_weight=layer.output)
    W, out = layer.value.repeat_interleave(2, 0), layer.output.unflatten(-1, (HEADS, DV))
    A = layer.weights(layer.mean)
    heads = torch.einsum("bhji,hde,bie->bhjd", A.square(), W.square(), layer.diagonal)
    torch.testing.assert_close(variance, torch.einsum("bhjd,ohd->bjo", heads, out.square()))


def test_the_mixture_is_the_average_and_the_spread() -> None:
    """Positions are drawn, one for each head."""
    layer = Layer({})
    g = torch.Generator().manual_seed(0)
    count = 100_000
    A = layer.weights(layer.mean)[0, :, 0]  # one query
    root = torch.linalg.cholesky(layer.full[0])
    x = layer.mean[0] + torch.einsum(
        "ief,nif->nie", root, torch.randn(count, LENGTH, SIZE, dtype=F64, generator=g)
    )
    drawn = torch.stack([torch.multinomial(A[h], count, True, generator=g) for h in range(HEADS)], 1)
    values = torch.einsum("nie,hde->nhid", x, layer.value.repeat_interleave(2, 0))
    picked = torch.take_along_dim(values, drawn[:, :, None, None], 2).squeeze(
        2
    ) + layer.value_bias.repeat_interleave(2, 0)
    out = picked.flatten(1) @ layer.output.mT
    mean, cov = layer.propagate(layer.full, output_weight=layer.output)
    scale = cov[0, 0].diagonal().sqrt()
    assert float(((out.mean(0) - mean[0, 0]) / scale).abs().max()) < 5 / math.sqrt(count)
    assert float(((out.T.cov() - cov[0, 0]) / torch.outer(scale, scale)).abs().max()) < 8 / math.sqrt(count)


def network(layer: Layer, x: Tensor) -> Tensor:
    """Two blocks of a transformer: attention and an MLP, each behind a norm, with residual connections."""
    for _ in range(2):
        x = x + layer.mapped(norm(x))
        x = x + torch.tanh(rms_norm(x, x.shape[-1:]) @ layer.output[:, :SIZE]) @ layer.output[:, 2:]
    return x


def test_a_small_transformer_carries_uncertainty() -> None:
    """Against 100,000 passes through the same network, with coverage of the regions."""
    layer = Layer({"causal": True})
    layer.output, layer.query = 0.3 * layer.output, 0.5 * layer.query
    g = torch.Generator().manual_seed(0)
    factor = 0.004 * randn(LENGTH, SIZE, 6, seed=3)
    given = Moments(layer.mean[0], factor, "low-rank")
    z = torch.randn(100_000, 6, dtype=F64, generator=g)
    passes = network(layer, layer.mean[0] + torch.einsum("ier,nr->nie", factor, z))
    mean, cov = passes.mean(0), torch.stack([passes[:, i].T.cov() for i in range(LENGTH)])
    for method in ("delta", "unscented"):
        got = given.through(lambda x: network(layer, x), method=method, joint=True)
        off = (got.mean - mean).norm() / got.variance.sum().sqrt()
        assert float(off) < {"delta": 0.05, "unscented": 0.02}[method]
        assert float((got.matrix - cov).norm() / cov.norm()) < 0.05
        for level in (0.5, 0.9, 0.95):
            assert abs(float(got.covers(passes, level).double().mean()) - level) < 0.015


@pytest.mark.parametrize("form", ["full", "diagonal", "low-rank"])
def test_an_affine_map_is_exact_by_both_methods(form: str) -> None:
    layer = Layer({})
    covariance = {"full": layer.full, "diagonal": layer.diagonal, "low-rank": layer.factor}[form]
    weight, given = randn(3, SIZE, seed=20), Moments(layer.mean, covariance)
    assert given.form == form
    exact = weight @ given.matrix @ weight.mT
    for method, joint in itertools.product(("delta", "unscented"), (False, True)):
        got = given.through(lambda x: x @ weight.mT + 1, method=method, joint=joint)
        torch.testing.assert_close(got.mean, layer.mean @ weight.mT + 1)
        torch.testing.assert_close(got.variance, exact.diagonal(dim1=-2, dim2=-1))
        if form != "diagonal":
            torch.testing.assert_close(got.matrix, exact)
    mixed = given.through(
        lambda x: x.cumsum(-2) @ weight.mT, joint=True
    )  # positions that influence each other
    if form != "low-rank":
        torch.testing.assert_close(mixed.variance, exact.diagonal(dim1=-2, dim2=-1).cumsum(-2))


def test_unscented_mean_of_a_quadratic_is_exact() -> None:
    given = Moments(randn(3, 4), randn(3, 4, seed=1).square())
    assert torch.allclose(
        given.through(torch.square, method="unscented").mean, given.mean**2 + given.covariance
    )
    assert torch.allclose(given.through(torch.square).mean, given.mean**2)
