r"""Statistics of a contrastive batch as its loss sees it.

    entropy of the wrong keys: H(p | wrong), effective negatives: e^H
    alignment: E |x_i − y_i|²,   uniformity: log E_{i≠j} e^{−2 |x_i − x_j|²}      (Wang and Isola 2020)

Uniformity is a log-normalizer as well: |x − y|² = 2 − 2⟨x, y⟩ on the sphere.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.plotting import caption, new_figure
from exptilt.losses.embeddings import all_but_own, cooled, embeddings, paired, without_autocast

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Diagnosis:
    """A contrastive batch as its loss sees it, one number for each anchor unless said otherwise.

    Attributes:
        loss: ``(B,)``, InfoNCE's.
        log_normalizer: ``(B,)``, G over all keys of the batch.
        entropy: ``(B,)``, of the distribution over all keys, in nats.
        effective_negatives: ``(B,)``, e to the entropy of the distribution over the wrong keys alone: how
            many of them share the gradient. B − 1 if all are alike, 1 if one hard negative takes it all.
        accuracy: ``(B,)`` booleans: the right key has the largest score.
        positive: ``(B,)``, the score of the right key, over the temperature.
        hardest: ``(B,)``, the largest score of a wrong key.
        alignment: ``()``, the mean squared distance of a pair on the unit sphere: 0 is best, 2 is chance.
        uniformity: ``()``, of all embeddings on the unit sphere: 0 if all are one point, −4 is the
            bound for a spread over a high-dimensional sphere.
    """

    loss: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    effective_negatives: Tensor
    accuracy: Tensor
    positive: Tensor
    hardest: Tensor
    alignment: Tensor
    uniformity: Tensor

    def __repr__(self) -> str:
        n = self.loss.numel()
        return (
            f"Diagnosis of {n} pairs: loss {self.loss.mean():.4g}, "
            f"right first {100 * self.accuracy.double().mean():.3g} %, "
            f"effective negatives {self.effective_negatives.median():.4g} of {n - 1} (median), "
            f"alignment {self.alignment:.3g}, uniformity {self.uniformity:.3g}"
        )

    def plot(self) -> "Figure":
        """Three pictures: scores of right and hardest wrong keys, loss, effective negatives."""
        right, hard = self.positive.tolist(), self.hardest.tolist()
        with new_figure(9.0, 2.8) as figure:
            scores, loss, negatives = figure.subplots(1, 3)
            scores.hist(
                [right, hard], bins=30, histtype="stepfilled", alpha=0.6, label=["right", "hardest wrong"]
            )
            scores.legend()
            caption(scores, "Scores", "score / temperature", "anchors")
            loss.hist(self.loss.tolist(), bins=30)
            caption(loss, f"Loss, mean {self.loss.mean():.3g}", "nats")
            negatives.hist(self.effective_negatives.tolist(), bins=30)
            caption(negatives, f"Effective negatives, of {len(right) - 1}", "number")
        return figure


@torch.no_grad()
@without_autocast
def diagnose(
    query: Tensor, key: Tensor, *, temperature: float | Tensor = 0.07, similarity: str = "cosine"
) -> Diagnosis:
    """Statistics of a contrastive batch: accuracy, effective negatives, spread of the embeddings, and more.

    Args:
        query: ``(B, d)``.
        key: ``(B, d)``; row i belongs to query i.
        temperature: τ > 0, a number or a tensor ``()``.
        similarity: ``cosine``; ``unit`` if rows have length 1 already (checked); ``dot``.

    Returns:
        A `Diagnosis`, without derivatives. Its `plot` draws it.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(64, 8), dim=-1)
        >>> xt.losses.diagnose(x, x).accuracy.all()
        tensor(True)
    """
    caller = "diagnose"
    paired(caller, query=query, key=key)
    if query.shape[0] < 2:
        raise ArgumentError(f"{caller}: query and key are a batch of 1, without wrong keys. Pass more rows.")
    q, k = embeddings(caller, similarity, query=query, key=key)
    x, y = embeddings(caller, "cosine", query=query, key=key)
    q = cooled(caller, q, temperature)
    wrong, positive = all_but_own(q, k), (q * k).sum(-1)
    gap = positive - wrong.log_normalizer  # the log-odds of the right key
    p = gap.sigmoid()
    loss = -torch.nn.functional.logsigmoid(gap)
    both = torch.nn.functional.binary_cross_entropy_with_logits(gap, p, reduction="none")
    entropy = both + (1 - p) * wrong.entropy
    every = torch.cat([x, y])
    pairs = every.shape[0] * (every.shape[0] - 1)
    near = all_but_own(2 * every, 2 * every).log_normalizer  # scores 4⟨x, y⟩, and −2|x − y|² = 4⟨x, y⟩ − 4
    return Diagnosis(
        loss,
        torch.logaddexp(wrong.log_normalizer, positive),
        entropy,
        wrong.entropy.exp(),
        positive > wrong.score_max,
        positive,
        wrong.score_max,
        (x - y).square().sum(-1).mean(),
        near.logsumexp(0) - 4 - math.log(pairs),
    )
