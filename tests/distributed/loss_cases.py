"""Run by torchrun: losses whose vocabulary or batch is spread over processes, against one process."""

import torch
import torch.distributed as dist
from torch.func import jvp

import exptilt as xt
from exptilt.distributed.group import Members
from oracles.ranks import close, cut, draw, raised


def compare(label, one, many, tensors, sizes, common, dtype):
    """Value, gradients and tangent; `common` says which tensors every process has whole."""
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    full = [x.to(dtype).clone().requires_grad_() for x in tensors]
    own = [
        (x if same else cut(x, sizes)).to(dtype).clone().requires_grad_()
        for x, same in zip(tensors, common, strict=True)
    ]
    count = dist.get_world_size()
    spread = not common[0]  # the batch is: the mean of the processes' losses is the loss
    right, found = one(*full), many(*own)

    def over_processes(x):
        x = x.detach().clone()
        dist.all_reduce(x)
        return x / count

    close(over_processes(found) if spread else found.detach(), right.detach(), tolerance, f"{label}: loss")
    wanted, got = torch.autograd.grad(right, full), torch.autograd.grad(found, own)
    for i, (a, b, same) in enumerate(zip(got, wanted, common, strict=True)):
        if spread:  # as data-parallel training: the mean over the processes of each one's gradient
            a = over_processes(a) if same else a / count
        close(a, b if same else cut(b, sizes), 10 * tolerance, f"{label}: gradient {i}")
    dots = [draw(*x.shape, seed=80 + i, dtype=dtype) for i, x in enumerate(full)]
    mine = tuple(x if same else cut(x, sizes) for x, same in zip(dots, common, strict=True))
    right = jvp(one, tuple(x.detach() for x in full), tuple(dots))[1]
    found = jvp(many, tuple(x.detach() for x in own), mine)[1]
    close(over_processes(found) if spread else found, right, 10 * tolerance, f"{label}: tangent")


