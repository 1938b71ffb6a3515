r"""Query and key maps of every head, read off the model by feeding it unit vectors: the part of `link` that needs no text.

An attention module takes its input x to queries and keys before it attends. Run on one token, at position 0, with x the origin and each
unit vector in turn, it shows

    W_q = q(e_1) − q(0), q(e_2) − q(0), ...       W_k likewise,

whatever its projections are called and however they are fused; biases fall out, and so do rotary embeddings, which are the same at
equal positions. If q(x + y) − q(x) − q(y) + q(0) is not 0, queries are not an affine function of x (they are normalised, say), the score is
no bilinear form, and there is no matrix to ask about.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt.lens.questions.blocks import Arguments, Tracer, inputs, stream
from exptilt.lens.questions.canonical_link import definiteness, symmetry
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.watch import watch

NOT_AFFINE = 1e-3  # share by which superposition may fail: rounding of bfloat16 passes, a norm does not


def affine_maps(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
    """W_q, W_k from what an attention module makes of the probes of `probes`, or None if it is no affine map.

    Args:
        query: ``(width + 4, Hq, 1, D)``.
        key: ``(width + 4, Hkv, 1, D)``.

    Returns:
        Two tensors ``(Hq, width, D)``, the heads of the keys repeated.
    """
    groups = query.shape[1] // key.shape[1]
    maps = []
    for x in (query.double(), key.double().repeat_interleave(groups, 1)):
        origin, one, other, both, units = x[0], x[1], x[2], x[3], x[4:]
        gap = (both - one - other + origin).abs().max()
        if float(gap) > NOT_AFFINE * float((one - origin).abs().max()):
            return None
        maps.append((units - origin)[:, :, 0].transpose(0, 1))
    return maps[0], maps[1]


def probes(width: int, like: Tensor) -> Tensor:
    """``(width + 4, 1, width)``: the origin, two points and their sum, and the unit vectors."""
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(2, width, generator=generator).to(like)
    return torch.cat(
        [torch.zeros_like(pair[:1]), pair, pair.sum(0, keepdim=True), torch.eye(width).to(like)]
    )[:, None]


def measure_weights(model: nn.Module, ids: Tensor) -> dict[str, NDArray[Any]]:
    """Symmetry and definiteness of every head's W_q W_kᵀ; NaN for cross-attention and where there is no such matrix.

    Args:
        model: a transformers model in eval mode.
        ids: ``(1,)``, any token.
    """
    tracer = Tracer(model, lambda name, passage: None)
    given: dict[nn.Module, Arguments] = {}
    rows: list[tuple[int, Any]] = []

    def observe(call: AttentionCall) -> None:
        tracer.observe(call)
        rows.append((call.query.shape[1], None))
        arguments = given.get(call.module) if call.module is not None else None
        hidden = None if arguments is None else stream(arguments)
        if call.kind != "self" or call.module is None or arguments is None or hidden is None:
            return
        maps = affine_maps(*tracer.run_again(call.module, arguments, probes(hidden.shape[-1], hidden)))
        if maps is not None:
            rows[-1] = (rows[-1][0], torch.stack([symmetry(*maps), definiteness(*maps)]).cpu().numpy())

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.setdefault(module, (args, kwargs))

    handles: list[Any] = []
    with torch.no_grad(), watch(model, observe=observe) as seen, tracer.attached(seen):
        try:
            handles += [
                module.register_forward_pre_hook(note, with_kwargs=True) for module in seen.layers.attending()
            ]
            model(**inputs(model, ids))
        finally:
            for handle in handles:
                handle.remove()
    table = np.full((2, len(rows), max(count for count, _ in rows)), np.nan)
    for index, (count, values) in enumerate(rows):
        if values is not None:
            table[:, index, :count] = values
    return {"head:link_symmetry": table[0], "head:link_definiteness": table[1]}
