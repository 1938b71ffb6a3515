"""Influence against the dense formula, and against training without the example."""

import pytest
import torch
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt.curvature import Curvature, influence


def trained(x, y, damping, without=None):
    """Logistic regression with a penalty of ½ damping |w|², at its minimum; the loss stays a sum over all."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    keep = [i for i in range(len(x)) if i != without]
    for _ in range(7):
        found = Curvature(model, "cross_entropy", [(x[keep], y[keep])], "hessian")
        share = len(keep) / len(x)
        w = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        slope = share * found.gradient() + damping * w
        found.move(torch.linalg.solve(share * found.dense() + damping * torch.eye(8).double(), slope))
    return model


def test_influence_is_what_leaving_out_does():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.7 * torch.randn(200, generator=generator) > 0).long()
    new = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    test = [(new, (new[:, 0] > 0).long())]
    model = trained(x, y, 0.05)
    curvature = Curvature(model, "cross_entropy", [(x[:25], y[:25]), (x[25:], y[25:])], "hessian")
    found = influence(curvature, test, damping=0.05, tolerance=1e-10)
    there = Curvature(model, "cross_entropy", test)
    dense = curvature.dense() + 0.05 * torch.eye(8).double()
    each = torch.stack(
        [Curvature(model, "cross_entropy", [(x[i : i + 1], y[i : i + 1])]).gradient() for i in range(200)]
    )
    torch.testing.assert_close(found.scores, each @ torch.linalg.solve(dense, there.gradient()) / 200)

    def loss(model):
        return float(nn.functional.cross_entropy(model(test[0][0]), test[0][1]).detach())

    places = [*found.most(2).tolist(), *(-found.scores).topk(2).indices.tolist()]
    moved = torch.tensor([loss(trained(x, y, 0.05, without=i)) - loss(model) for i in places])
    torch.testing.assert_close(moved.double(), found.scores[places], rtol=0.15, atol=1e-4)
    with pytest.raises(ArgumentError, match="curvature is a Linear"):
        influence(model, test, damping=0.1)
