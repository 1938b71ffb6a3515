"""Results of a study as plain numbers, without the model; JSON keeps them without loss.

A `HeadMeasure` is one number per layer and head with its standard error over texts; a `LayerMeasure` one per
place along the depth of the model. Each states in a sentence what it is and what it assumes; where it does
not apply, it has no values but a reason. NaN stands for a single missing value (JSON: null).
`exptilt.report` renders a study.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from exptilt._support.errors import ArgumentError
from exptilt.lens.heads.kinds import HeadKind, kinds
from exptilt.lens.inputs.media import Picture
from exptilt.lens.studying import notebook

Array = NDArray[np.float64]
FORMAT = 1
RENAMED = {"key_mass_concentration": "key_mass_divergence"}  # in files of earlier releases
Measures = dict  # a former class, for studies pickled with it


@dataclass(frozen=True)
class HeadMeasure:
    """One statistic of every head.

    Attributes:
        title: what it is called on a page, such as "entropy".
        unit: such as "nats"; empty for a pure number.
        about: what a large or small value means, in a plain sentence.
        assumes: what must hold for the number to mean that.
        value: ``(layer, head)``, or None where it does not apply.
        error: ``(layer, head)``, standard error over texts; None where it cannot be known (one text, or a
            property of the weights).
        reason: why there is no value; empty if there is one.
        baseline: ``(layer, head)``, what chance or shuffled heads give, if that was measured.
        span: lowest and highest value that are possible, None for no bound.
    """

    title: str
    unit: str
    about: str
    assumes: str
    value: Array | None
    error: Array | None = None
    reason: str = ""
    baseline: Array | None = None
    span: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class LayerMeasure:
    """One statistic along the depth of the model.

    Attributes:
        title, unit, about, assumes, reason: as for a head.
        value: ``(place,)`` or ``(place, component)`` (a spectrum), or None where it does not apply.
        error: of the same shape, standard error over texts, or None.
        places: one label per place, such as "embedding", "after layer 0".
    """

    title: str
    unit: str
    about: str
    assumes: str
    value: Array | None
    places: Sequence[str]
    error: Array | None = None
    reason: str = ""


@dataclass(frozen=True)
class Histogram:
    """Distribution of a per-query statistic of one head.

    Attributes:
        edges: ``(bin + 1,)``.
        counts: ``(bin,)``.
    """

    edges: Array
    counts: Array


@dataclass(frozen=True)
class TokenMass:
    """A token and the attention it draws.

    Attributes:
        token: its text, untrusted.
        mass: mean attention per query that can see it, over its occurrences.
        count: number of occurrences.
        lift: attention it gets over its share under uniform attention; 1 is average.
            Under a causal mask early positions draw more whatever stands there, and lift takes that out.
    """

    token: str
    mass: float
    count: int
    lift: float = math.nan


@dataclass(frozen=True)
class HeadDetail:
    """Details of one head, shown when a reader opens it on a page.

    Attributes:
        layer, head: which head.
        histograms: by name of a head measure ("entropy", "log_normalizer", "score_max", ...).
        top_tokens: the tokens that draw most attention for where they stand, by `lift`; rare ones are left
            out if there are enough others.
        strip: ``(query, key)``, attention of this head over the study's strip of text; 0 where a key is
            hidden.
    """

    layer: int
    head: int
    histograms: Mapping[str, Histogram]
    top_tokens: Sequence[TokenMass]
    strip: Array

    def _repr_html_(self) -> str:
        return notebook.of_head(self)


@dataclass(frozen=True)
class Training:
    """The same measures over a series of checkpoints.

    Attributes:
        steps: ``(checkpoint,)`` training steps.
        loss: ``(checkpoint,)`` mean next-token loss on the texts, nats a token; NaN where the model has none.
        heads: by name of a head measure, ``(checkpoint, layer, head)``.
        layers: by name of a layer measure with one number a place, ``(checkpoint, place)``.
        strips: ``(checkpoint, layer, head, query, key)``, attention over the first tokens of the study's
            strip; None for a model of so many heads that they would not fit on a page.
        ends_with_studied: whether the last checkpoint is the model studied.
    """

    steps: Array
    loss: Array
    heads: Mapping[str, Array]
    layers: Mapping[str, Array]
    strips: Array | None = None
    ends_with_studied: bool = False


@dataclass(frozen=True, repr=False)
class Study:
    """All measurements of one model.

    Attributes:
        name: of the model, as the user gave it.
        facts: what the model is, in words and numbers, in the order to show: architecture, layers, heads,
            width, ...
        text_facts: what it was measured on: texts, tokens, chunks, context length, ...
        heads: head measures by name, in the order to show.
        layers: layer measures by name, in the order to show.
        details: one per head, by layer and head.
        strip_tokens: texts of the tokens along the strips, untrusted.
        training: curves over checkpoints, if there were any.
        notes: what the reader must know: chunked texts, left-out measures, warnings.
        seed: of everything random.
        layer_names: dotted name of each attention layer inside the model, with " (cross)" after those that
            look at another sequence.
        picture: what the strips are over, if that is a picture or a sound.
    """

    name: str
    facts: Mapping[str, str | int | float]
    text_facts: Mapping[str, str | int | float]
    heads: Mapping[str, HeadMeasure]
    layers: Mapping[str, LayerMeasure]
    details: Sequence[HeadDetail]
    strip_tokens: Sequence[str]
    training: Training | None
    notes: Sequence[str] = field(default_factory=tuple)
    seed: int = 0
    layer_names: Sequence[str] = ()
    picture: Picture | None = None

    def __repr__(self) -> str:
        return f"<Study of {notebook.in_short(self)}; to_frame() is a table>"

    def _repr_html_(self) -> str:
        return notebook.of_study(self)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and of heads per layer; (0, 0) if no measure has a value."""
        return next((m.value.shape for m in self.heads.values() if m.value is not None), (0, 0))

    @property
    def kinds(self) -> dict[str, HeadKind]:
        """Kinds of heads by name, each with its rule, its numbers and its members; see `HeadKind`."""
        return kinds(self.heads, picture=self.picture is not None and self.picture.kind == "picture")

    def to_json(self) -> str:
        """The study as JSON text, from which `from_json` makes an equal one."""
        return json.dumps({"format": FORMAT, **plain(self)}, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | os.PathLike[str]) -> "Study":
        """The study that `to_json` wrote.

        Args:
            text: the JSON text, or the path of a file that holds it.
        """
        if isinstance(text, os.PathLike) or not text.lstrip().startswith("{"):
            try:
                text = Path(text).read_text("utf-8")
            except (OSError, ValueError) as problem:
                said = f"{str(text)[:80]!r}, which is neither JSON nor a file that can be read"
                raise ArgumentError(
                    f"Study.from_json: got {said} ({problem}). Pass the text that to_json gave, or the path "
                    "of a study.json."
                ) from problem
        try:
            data = json.loads(text)
            if data.pop("format") == FORMAT:
                found: Study = read(cls, data)
                return found
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ArgumentError(
                f"Study.from_json: this is not a study that to_json wrote ({problem})."
            ) from problem
        raise ArgumentError(
            f"Study.from_json: this file has another format than {FORMAT}. Run the study again."
        )

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row per layer and head: every head measure, its error and baseline."""
        import pandas as pd

        layers, heads = self.shape
        columns: dict[str, Any] = {
            "layer": np.repeat(np.arange(layers), heads),
            "head": np.tile(np.arange(heads), layers),
        }
        for name, m in self.heads.items():
            for suffix, array in (("", m.value), ("_error", m.error), ("_baseline", m.baseline)):
                if array is not None:
                    columns[name + suffix] = array.ravel()
        if (found := self.kinds) and layers:
            members = np.stack([kind.members.ravel() for kind in found.values()])
            names = list(found)
            columns["kinds"] = [
                ", ".join(n for n, is_in in zip(names, m, strict=True) if is_in) for m in members.T
            ]
        return pd.DataFrame(columns)


def plain(value: Any) -> Any:
    """Dataclasses, named tuples, arrays and mappings as JSON values; NaN as null, infinities as words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def read(hint: Any, value: Any) -> Any:
    """Inverse of `plain`: a value of type `hint` from its JSON value; null is NaN, words are infinities."""
    kind, parts = get_origin(hint), get_args(hint)
    if type(None) in parts:
        return None if value is None else read(parts[0], value)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        hints, make = get_type_hints(hint), cast(Any, hint)
        return make(**{name: read(hints[name], item) for name, item in value.items()})
    if hint == Array:
        return np.asarray(value, dtype=object).astype(np.float64)
    if hint is float:
        return float("nan" if value is None else value)
    if kind is Mapping:
        return {RENAMED.get(name, name): read(parts[1], item) for name, item in value.items()}
    if kind is Sequence:
        return [read(parts[0], item) for item in value]
    if kind is tuple:
        return tuple(read(parts[0], item) if parts[-1] is ... else item for item in value)
    return value
