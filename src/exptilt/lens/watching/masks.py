r"""Masks of transformers, kept as rules for as long as possible; and what a dense mask hides and adds.

transformers makes the mask of a model once a forward pass, through a function of the chosen attention
implementation. Ours returns a `RuleMask`: a tensor of shape (batch, 1, Q, K) that holds no cells, only the
rule

    query i sees key j  ⇔  rule(i + query_offset, j + key_offset)  and  key j is not padding.

`attend` knows causal, bidirectional and sliding-window rules by itself, and nothing n×n is ever made for
them. Any other rule (packed sequences, chunks, a function of the model or the user), or any operation that a
model does on its mask, makes the dense mask. Since a model may calculate with the mask (BEiT adds its
position bias, DeepSeek-V4 appends columns), it is of the kind that the model's own implementation would get:
booleans, numbers to add for eager attention, or no mask at all.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import empty_wrapper, is_concrete, no_torch_function, pytree


class Rule(NamedTuple):
    """The arguments `causal` and `window` of `attend`."""

    causal: bool
    window: int | None


@cache
def _known_code() -> dict[Any, str]:
    """Code objects of the closures that transformers builds its rules from."""
    from transformers import masking_utils as m

    both_ways = m.sliding_window_bidirectional_overlay(1)
    closures = {"and": m.and_masks(), "back": m.sliding_window_overlay(1), "both ways": both_ways}
    return {function.__code__: name for name, function in closures.items()}


def _parts(function: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each rule that must hold: the name of its known code or "", the function, and the value it encloses."""
    code = _known_code().get(getattr(function, "__code__", None), "")
    inside: Any = function.__closure__[0].cell_contents if code else None
    if code == "and":
        for part in inside:
            yield from _parts(part)
    else:
        yield code, function, inside


def read_rule(function: Callable[..., Any]) -> Rule | None:
    """A mask function of transformers (of batch, head, query, key) as a rule that `attend` knows, or None."""
    from transformers import masking_utils as m

    parts = list(_parts(function))
    causal, windows = any(part is m.causal_mask_function for _, part, _ in parts), []
    for code, part, width in parts:
        if code == "both ways":
            windows.append(int(width) + 1)
        elif code == "back" and causal:  # looks back only: with causality, a window of `attend`
            windows.append(int(width))
        elif part is not m.causal_mask_function and part is not m.bidirectional_mask_function:
            return None
    return Rule(causal, windows[0] if windows else None) if len(windows) < 2 else None


