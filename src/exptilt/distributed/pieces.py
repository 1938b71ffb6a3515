"""Parts of a problem: some queries, some keys, and the rule by which these queries see these keys."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exptilt.tilting.problem import Inputs, InputTangents
from exptilt.tilting.score_rule import ScoreRule, columns


@dataclass(frozen=True)
class Piece:
    """Some rows of the queries, some of the keys, and the rule by which these rows see these keys."""

    rows: slice
    keys: slice
    rule: ScoreRule
    mask: Tensor | None = None  # (rows, keys) booleans

    def cut(self, t: Inputs) -> Inputs:
        """The problem of these rows and keys; a sink is left out."""

        def plane(x: Tensor | None) -> Any:
            return None if x is None else columns(x, self.keys.start, self.keys.stop, self.rows)

        mask = plane(t.mask)
        if self.mask is not None:
            own = self.mask[(None,) * (t.query.dim() - 2)]
            mask = own if mask is None else own & mask
        query, key, value = t.query[..., self.rows, :], t.key[..., self.keys, :], t.value[..., self.keys, :]
        weight = None if t.log_weight is None else t.log_weight[..., self.keys]
        return Inputs(query, key, value, plane(t.bias), weight, None, mask)

    def cut_dots(self, dots: InputTangents, key: Any, value: Any, log_weight: Any) -> InputTangents:
        """Tangents of the inputs that `cut` selects."""
        return InputTangents(
            None if dots.query is None else dots.query[..., self.rows, :],
            None if key is None else key[..., self.keys, :],
            None if value is None else value[..., self.keys, :],
            None,
            None if log_weight is None else log_weight[..., self.keys],
        )
