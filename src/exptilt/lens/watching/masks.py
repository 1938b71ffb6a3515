r"""Masks of transformers, kept as rules for as long as possible.

transformers makes the mask of a model once a forward pass, through a function of the chosen attention implementation. Ours returns a
`RuleMask`: a boolean tensor of shape (batch, 1, Q, K) that holds no cells, only the rule

    query i sees key j  ⇔  rule(i + query_offset, j + key_offset)  and  key j is not padding.

Causal, bidirectional and sliding-window rules are what `attend` knows by itself, and nothing n×n is ever made for them. Any other rule
(packed sequences, chunks, a function of the model or the user), or any operation that a model does on its mask, makes the dense mask.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from exptilt._support.transforms import empty_wrapper, no_torch_function, pytree


class Rule(NamedTuple):
    """What `attend` takes: causal and window."""

    causal: bool
    window: int | None


@cache
def _known_code() -> dict[str, Any]:
    """Code objects of the closures that transformers builds its rules from."""
    from transformers import masking_utils as m

    return {
        "and": m.and_masks(m.causal_mask_function).__code__,
        "sliding": m.sliding_window_overlay(1).__code__,
        "sliding both ways": m.sliding_window_bidirectional_overlay(1).__code__,
    }


def _closed_over(function: Callable[..., Any]) -> Any:
    cells = function.__closure__
    assert cells is not None
    return cells[0].cell_contents


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """A mask function of transformers as a rule that `attend` knows, or None.

    Args:
        function: takes batch, head, query and key index, and says whether the query may see the key.
    """
    from transformers import masking_utils as m

    if function is m.causal_mask_function:
        return Rule(True, None)
    if function is m.bidirectional_mask_function:
        return Rule(False, None)
    code, known = getattr(function, "__code__", None), _known_code()
    if code is known["sliding both ways"]:
        return Rule(False, int(_closed_over(function)) + 1)
    if code is not known["and"]:
        return None
    causal, window = False, None
    for part in _closed_over(function):
        if part.__code__ is known["sliding"]:  # one-sided: only with causality is it a window of attend
            if m.causal_mask_function not in _closed_over(function):
                return None
            rule: Rule | None = Rule(False, int(_closed_over(part)))
        else:
            rule = read_rule(part)
        if rule is None:
            return None
        causal = causal or rule.causal
        if rule.window is not None:
            if window is not None:
                return None
            window = rule.window
    return Rule(causal, window)


class RuleMask(Tensor):
    """A boolean mask (batch, 1, Q, K) that is a rule until somebody asks for its cells.

    Attributes:
        rule: causality and window, None if `attend` does not know the rule.
        padding: ``(batch, key positions)`` booleans by absolute position, False at padding; None if there is none.
        query_offset, key_offset: absolute position of the first query and the first key.
    """

    rule: Rule | None
    padding: Tensor | None
    query_offset: int
    key_offset: int
    _make: Callable[[], Tensor]
    _cells: Tensor | None
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: torch.device, **_: Any) -> "RuleMask":  # noqa: D102
        return empty_wrapper(cls, shape, torch.bool, device)

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, *, rule: Rule | None, padding: Tensor | None, query_offset: int,
        key_offset: int, make: Callable[[], Tensor],
    ):  # fmt: skip
        self.rule, self.padding, self.query_offset, self.key_offset = rule, padding, query_offset, key_offset
        self._make, self._cells = make, None
        self.sights: dict[Any, Any] = {}

    def dense(self) -> Tensor:
        """The mask itself, made once."""
        if self._cells is None:
            self._cells = self._make()
        return self._cells

    def positions(self, start: int, length: int) -> Tensor | None:
        """(batch, length): which of the positions from start are not padding; None if all of them."""
        if self.padding is None:
            return None
        real = F.pad(self.padding, (0, max(0, start + length - self.padding.shape[1])))[
            :, start : start + length
        ]
        return None if bool(real.all()) else real

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def cells(x: Any) -> Any:
            return x.dense() if isinstance(x, RuleMask) else x

        return function(*pytree.tree_map(cells, args), **pytree.tree_map(cells, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask({tuple(self.shape)}, rule={self.rule}, padded={self.padding is not None})"


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None, use_vmap: bool = False,
    device: torch.device | str = "cpu", **others: Any,
) -> RuleMask:  # fmt: skip
    """The mask function registered with transformers; `others` are hints to other implementations (dtype, config, skipping).

    Args:
        batch_size: number of batch items.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: absolute position of the first query.
        kv_offset: absolute position of the first key.
        mask_function: the rule, by batch, head, query and key index; causal if None.
        attention_mask: ``(batch, positions)``, False at padding.
        use_vmap: whether the rule works on single indices only.
        device: where the model's states are.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function

    def make() -> Tensor:
        mask = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=int(q_offset), kv_offset=kv_offset,
            mask_function=function, attention_mask=attention_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
            use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert mask is not None
        return mask

    return RuleMask(
        (batch_size, 1, q_length, kv_length), torch.device(device), rule=read_rule(function),
        padding=None if attention_mask is None or (bool(attention_mask.all()) and attention_mask.shape[1] >= kv_length + kv_offset)
        else attention_mask,
        query_offset=int(q_offset), key_offset=int(kv_offset), make=make,
    )  # fmt: skip
