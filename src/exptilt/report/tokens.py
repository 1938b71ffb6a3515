"""Token text is a stranger's text: what is unseen in it is made visible, and what could upset a page or a terminal is spelled out.

A space becomes ``·`` at either end, a line break ``↵``, a tab ``⇥``. Other control characters show as their pictures (``␛``), and what
draws nothing or turns the direction of writing, which could make a page say something else than its source, as ``⟨U+202E⟩``.
"""

import unicodedata

SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}
# Shown letter for letter, however long a token is: enough for any word, and a table keeps its shape.
LONGEST = 40


def visible(token: str) -> str:
    r"""The token as a reader can see it.

    Args:
        token: any text.

    Example:
        >>> visible(" the"), visible("\n\n"), visible("a\x1b[2J"), visible("")
        ('·the', '↵↵', 'a␛[2J', '∅')
    """
    if not token:
        return "∅"
    body = token.strip(" ")
    start = len(token) - len(token.lstrip(" ")) if body else len(token)
    end = len(token) - len(token.rstrip(" ")) if body else 0
    shown = "·" * start + "".join(_sign(letter) for letter in body) + "·" * end
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _sign(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    if unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}:
        return f"⟨U+{ord(letter):04X}⟩"
    return letter
