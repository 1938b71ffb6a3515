"""Make untrusted text safe to show: invisible and control characters are spelled out.

A line break becomes ``↵``, a tab ``⇥``. Other control characters show as their pictures (``␛``), and whatever
draws nothing or turns the direction of writing, which could make a page say something else than its source,
as ``⟨U+202E⟩``.
"""

import unicodedata

SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}
# Most letters shown of a token: enough for any word, and a table keeps its shape.
LONGEST = 40


def plain(text: str) -> str:
    r"""The text with everything that does not print spelled out.

    Example:
        >>> plain("a\x1b[2Jb c")
        'a␛[2Jb c'
    """
    return "".join(map(_sign, text))


def visible(token: str) -> str:
    r"""The token as a reader can see it: spaces at either end as dots, at most `LONGEST` letters.

    Example:
        >>> visible(" the"), visible("\n\n"), visible("a\x1b[2J"), visible("")
        ('·the', '↵↵', 'a␛[2J', '∅')
    """
    if not token:
        return "∅"
    rest = token.lstrip(" ")
    body = rest.rstrip(" ")
    shown = "·" * (len(token) - len(rest)) + plain(body) + "·" * (len(rest) - len(body))
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _sign(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    if unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}:
        return f"⟨U+{ord(letter):04X}⟩"
    return letter
