"""Bad input to pages: tables and figures that cannot be shown."""

import torch

from exptilt.curvature.influence import Influence
from exptilt.report import Figure, Table, write_curvature

ROWS = [
    (lambda: write_curvature({}, "x"), "spectra", "spectra is empty"),
    (lambda: write_curvature({0: {"a": None}, 1: {"b": None}}, "x"), "spectra", "the same ones"),
    (
        lambda: write_curvature(
            {0: {"a": None}}, "x", influence=Influence(torch.ones(2), None), texts=("t",)
        ),
        "texts",
        "texts has 1 texts, influence has 2 scores",
    ),
    (lambda: Table("t", ("a", "b"), ((1, 2), (1,))), "row", "row 1 has 1 cells, the header has 2"),
    (lambda: Figure("<svg></svg>", " ", "c"), "alt", "alt is empty"),
    (lambda: Figure("<p>", "a", "c"), "svg", "svg starts with '<p>'"),
]