class RuleMask(Tensor):
    """A mask (batch, 1, Q, K), boolean or to be added, kept as a rule until an operation needs its cells."""

    rule: Rule | None  # None if `attend` does not know it
    padding: Tensor | None  # (batch, key positions) booleans by absolute position, False at padding
    offsets: tuple[int, int]  # absolute position of the first query and of the first key
    skipped: bool  # whether transformers' sdpa would get no mask here, but ask the module if it is causal
    known: dict[Any, Any]  # results derived from the mask, see `Readings`
    _make: Callable[[], Tensor]
    _cells: Tensor | None
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(  # noqa: D102
        cls, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, *_: Any
    ) -> "RuleMask":
        return empty_wrapper(cls, shape, dtype, device)  # type: ignore[no-any-return]

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        rule: Rule | None,
        padding: Tensor | None,
        offsets: tuple[int, int],
        make: Callable[[], Tensor],
    ):
        self.rule, self.padding, self.offsets, self.known = rule, padding, offsets, {}
        self._make, self._cells, self.skipped = make, None, False

    def dense(self) -> Tensor:
        """The dense mask, made once."""
        if self._cells is None:
            self._cells = self._make()
        return self._cells

    def shown(self) -> Tensor:
        """The mask as booleans, True where a key is seen."""
        cells = self.dense()
        return cells if cells.dtype == torch.bool else cells == 0

    def positions(self, start: int, length: int) -> Tensor | None:
        """(batch, length): which of the positions from start are not padding; None if all of them."""
        if self.padding is None:
            return None
        stop = start + length
        real = F.pad(self.padding, (0, max(0, stop - self.padding.shape[1])))[:, start:stop]
        return None if is_concrete(real) and bool(real.all()) else real

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def cells(x: Any) -> Any:
            return x.dense() if isinstance(x, RuleMask) else x

        return func(*pytree.tree_map(cells, args), **pytree.tree_map(cells, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask({tuple(self.shape)}, rule={self.rule}, padded={self.padding is not None})"


def make_mask(*, eager: bool = False, **asked: Any) -> RuleMask | None:
    """The mask function registered with transformers; `eager` if the model's own attention is eager.

    Keywords are those of transformers' ``sdpa_mask``. Returns None if the model's own implementation would
    get no mask.
    """
    from transformers import masking_utils as m

    function = asked.get("mask_function") or m.causal_mask_function
    offsets = int(asked.get("q_offset", 0)), int(asked.get("kv_offset", 0))
    asked |= {"q_offset": offsets[0], "kv_offset": offsets[1], "mask_function": function}
    always = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

    def make() -> Tensor:
        mask = (m.eager_mask if eager else m.sdpa_mask)(**{**asked, **always})
        assert mask is not None
        return mask

    padding: Tensor | None = asked.get("attention_mask")
    shape = (asked["batch_size"], 1, asked["q_length"], asked["kv_length"])
    long_enough = padding is not None and padding.shape[1] >= shape[3] + offsets[1]
    if padding is not None and long_enough and is_concrete(padding) and bool(padding.all()):
        padding = None
    rule = read_rule(function)
    width = asked.get("local_size")
    if asked.get("allow_is_bidirectional_skip") and padding is None and (width is None or shape[3] < width):
        return None
    dtype = asked.get("dtype", torch.float32) if eager else torch.bool
    device = torch.device(asked.get("device", "cpu"))
    mask = RuleMask(shape, device, dtype, rule, padding, offsets, make)
    if rule is None:
        mask.dense()  # now: it may need vmap, which does not run inside __torch_dispatch__
    elif rule.causal and padding is None and not eager and asked.get("allow_is_causal_skip", True):
        mask.skipped = shape[2] in (1, shape[3]) and (width is None or shape[3] < width)
    return mask


# Masks made by hand hide a key with −1e4 or −1e9: a weight of e^−9000 is 0 in every format. Position biases
# (ALiBi) may go as low far from the query, but then also take the values in between.
_HIDES = -9e3


def split_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A dense mask as booleans (True shows) and numbers to add, either of which may be None."""
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ArgumentError(
            f"watch: a mask of dtype {mask.dtype} is neither boolean nor floating point. Pass booleans "
            "(True: visible), or floats to add to the scores."
        )
    lowest = torch.finfo(mask.dtype).min / 2
    if not is_concrete(mask):  # inside vmap the numbers cannot be inspected
        return mask > lowest, mask.masked_fill(mask <= lowest, 0.0)
    if not bool(((mask > _HIDES) & (mask < _HIDES / 2)).any()):
        lowest = max(lowest, _HIDES)
    seen = mask > lowest
    adds = mask.requires_grad or bool(((mask != 0) & seen).any())
    return (None if bool(seen.all()) else seen), (mask.masked_fill(~seen, 0.0) if adds else None)


def real_keys(seen: Tensor | None, batch: int, K: int) -> Tensor | None:
    """(batch, K) booleans: keys that some query sees, the others are padding; None if all are seen.

    The mask `seen` is (batch or 1, heads or 1, Q or 1, K or 1).
    """
    if seen is None:
        return None
    real = seen.any(1).any(1).expand(batch, K)
    return None if bool(real.all()) else real


class Readings:
    """Cache of results derived from a mask, for layers that get the same tensor one after another."""

    def __init__(self) -> None:
        self._last: tuple[Any, dict[Any, Any]] = (lambda: None, {})

    def of(self, mask: Tensor) -> dict[Any, Any]:
        """The cached results of this mask, a dictionary to read and to add to."""
        if isinstance(mask, RuleMask):
            return mask.known
        last = self._last
        if last[0]() is not mask:
            self._last = last = weakref.ref(mask), {}
        return last[1]
