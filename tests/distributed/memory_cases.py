"""Run by torchrun: a Hopfield memory whose patterns lie on several processes, against one that has all."""

import torch
import torch.distributed as dist

import exptilt as xt
from oracles.ranks import close, cut, draw, raised


def main():
    world = dist.group.WORLD
    sizes = [[5, 8, 3][i % 3] for i in range(dist.get_world_size())]
    D = 6
    x, values = 2 * draw(sum(sizes), D, seed=1), draw(sum(sizes), 3, seed=2)
    state = x[:9] + 0.3 * draw(9, D, seed=3)
    for similarity in ("dot", "cosine", "euclidean"):
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
            full, own = (t.to(dtype).clone().requires_grad_() for t in (x, cut(x, sizes)))
            betas = [torch.tensor(1.5, dtype=dtype, requires_grad=True) for _ in range(2)]
            v = values.to(dtype)
            s = state.to(dtype)
            one = xt.memory.Hopfield(full, betas[0], similarity=similarity, values=v)
            many = xt.memory.Hopfield(own, betas[1], similarity=similarity, values=cut(v, sizes), group=world)
            assert many.count == one.count
            for name in ("energy", "step", "read"):
                a, b = getattr(many, name)(s), getattr(one, name)(s)
                close(a.detach(), b.detach(), tolerance, f"{similarity}: {name}")
                weight = draw(*b.shape, seed=4, dtype=dtype)
                got = torch.autograd.grad((a * weight).sum(), [own, betas[1]], retain_graph=True)
                right = torch.autograd.grad((b * weight).sum(), [full, betas[0]], retain_graph=True)
                close(got[0], cut(right[0], sizes), 100 * tolerance, f"{similarity}: {name} by patterns")
                close(got[1], right[1], 100 * tolerance, f"{similarity}: {name} by beta")
            if dtype == torch.float64:
                a, b = many.retrieve(s), one.retrieve(s)
                close(a.value.detach(), b.value.detach(), 1e-7, f"{similarity}: retrieve")
                got = torch.autograd.grad(a.value.square().sum(), own, retain_graph=True)[0]
                right = torch.autograd.grad(b.value.square().sum(), full, retain_graph=True)[0]
                close(got, cut(right, sizes), 1e-5, f"{similarity}: retrieve by patterns")
    assert "energy, step, read and retrieve" in raised(ValueError, lambda: many.nearest(s, 2))
    assert "softmax" in raised(
        (ValueError, RuntimeError), lambda: xt.memory.Hopfield(x, separation="max", group=world)
    )
    odd = x[:, :4] if dist.get_rank() == 1 else x
    assert "the dimension" in raised(RuntimeError, lambda: xt.memory.Hopfield(odd, group=world))
