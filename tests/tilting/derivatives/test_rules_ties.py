"""Where several keys have the largest score, the derivatives of score_max are those of the first of them."""

import itertools

import pytest
import torch
from torch.func import hessian, jvp

import exptilt as xt

BACKENDS = ("reference", "tiled", "cpu")
T = torch.float64


def tied(width):
    """One query, and keys of which 1, 2 and the last have the largest score; their rows are all different."""
    key = torch.full((1, width, 3), -1.0, dtype=T)
    key[0, [1, 2, width - 1]] = torch.tensor([[2.0, 0.0, 1.0], [0.0, 2.0, 1.0], [1.0, 1.0, 1.0]], dtype=T)
    return torch.ones(1, 1, 3, dtype=T), key


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [5, 40, 3000])
def test_the_first_largest_key_has_it_all(backend, width):
    q, k = tied(width)
    bias, log_weight = (torch.zeros(shape, dtype=T) for shape in ((1, 1, width), (1, width)))
    tensors = [x.requires_grad_() for x in (q, k, bias, log_weight)]

    def largest(q, k, bias, log_weight):
        found = xt.attend(q, k, k, scale=1.0, bias=bias, log_weight=log_weight, backend=backend)
        return found.score_max.sum()

    by_q, by_k, by_bias, by_weight = torch.autograd.grad(largest(*tensors), tensors)
    assert torch.equal(by_q[0, 0], k[0, 1])
    for gradient in (by_k[0].sum(-1) / 3, by_bias[0, 0], by_weight[0]):
        assert torch.equal(gradient, torch.eye(width, dtype=T)[1])
    plain = tuple(x.detach() for x in tensors)
    along = tuple(torch.randn(x.shape, dtype=T, generator=torch.Generator().manual_seed(0)) for x in plain)
    moved = jvp(largest, plain, along)[1]
    right = sum((g * x).sum() for g, x in zip((by_q, by_k, by_bias, by_weight), along, strict=True))
    assert torch.allclose(moved, right, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_twice_differentiated(backend):
    """The score of the first key is bilinear: its Hessian couples the query with that key alone."""
    q, k = tied(6)

    def largest(x):
        return xt.attend(x[:, :1], x[:, 1:], k, scale=1.0, backend=backend).score_max.sum()

    found = hessian(largest)(torch.cat([q, k], 1))[0, :, :, 0]
    right = torch.zeros_like(found)
    right[0, :, 2] = right[2, :, 0] = torch.eye(3, dtype=T)
    assert torch.allclose(found, right, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_have_no_gradient(backend):
    q, k = (x.requires_grad_() for x in tied(6))
    mask = torch.zeros(1, 6, dtype=torch.bool)
    for hidden in ({"mask": mask}, {"bias": torch.full((1, 6), -torch.inf, dtype=T)}):
        largest = xt.attend(q, k, k, backend=backend, **hidden).score_max
        assert (largest == -torch.inf).all()
        for gradient in torch.autograd.grad(largest.sum(), (q, k)):
            assert (gradient == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_merged_parts(backend):
    q, k = tied(6)
    k.requires_grad_()
    for cuts in ((0, 2, 6), (0, 1, 4, 6)):
        parts = [k[:, a:b] for a, b in itertools.pairwise(cuts)]
        joined = xt.merge([xt.attend(q, x, x, scale=1.0, backend=backend) for x in parts])
        (gradient,) = torch.autograd.grad(joined.score_max.sum(), k)
        assert torch.equal(gradient[0].sum(-1) / 3, torch.eye(6, dtype=T)[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fisher_product_of_expanded_tensors(backend, dtype):
    """A query that stands for many, by `expand` or because the keys have a batch axis that it has not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in ((1, 1, 4), (1, 9, 4), (1, 5, 4)))
    wide = q.expand(1, 5, 4)
    right = xt.fisher_vector_product(wide.contiguous(), k, v, backend=backend)
    assert torch.equal(xt.fisher_vector_product(wide, k, v, backend=backend), right)
    same = v[:, :1].expand(1, 5, 4)
    right = xt.fisher_vector_product(wide.contiguous(), k, same.contiguous(), backend=backend)
    assert torch.equal(xt.fisher_vector_product(wide, k, same, backend=backend), right)
    keys = torch.stack([k, 2 * k])
    right = torch.stack([xt.fisher_vector_product(v, x, v, backend=backend) for x in keys])
    assert torch.allclose(xt.fisher_vector_product(v[None], keys, v[None], backend=backend), right)
    assert torch.allclose(xt.fisher_vector_product(v, keys, v, backend=backend), right)
