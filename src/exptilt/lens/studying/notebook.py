"""What a study and one head show of themselves in a notebook: small tables in HTML, all text escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from exptilt.lens.studying.results import HeadDetail, Study

SIDE = 144  # pixels of a head's picture


def table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> str:
    """A table of text and numbers."""

    def cell(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else escape(str(value))

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(x)}</td>" for x in row) + "</tr>" for row in rows)
    head = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>"


def of_study(study: "Study") -> str:
    """The model, and its kinds of heads."""
    layers, heads = next((m.value.shape for m in study.heads.values() if m.value is not None), (0, 0))
    tokens = study.text_facts.get("tokens", "?")
    caption = f"{study.name}: {layers} layers of {heads} heads, {tokens} tokens"
    rows = []
    for name, kind in study.kinds.items():
        members = [f"L{layer}H{head}" for layer, head in np.argwhere(kind.members)]
        more = f" and {len(members) - 8} more" if len(members) > 8 else ""
        rows.append((name, kind.about, len(members), ", ".join(members[:8]) + more))
    return table(("kind", "what such a head does", "heads", "which"), rows, caption)


def of_head(detail: "HeadDetail") -> str:
    """Attention over the strip as a picture, and the tokens that draw most."""
    strip = np.asarray(detail.strip)
    cells = []
    step = SIDE / max(1, len(strip))
    for (row, column), weight in np.ndenumerate(strip):
        if weight > 0.004:
            place = f'x="{column * step:.2f}" y="{row * step:.2f}" width="{step:.2f}" height="{step:.2f}"'
            cells.append(f'<rect {place} fill-opacity="{weight**0.5:.2f}"/>')
    title = f"Attention of layer {detail.layer}, head {detail.head}: rows look, columns are looked at"
    picture = (
        f'<svg width="{SIDE}" height="{SIDE}" role="img" aria-label="{title}" fill="#0a365c" '
        f'style="border:1px solid #888"><title>{title}</title>{"".join(cells)}</svg>'
    )
    rows = [(repr(t.token), t.lift, f"{100 * t.mass:.2g} %", t.count) for t in detail.top_tokens]
    caption = f"Layer {detail.layer}, head {detail.head}"
    return picture + table(("token", "times even", "share", "count"), rows, caption)
