"""Attention as a mixing step of IMM, a head as a chain: against attend, the filter, the whole matrix."""

import numpy as np
import pytest
import torch

from exptilt._support.errors import ConvergenceError
from exptilt.attention import propagate
from exptilt.switching import SwitchingLinearGaussian, as_filter, attention_as_imm
from exptilt.tilting import attend

F64 = torch.float64


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def layer() -> tuple[torch.Tensor, ...]:
    weights = randn(4, 3, 5, seed=1), randn(2, 3, 5, seed=2), randn(2, 3, 5, seed=3)
    root = randn(2, 6, 5, 5, seed=4)
    return randn(2, 6, 5), *weights, root @ root.mT


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "scale": 0.3}, {"mask": randn(2, 1, 6, 6, seed=9) > -0.5}]
)
def test_the_mean_is_attention_and_the_covariance_is_propagated(options: dict) -> None:
    h, W_q, W_k, W_v, covariance = layer()
    step = attention_as_imm(h, W_q, W_k, W_v, covariance=covariance, **options)
    q, k, v = (torch.einsum("...ie,hde->...hid", h, w) for w in (W_q, W_k, W_v))
    wanted = attend(q, k, v, **options)
    torch.testing.assert_close(step.mean, wanted.output)
    torch.testing.assert_close(step.log_total, wanted.log_normalizer - np.log(6))
    torch.testing.assert_close(step.covariance, propagate(h, covariance, q, k, W_v, **options)[1])
    seen = wanted.log_normalizer > -torch.inf
    torch.testing.assert_close(step.backward.sum(-1), seen.double())  # over where it comes from: backwards


def test_it_is_the_filter_s_mixing_step() -> None:
    """IMM with the transition e^{s_ij} made a law of j, its message made to undo that, nothing observed."""
    h, W = randn(3, 2), randn(3, 1, 2, 2, seed=5)
    step = attention_as_imm(h, *W)
    joint = (
        step.backward[0] * step.log_total[0].exp()[:, None]
    ).T  # [i, j], uniform message times transition
    joint = joint / joint.sum()
    model = SwitchingLinearGaussian(
        transition=(joint / joint.sum(1, keepdim=True)).numpy(),
        dynamics=W[2, 0].numpy(),
        process_noise=1e-9 * np.eye(2),
        observation=np.eye(2),
        observation_noise=np.eye(2),
        initial_mean=h.numpy(),
        initial_covariance=np.stack([1e-9 * np.eye(2)] * 3),
        initial_probability=joint.sum(1).numpy(),
    )
    post = model.filter(np.full((1, 2), np.nan), method="imm")
    np.testing.assert_allclose(post.mode_mean[0], step.mean[0].numpy(), atol=1e-7)
    np.testing.assert_allclose(post.mode_covariance[0], step.covariance[0].numpy(), atol=1e-7)


@pytest.mark.parametrize("n", [9, 40])  # the whole matrix, and products alone
@pytest.mark.parametrize(
    "options", [{"scale": 0.4}, {"causal": True, "scale": 0.4}, {"window": 6, "scale": 0.3}]
)
def test_a_head_as_a_chain(n: int, options: dict) -> None:
    q, k = randn(2, 4, n, 3), randn(2, 2, n, 3, seed=1)
    found = as_filter(q, k, options=options, tolerance=1e-12)
    B = attend(q, k.repeat_interleave(2, 1), torch.eye(n, dtype=F64).expand(2, 4, n, n), **options)
    value, vector = np.linalg.eig(B.output.mT.numpy())
    for b, h in np.ndindex(2, 4):
        order = np.argsort(-np.abs(value[b, h]))
        law = np.real(vector[b, h][:, order[0]])
        law = law / law.sum()
        np.testing.assert_allclose(found.stationary[b, h].numpy(), law, atol=1e-9)
        assert abs(float(found.second_eigenvalue[b, h]) - abs(value[b, h][order[1]])) < 1e-8
        assert abs(float(found.mixing_entropy[b, h]) - float(law @ B.entropy[b, h].numpy())) < 1e-9
    torch.testing.assert_close(found.spectral_gap, 1 - torch.exp(-1 / found.memory))
    if options.get("causal"):
        assert (found.stationary[..., 0] > 1 - 1e-9).all()  # in the end all comes from the first token


def test_a_chain_that_circles_has_no_stationary_law() -> None:
    around = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    circle = (
        900 * around[:, [1, 0, 1]]
    )  # 0 from 1, 1 from 0, 2 from 1: the law of 2 goes to 1, then round and round
    with pytest.raises(ConvergenceError, match="periodic chain"):
        as_filter(circle, around, max_steps=50)
