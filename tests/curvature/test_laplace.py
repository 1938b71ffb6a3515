"""Laplace posteriors against the dense formula; probabilities that are better calibrated than one model's."""

import pytest
import torch
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt.curvature import Curvature, LaplacePosterior


def classifier(steps=0):
    torch.manual_seed(0)
    x = torch.randn(60, 2).double()
    y = (x[:, 0] * x[:, 1] + 0.5 * torch.randn(60) > 0).long()
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    for _ in range(steps):
        found = Curvature(model, "cross_entropy", [(x, y)])
        found.move(found.natural_gradient(damping=1e-3, max_steps=20).value)
    return model, Curvature(model, "cross_entropy", [(x, y)])


def test_the_posterior_of_a_last_layer():
    _, whole = classifier()
    last = whole.restrict("2")
    found = LaplacePosterior(last, prior_precision=0.7)
    dense = torch.linalg.inv(60 * last.dense() + 0.7 * torch.eye(26).double())
    torch.testing.assert_close(found.covariance, dense)
    best = LaplacePosterior(last)
    for other in (best.prior_precision * 0.8, best.prior_precision * 1.25):
        assert LaplacePosterior(last, prior_precision=other).log_evidence < best.log_evidence
    mean = torch.cat([p.detach().reshape(-1) for p in last.parameters.weights().values()])
    M = 60 * last.dense()
    wanted = (
        0.5 * (26 * torch.tensor(0.7).log() - torch.logdet(M + 0.7 * torch.eye(26).double()))
        - 0.35 * mean @ mean
    )
    assert abs(found.log_evidence - float(wanted)) < 1e-6


def test_the_posterior_of_a_subspace_and_its_predictions():
    model, whole = classifier()
    found = LaplacePosterior(whole, basis=3, prior_precision=2.0)
    U = found.basis
    torch.testing.assert_close(
        found.covariance, torch.linalg.inv(60 * U.T @ whole.dense() @ U + 2.0 * torch.eye(3).double())
    )
    x = torch.randn(4, 2).double()
    names = [name for name, _ in model.named_parameters()]

    def logits(*weights):
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))

    J = torch.autograd.functional.jacobian(logits, tuple(model.parameters()))
    slopes = torch.cat([part.flatten(2) for part in J], -1) @ U
    root = torch.linalg.cholesky(found.covariance)
    noise = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    drawn = logits(*model.parameters()) + torch.einsum("xck,sk->sxc", slopes, noise @ root.T)
    wanted = drawn.softmax(-1).mean(0).detach()
    torch.testing.assert_close(found.predict(x, samples=4000), wanted, rtol=0, atol=0.02)
    same = LaplacePosterior(whole, basis=U, prior_precision=2.0)
    torch.testing.assert_close(same.covariance, found.covariance)


def test_an_overconfident_model_is_mended():
    """New data: the log loss of the posterior's probabilities is far below that of the fitted weights."""
    model, whole = classifier(steps=25)
    x = 1.5 * torch.randn(400, 2, generator=torch.Generator().manual_seed(7)).double()
    noise = torch.randn(400, generator=torch.Generator().manual_seed(8))
    y = (x[:, 0] * x[:, 1] + 0.5 * noise > 0).long()
    point = nn.functional.nll_loss(model(x).log_softmax(-1), y).detach()
    for posterior in (
        LaplacePosterior(whole),
        LaplacePosterior(whole.restrict("2")),
        LaplacePosterior(whole, basis=10),
    ):
        found = nn.functional.nll_loss(posterior.predict(x, samples=200).log(), y)
        assert float(found) < 0.8 * float(point)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_calibration_by_held_out_digits(wrong):
    """A network fitted to 300 digits without a penalty. Of clean labels it knows how sure it may be, and the
    evidence makes it far too unsure; with a fifth of all labels drawn at random it is far too sure. Held-out
    labels find the right precision in both.
    """
    digits = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed").load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(9)
    drawn = torch.rand(len(y), generator=generator) < wrong
    y = torch.where(drawn, torch.randint(10, y.shape, generator=generator), y)
    order = torch.randperm(len(y), generator=generator)
    train, held, test = order[:300], order[300:500], order[500:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(600):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimizer.step()
    last = Curvature(model, "cross_entropy", [(x[train], y[train])], progress=False).restrict("2")
    plain = LaplacePosterior(last)
    found = plain.calibrate(x[held], y[held])

    def log_loss(p):
        return -float(p[torch.arange(len(test)), y[test]].log().mean())

    def calibration_error(p):
        sure, right = p.max(-1).values, (p.argmax(-1) == y[test]).float()
        apart = torch.zeros(10).index_add_(0, (sure * 10).long().clamp_max(9), right - sure)
        return float(apart.abs().sum() / len(test))

    with torch.no_grad():
        own = model(x[test]).softmax(-1)
    mended, unsure = found.predict(x[test]), plain.predict(x[test])
    assert log_loss(mended) < log_loss(unsure)
    if wrong:
        assert log_loss(mended) < 0.6 * log_loss(own)
        assert calibration_error(mended) < 0.75 * calibration_error(own)
    else:
        assert log_loss(unsure) > log_loss(own) + 0.3
        assert log_loss(mended) < log_loss(own) + 0.05
    with pytest.raises(ArgumentError, match=r"labels are \(3,\) torch.int64"):
        plain.calibrate(x[held], y[:3])


def test_what_is_refused():
    _, whole = classifier()
    x = (torch.randn(3, 2).double(), torch.randn(3, 2).double())
    squares = Curvature(whole.model, lambda out, batch: (out - batch[1]).square(), [x])
    with pytest.raises(ArgumentError, match="loss is a function"):
        LaplacePosterior(squares)
    with pytest.raises(ArgumentError, match="curvature is 'hessian'"):
        LaplacePosterior(Curvature(whole.model, "cross_entropy", whole.batches.data, "hessian"))
    with pytest.raises(ArgumentError, match="not orthonormal, by 3"):
        LaplacePosterior(whole, basis=2 * torch.eye(whole.shape[0]).double()[:, :2])
    with pytest.raises(ArgumentError, match=r"prior_precision is 0. Pass a finite number > 0"):
        LaplacePosterior(whole, prior_precision=0)
