"""Bad input to pages: tables and figures that cannot be shown."""

from exptilt.report import Figure, Table

ROWS = [
    (lambda: Table("t", ("a", "b"), ((1, 2), (1,))), "row", "row 1 has 1 cells, the header has 2"),
    (lambda: Figure("<svg></svg>", " ", "c"), "alt", "alt is empty"),
    (lambda: Figure("<p>", "a", "c"), "svg", "svg starts with '<p>'"),
]
