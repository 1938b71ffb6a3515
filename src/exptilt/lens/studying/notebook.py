"""Small HTML tables that show a study or one head in a notebook, all text escaped."""

from typing import TYPE_CHECKING

import numpy as np

from exptilt._support.plotting import html_squares, html_table

if TYPE_CHECKING:
    from exptilt.lens.studying.results import HeadDetail, Study


def some_heads(members: np.ndarray) -> str:
    """Names of the first eight heads that are True in ``(layer, head)``, and how many more there are."""
    names = [f"L{layer}H{head}" for layer, head in np.argwhere(members)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def in_short(study: "Study") -> str:
    """Name, size and number of tokens of a study, in one line."""
    layers, heads = study.shape
    tokens = study.text_facts.get("tokens", "?")
    return f"{study.name}: {layers} layers of {heads} heads, {tokens} tokens"


def of_study(study: "Study") -> str:
    """HTML table of the kinds of heads, with a line on the model as its caption."""
    rows = [
        (name, kind.about, kind.members.sum(), some_heads(kind.members)) for name, kind in study.kinds.items()
    ]
    return html_table(("kind", "what such a head does", "heads", "which"), rows, in_short(study))


def of_head(detail: "HeadDetail") -> str:
    """HTML picture of attention over the strip, and a table of the tokens that draw most."""
    title = f"Attention of layer {detail.layer}, head {detail.head}: rows are queries, columns are keys"
    picture = html_squares(np.asarray(detail.strip), title)
    rows = [(repr(t.token), t.lift, f"{100 * t.mass:.2g} %", t.count) for t in detail.top_tokens]
    caption = f"Layer {detail.layer}, head {detail.head}"
    return picture + html_table(("token", "times uniform", "share", "count"), rows, caption)
