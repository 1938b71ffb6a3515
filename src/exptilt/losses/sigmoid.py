r"""SigLIP's loss: every pair of an image and a text is a question of its own, yes on the diagonal, no off it.

    loss = (1/B) Σ_ij log(1 + e^{−y_ij s_ij}),   s_ij = ⟨x_i, y_j⟩/τ + b,   y_ij = 1 if i = j, else −1

Each term is the log-normalizer of two outcomes. The sum is taken over blocks of rows; in a backward pass
each block is computed again, so that no more than one block is kept.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import in_transform
from exptilt.distributed.collectives import every
from exptilt.distributed.group import Group, Members, refused_together
from exptilt.losses.embeddings import REDUCTIONS, cooled, embeddings, paired, peers, reduced, without_autocast

BLOCK = 2**20  # entries of a block of scores: 4 MB in float32


@without_autocast
def sigmoid(
    image: Tensor,
    text: Tensor,
    *,
    temperature: float | Tensor = 0.1,
    bias: float | Tensor = -10.0,
    similarity: str = "cosine",
    reduction: str = "mean",
    group: Group = None,
) -> Tensor:
    r"""The sigmoid loss of pairs (Zhai et al. 2023), with SigLIP's starting values as defaults.

    Exact in all derivatives. Memory grows with B; under `torch.func` transforms, which keep every
    block, with B².

    Args:
        image: ``(B, d)``.
        text: ``(B, d)``; row i belongs to image i.
        temperature: τ > 0, a number or a tensor ``()`` to learn (SigLIP's t is 1/τ).
        bias: b, a number or a tensor ``()`` to learn.
        similarity: ``cosine``; ``unit`` if rows have length 1 already (checked); ``dot``.
        reduction: ``mean`` over the images of the sum over texts, ``sum``, or ``none``.
        group: processes that each pass their own pairs, as in `info_nce`. None for this process alone.

    Returns:
        One number, or ``(B,)``, a sum over texts for each image, with ``reduction="none"``.

    Example:
        >>> xt.losses.sigmoid(torch.eye(2), torch.eye(2), temperature=1.0, bias=0.0)  # log(1+1/e) + log 2
        tensor(1.0064)
    """
    caller = "sigmoid"
    with refused_together(caller, group):
        checks.choice(caller, "reduction", reduction, REDUCTIONS)
        paired(caller, image=image, text=text)
        if image.shape[0] == 1 and (group is None or Members(caller, group).count == 1):
            raise ArgumentError(f"{caller}: image and text are a batch of 1, without wrong pairs. Pass more.")
        x, y = embeddings(caller, similarity, image=image, text=text)
        x = cooled(caller, x, temperature)
        b = shift_of(caller, bias, x)
    options = {"temperature": temperature, "bias": bias, "similarity": similarity, "reduction": reduction}
    among = peers(caller, group, {"image": image, "text": text}, options, image)
    first = 0
    if among is not None:
        (gathered,), first = every(*among, y), sum(among.sizes[: among.members.rank])
        y = y if gathered is None else gathered
    return reduced(caller, pair_losses(x, y, b, first), reduction, among)


def shift_of(caller: str, bias: float | Tensor, like: Tensor) -> Tensor:
    """The bias as a tensor of one number."""
    if not isinstance(bias, Tensor):
        bias = torch.tensor(checks.number(caller, "bias", bias, otherwise=", or a tensor"))
    if bias.numel() != 1:
        raise ArgumentError(f"{caller}: bias is {tuple(bias.shape)}. Pass one number.")
    return bias.to(like).reshape(())


def pair_losses(x: Tensor, y: Tensor, bias: Tensor, right: int) -> Tensor:
    """Σ_j log(1 + e^{∓s_ij}) for each row of x; `right` is the row of y that belongs to row 0 of x."""
    rows = max(1, BLOCK // max(1, y.shape[0]))
    keep = in_transform() or not torch.is_grad_enabled()
    found = []
    for first in range(0, x.shape[0], rows):
        arguments = x[first : first + rows], y, bias, right + first
        found.append(_block(*arguments) if keep else checkpoint(_block, *arguments, use_reentrant=False))
    return torch.cat(found)


def _block(x: Tensor, y: Tensor, bias: Tensor, right: int) -> Tensor:
    scores = x @ y.T + bias
    scores = torch.diagonal_scatter(scores, -scores.diagonal(offset=right), offset=right)
    return -logsigmoid(-scores).sum(-1)