def main():
    world = dist.group.WORLD
    count = dist.get_world_size()
    sizes = [[5, 8, 3][i % 3] for i in range(count)]
    V, N, D = sum(sizes), 7, 6
    h, W, b = draw(N, D, seed=1), 2 * draw(V, D, seed=2), draw(V, seed=3)
    target = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(4))
    target[2] = -100
    head = xt.losses.linear_cross_entropy
    cases = (
        {},
        {"softcap": 3.0, "label_smoothing": 0.1},
        {"z_loss": 0.01, "label_smoothing": 0.2, "scale": 0.5},
    )
    for i, options in enumerate(cases):
        for dtype in (torch.float64, torch.float32)[: 1 + (i == 2)]:
            compare(
                f"vocabulary {options}",
                lambda h, W, b, o=options: head(h, W, target, bias=b, **o),
                lambda h, W, b, o=options: head(h, W, target, bias=b, group=world, **o),
                (h, W, b),
                sizes,
                (True, False, False),
                dtype,
            )
    right = head(h, W, target, bias=b, rank=True)
    found = head(h, cut(W, sizes), target, bias=cut(b, sizes), rank=True, group=world)
    for name in right._fields:
        close(
            getattr(found, name).nan_to_num(), getattr(right, name).nan_to_num(), 1e-10, f"statistics: {name}"
        )

    tensors = h, W, b, draw(N, 4, seed=7), draw(V, 4, seed=8)
    for direction in ("forward", "reverse", "js"):
        one = lambda h, W, b, th, tW, **o: xt.losses.linear_kl(h, W, th, tW, bias=b, **o)  # noqa: E731
        o = {"direction": direction, "softcap": 3.0}
        both = (lambda *x, f=one, o=o: f(*x, **o)), (lambda *x, f=one, o=o: f(*x, group=world, **o))
        compare(f"divergence {o}", *both, tensors, sizes, (True, False, False, True, False), torch.float64)
        top = (tensors[3] @ tensors[4].T).log_softmax(-1).topk(3)
        one = lambda h, W, i=top.indices, v=top.values, **o: xt.losses.linear_kl(  # noqa: E731
            h, W, teacher_top=(i, v), **o
        )
        both = (lambda *x, f=one, o=o: f(*x, **o)), (lambda *x, f=one, o=o: f(*x, group=world, **o))
        compare(f"divergence of top {o}", *both, (h, W), sizes, (True, False), torch.float64)
    kl = lambda W, tW, **o: xt.losses.linear_kl(h, W, tensors[3], tW, statistics=True, **o)  # noqa: E731
    right, own = kl(W, tensors[4]), kl(cut(W, sizes), cut(tensors[4], sizes), group=world)
    for name in right._fields:
        close(getattr(own, name), getattr(right, name), 1e-10, f"divergence, statistics: {name}")

    x, y = draw(V, D, seed=5), draw(V, D, seed=6)
    y = y + x
    t, shift = torch.tensor(0.3, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)
    losses = xt.losses
    for dtype in (torch.float64, torch.float32):
        for label, one in {
            "info_nce": lambda x, y, t, **o: losses.info_nce(x, y, temperature=t, **o),
            "symmetric": lambda x, y, t, **o: losses.info_nce(x, y, temperature=t, symmetric=True, **o),
            "clip": lambda x, y, t, **o: losses.clip(x, y, temperature=t, **o),
            "sigmoid": lambda x, y, t, **o: losses.sigmoid(x, y, temperature=t, bias=-2.0, **o),
        }.items():
            many = lambda x, y, t, f=one: f(x, y, t, group=world)  # noqa: E731
            compare(label, one, many, (x, y, t), sizes, (False, False, True), dtype)
    compare(
        "sigmoid's bias",
        lambda x, y, b: losses.sigmoid(x, y, bias=b),
        lambda x, y, b: losses.sigmoid(x, y, bias=b, group=world),
        (x, y, shift),
        sizes,
        (False, False, True),
        torch.float64,
    )
    a, c = cut(x, sizes).requires_grad_(), cut(y, sizes)
    for loss in (losses.info_nce, losses.sigmoid):
        twice("second derivative", loss, x, y, sizes)

    small_messages(head, h, cut(W, sizes), target, a.detach(), c)

    # a mistake of one process is told to all
    bad = a.detach()[:1] if dist.get_rank() == 1 else a.detach()
    for loss in (losses.info_nce, losses.clip, losses.sigmoid):
        message = raised((ValueError, RuntimeError), lambda loss=loss: loss(bad, c, group=world))
        assert "of one shape" in message, message
    wrong = W[:, :5] if dist.get_rank() == 1 else cut(W, sizes)
    message = raised((ValueError, RuntimeError), lambda: head(h, wrong, target, group=world))
    assert "with the same dimension" in message, message


def twice(label, loss, x, y, sizes):
    """The derivative of the squared gradient by this process's rows."""
    full = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(full, y, reduction="sum"), full, create_graph=True)
    (right,) = torch.autograd.grad(slope.square().sum(), full)
    own = cut(x, sizes).clone().requires_grad_()
    found = loss(own, cut(y, sizes), reduction="sum", group=dist.group.WORLD)
    (slope,) = torch.autograd.grad(found, own, create_graph=True)
    (found,) = torch.autograd.grad(slope.square().sum(), own)
    close(found, cut(right, sizes), 1e-9, label)


def small_messages(head, h, W, target, x, y):
    """To agree costs one exchange of 24 bytes, whatever is compared; info_nce has one more for NaN."""
    sent, collect = [], Members.collect

    def counted(self, tensor, caller):
        if caller != "attend" or tensor.nbytes == 24:
            sent.append(tensor.nbytes)
        return collect(self, tensor, caller)

    world, losses = dist.group.WORLD, xt.losses
    Members.collect = counted
    try:
        for call, count in (
            (lambda: head(h, W, target, label_smoothing=0.1, group=world), 1),
            (lambda: losses.sigmoid(x, y, group=world), 1),
            (lambda: losses.info_nce(x, y, group=world), 2),
            (lambda: losses.clip(x, y, group=world), 3),
        ):
            sent.clear()
            call()
            assert sent == [24] * count, sent
    finally:
        Members.collect = collect
