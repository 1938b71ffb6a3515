"""Results over disjoint sets of keys join to the result over all of them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exptilt as xt
from tilting.cases import FIELDS, close


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_join_in_any_order(data):
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    K = data.draw(st.integers(1, 30))
    q, k, v = (
        torch.randn(2, 2, 3, 4).double(),
        torch.randn(2, 1, K, 4).double(),
        torch.randn(2, 1, K, 5).double(),
    )
    mask = torch.rand(3, K) < 0.6
    size = data.draw(st.sampled_from([1.0, 100.0]))
    cuts = sorted(data.draw(st.lists(st.integers(0, K), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, K], strict=True))
    parts = [xt.attend(size * q, k[:, :, a:b], v[:, :, a:b], mask=mask[:, a:b]) for a, b in bounds]
    whole = xt.attend(size * q, k, v, mask=mask, backend="reference")
    order = data.draw(st.permutations(range(len(parts))))
    flat = xt.merge([parts[i] for i in order])
    nested = parts[order[0]]
    for i in order[1:]:
        nested = xt.merge([nested, parts[i]])
    for joined in (flat, nested):
        for name in FIELDS[:-1]:
            assert close(getattr(joined, name), getattr(whole, name), 1e-10), name


def test_sink_in_one_part():
    torch.manual_seed(0)
    q, k, sink = torch.randn(2, 3, 4).double(), torch.randn(2, 8, 4).double(), torch.randn(2).double()
    joined = xt.merge([xt.attend(q, k[:, :3], k[:, :3], sink=sink), xt.attend(q, k[:, 3:], k[:, 3:])])
    whole = xt.attend(q, k, k, sink=sink)
    for name in FIELDS[:-1]:
        assert close(getattr(joined, name), getattr(whole, name), 1e-12), name


def test_merge_is_differentiable():
    torch.manual_seed(0)
    q, k = (
        torch.randn(1, 3, 4, dtype=torch.float64),
        torch.randn(1, 6, 4, dtype=torch.float64, requires_grad=True),
    )

    def loss(join):
        parts = [
            xt.attend(q, part, part, mask=m)
            for part, m in ((k[:, :2], torch.tensor([True, False])), (k[:, 2:], None))
        ]
        a = (
            xt.merge(parts)
            if join
            else xt.attend(q, k, k, mask=torch.tensor([True, False, True, True, True, True]))
        )
        return (a.output.sin().sum() + a.entropy.square() + a.score_variance + a.log_normalizer).sum()

    (a,), (b,) = (torch.autograd.grad(loss(join), k, create_graph=True) for join in (True, False))
    assert torch.allclose(a, b, atol=1e-12)
    (a,), (b,) = (torch.autograd.grad(g.square().sum(), k) for g in (a, b))
    assert torch.allclose(a, b, atol=1e-10)


def test_dead_parts_have_no_say():
    q, k = torch.randn(1, 3, 4), torch.randn(1, 6, 4)
    dead = xt.attend(q, k[:, :0], k[:, :0])
    both = xt.merge([dead, dead])
    assert (both.log_normalizer == -torch.inf).all()
    assert (both.entropy == 0).all()
    joined, alone = xt.merge([dead, xt.attend(q, k, k)]), xt.attend(q, k, k)
    assert torch.equal(joined.output, alone.output)
