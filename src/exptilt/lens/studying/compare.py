r"""Differences between two studies, of two models, checkpoints or texts, with their standard errors.

    d = x_a − x_b,      error² = error_a² + error_b²,      z = d / error

for every head if both have as many layers and heads, and for the mean over heads in any case. Errors of heads
are correlated, since heads read the same texts, so the error of their mean is given as the mean of their
errors, its upper bound. The two studies are taken as independent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exptilt._support.errors import ArgumentError
from exptilt.lens.studying.results import HeadMeasure, Study

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Difference of one statistic between two studies.

    Attributes:
        title, unit: of the statistic.
        means: of the first and the second study, over heads.
        difference: of the means, first minus second.
        error: its standard error; NaN where errors are not known.
        by_head: ``(layer, head)`` differences; None if the studies differ in numbers of layers or heads.
        head_error: ``(layer, head)``, standard errors of `by_head`, or None.
    """

    title: str
    unit: str
    means: tuple[float, float]
    difference: float
    error: float
    by_head: Array | None
    head_error: Array | None

    def differing(self) -> NDArray[np.bool_]:
        """``(layer, head)`` booleans: heads that differ by over two standard errors; empty if not known."""
        if self.by_head is None or self.head_error is None:
            return np.zeros((0, 0), dtype=bool)
        with np.errstate(invalid="ignore"):
            found: NDArray[np.bool_] = np.abs(self.by_head) > 2 * self.head_error
        return found


def compare(first: Study, second: Study) -> dict[str, Difference]:
    """Differences of two studies by name of the head measure, first minus second.

    Args:
        first: a study.
        second: a study of another model, checkpoint or text.

    Returns:
        A `Difference` for every head measure that both have.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> class Letters:
        ...     def __call__(self, text, add_special_tokens=True):
        ...         return {"input_ids": [ord(c) for c in text]}
        ...
        ...     def decode(self, ids):
        ...         return "".join(chr(i) for i in ids)
        >>> config = GPT2Config(
        ...     vocab_size=128, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        ... )
        >>> studies = [
        ...     xt.lens.study(
        ...         GPT2LMHeadModel(config), Letters(), ["to be or not to be", "that is the question"]
        ...     )
        ...     for _ in range(2)
        ... ]
        >>> xt.lens.compare(*studies)["entropy"].by_head.shape
        (2, 2)
    """
    for study in (first, second):
        if not isinstance(study, Study):
            raise ArgumentError(f"compare: got a {type(study).__name__}. Pass two studies.")
    found = {}
    for name, a in first.heads.items():
        b = second.heads.get(name)
        if a.value is not None and b is not None and b.value is not None:
            found[name] = _difference(a, a.value, b, b.value)
    return found


def _difference(a: HeadMeasure, x: Array, b: HeadMeasure, y: Array) -> Difference:
    """The difference of measures a and b, whose values are x and y."""
    (first, first_error), (second, second_error) = _mean(x, a.error), _mean(y, b.error)
    by_head = head_error = None
    if x.shape == y.shape:
        by_head = x - y
        head_error = None if a.error is None or b.error is None else np.hypot(a.error, b.error)
    error = float(np.hypot(first_error, second_error))
    return Difference(a.title, a.unit, (first, second), first - second, error, by_head, head_error)


def _mean(value: Array, error: Array | None) -> tuple[float, float]:
    """Mean over heads and its standard error, NaN where not known."""
    known = np.isfinite(value)
    if not known.any():
        return float("nan"), float("nan")
    if error is None or not np.isfinite(error[known]).all():
        return float(value[known].mean()), float("nan")
    return float(value[known].mean()), float(error[known].mean())


def most_different(first: Study, second: Study, count: int = 5) -> list[tuple[str, int, int]]:
    """Statistic, layer and head of the largest differences that are sure, at most one a head, largest first.

    A difference is sure beyond two standard errors. Its size is in standard deviations of the statistic over
    all heads.
    """
    rows = []
    for name, found in compare(first, second).items():
        if found.by_head is None:
            continue
        spread = np.nanstd([study.heads[name].value for study in (first, second)])  # type: ignore[arg-type]
        for layer, head in np.argwhere(found.differing() & (spread > 0)):
            rows.append((abs(float(found.by_head[layer, head])) / spread, name, int(layer), int(head)))
    kept: dict[tuple[int, int], tuple[str, int, int]] = {}
    for _, name, layer, head in sorted(rows, key=lambda row: -row[0]):
        kept.setdefault((layer, head), (name, layer, head))
    return list(kept.values())[:count]
