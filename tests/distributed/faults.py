"""Run by torchrun: mistakes and failures of one process, as the others see them."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import exptilt as xt
from exptilt._support.errors import ExptiltError


def told(call):
    """The error that a call raises, as text with its class."""
    try:
        call()
    except ExptiltError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes():
    """Each is made by rank 1 alone; what this rank is told of it. Afterwards the group still works."""
    rank, found = dist.get_rank(), {}
    odd = rank == 1
    q, k = torch.zeros(2, 3, 4), torch.randn(2, 5, 4)

    def both(name, query=q, key=k, value=k, **options):
        for queries in ("replicated", "sharded"):
            found[f"{name}, {queries}"] = told(
                lambda queries=queries: xt.distributed.attend(query, key, value, queries=queries, **options)
            )

    double = [x.double() for x in (q, k, k)]
    both("dtype", *(double if odd else [q, k, k]))
    both("heads", key=torch.randn(1, 5, 4) if odd else k, value=torch.randn(1, 5, 4) if odd else k)
    both("positions", value=k[:, :4] if odd else k)
    both("option", softcap=2.0 if odd else None)
    both("gradient", key=k.clone().requires_grad_() if odd else k)
    both("NaN", key=torch.full_like(k, torch.nan) if odd else k)
    mine = k.clone().requires_grad_()
    seen = xt.distributed.attend(q, mine, mine, queries="sharded")
    loss = seen.log_normalizer.sum() if odd else seen.output.sum()
    found["another result"] = told(loss.backward)
    assert xt.distributed.attend(q, k, k, queries="sharded").output.isfinite().all()
    return found


def loss_mistakes():
    """As `mistakes`, for losses: an option of rank 1 that is not that of the others, one at a time."""
    odd, found, world = dist.get_rank() == 1, {}, dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    x, y, h, W = (torch.randn(4, 6, generator=generator) for _ in range(4))
    target = torch.tensor([0, 3, 5, -100])
    head, losses = xt.losses.linear_cross_entropy, xt.losses

    def one(loss, name, here, there, *tensors, label=None, **more):
        given = {**more, name: there if odd else here}
        found[f"{loss.__name__}, {label or name}"] = told(lambda: loss(*tensors, **given, group=world))

    for name, here, there in (
        ("label_smoothing", 0.0, 0.1),
        ("reduction", "mean", "none"),
        ("z_loss", 0.0, 0.01),
        ("ignore_index", -100, -1),
        ("scale", 1.0, 0.5),
        ("softcap", None, 30.0),
        ("statistics", False, True),
        ("rank", False, True),
        ("bias", None, torch.zeros(4)),
        ("target", target, target.flip(0)),
        ("hidden", h, h.clone().requires_grad_()),
        ("weight", W, W.clone().requires_grad_()),
    ):
        one(head, name, here, there, **({"hidden": h, "weight": W, "target": target} | {name: here}))
    apart = (2, 2) if odd else (4,)
    one(head, "weight", W, W, label="shape", hidden=h.reshape(*apart, 6), target=target.reshape(apart))
    double = [x.double() if odd else x for x in (h, W)]
    one(head, "hidden", double[0], double[0], label="dtype", weight=double[1], target=target)
    for loss in (losses.info_nce, losses.clip, losses.sigmoid):
        one(loss, "reduction", "mean", "sum", x, y)
        one(loss, "similarity", "cosine", "dot", x, y)
        one(loss, "temperature", 0.1, 0.2, x, y)
    one(losses.info_nce, "temperature", torch.tensor(0.5), torch.tensor(0.25), x, y, label="two tensors")
    learned = torch.tensor(0.5, requires_grad=True)
    one(losses.info_nce, "temperature", 0.5, learned, x, y, label="one learns")
    one(losses.info_nce, "symmetric", False, True, x, y)
    one(losses.info_nce, "negatives", None, x, x, y)
    one(losses.sigmoid, "bias", -10.0, -9.0, x, y)
    assert head(h, W, target, group=world).isfinite()
    assert losses.clip(x[: 3 + odd], y[: 3 + odd], group=world).isfinite()
    assert losses.info_nce(x, y, temperature=1 if odd else 1.0, group=world).isfinite()
    return found


def never_called():
    """Rank 0 waits for a call that rank 1 never makes."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    q = torch.zeros(2, 3, 4)
    if dist.get_rank() == 0:
        return {"never called": told(lambda: xt.distributed.attend(q, q, q, group=group))}
    time.sleep(6)
    return {}


def killed():
    """The last rank is killed while keys are gathered; what the others are told, and after how long."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end the others at once
    q = torch.randn(1, 64, 8)
    xt.distributed.attend(q, q, q, queries="sharded")
    if dist.get_rank() == dist.get_world_size() - 1:
        from exptilt.distributed.group import Members

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        Members.rows = die
    start = time.monotonic()
    text = told(lambda: xt.distributed.attend(q, q, q, queries="sharded"))
    return {"killed": text, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    import json

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    what, folder = sys.argv[1:]
    run = {"killed": killed, "losses": loss_mistakes, "mistakes": lambda: mistakes() | never_called()}
    found = run[what]()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    os._exit(0)
