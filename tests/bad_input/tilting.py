"""Bad input to `attend` and its relatives."""

import torch

import exptilt as xt
from exptilt.tilting import attend_packed, divergence

Q, K, V = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
GIVEN = {"query": Q, "key": K, "value": V}
PACKED = torch.ones(2, 5, 4)
NAN = K.clone()
NAN[1, 0, 2, 3] = torch.nan


def part(heads: int, queries: int, mass: bool) -> xt.AttentionResult:
    key = torch.ones(heads, 4, 2)
    return xt.attend(torch.ones(heads, queries, 2), key, key, key_mass=mass)


ROWS = [
    (lambda: xt.attend(**GIVEN | {"query": torch.zeros(3, 8)}), "query", ["query", "(3, 8)", "unsqueeze"]),
    (lambda: xt.attend(**GIVEN | {"query": Q.tolist()}), "query", ["query", "list", "torch tensor"]),
    (lambda: xt.attend(**GIVEN | {"query": Q.long()}), "query", ["query", "torch.int64", "float"]),
    (
        lambda: xt.attend(**GIVEN | {"key": K.double()}),
        "key",
        ["key", "torch.float64", "torch.float32", "to(query.dtype)"],
    ),
    (lambda: xt.attend(**GIVEN | {"query": torch.zeros(2, 4, 3, 7)}), "query", ["dimension 7", "8"]),
    (
        lambda: xt.attend(**GIVEN | {"query": torch.zeros(2, 4, 3, 0), "key": torch.zeros(2, 2, 5, 0)}),
        "query",
        ["query", "empty"],
    ),
    (lambda: xt.attend(**GIVEN | {"query": torch.zeros(2, 3, 3, 8)}), "query", ["3 heads", "2", "divide"]),
    (
        lambda: xt.attend(**GIVEN | {"value": torch.zeros(2, 1, 5, 6)}),
        "key",
        ["key has 2 heads", "value has 1"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"value": torch.zeros(2, 2, 4, 6)}),
        "key",
        ["key has 5 positions", "value has 4", "same sequence"],
    ),
    (lambda: xt.attend(**GIVEN | {"key": torch.zeros(3, 2, 5, 8)}), "key", ["batch axes", "(3, 2, 5, 8)"]),
    (lambda: xt.attend(**GIVEN | {"key": K.to("meta")}), "key", ["key", "meta", "cpu"]),
    (lambda: xt.attend(**GIVEN | {"key": NAN}), "key", ["key", "NaN", "[1, 0, 2, 3]", "check=False"]),
    (lambda: xt.attend(**GIVEN | {"query": torch.full_like(Q, torch.inf)}), "query", ["query", "infinity"]),
    (
        lambda: xt.attend(**GIVEN | {"bias": torch.full((3, 5), torch.nan)}),
        "bias",
        ["bias", "NaN", "[0, 0, 0, 0]"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"log_weight": torch.tensor([0.0, torch.inf, 0.0, 0.0, 0.0])}),
        "log_weight",
        ["log_weight", "infinity", "[0, 0, 1]"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"query": Q + 1e30, "key": K + 1e30}),
        "key",
        ["overflow", "torch.float32", "1.0e+30"],
    ),
    (lambda: xt.attend(**GIVEN | {"softcap": -1.0}), "softcap", ["softcap", "-1.0", "c > 0"]),
    (lambda: xt.attend(**GIVEN | {"softcap": 0.0}), "softcap", ["softcap", "None"]),
    (lambda: xt.attend(**GIVEN | {"softcap": torch.tensor(2.0)}), "softcap", ["softcap", "number"]),
    (lambda: xt.attend(**GIVEN | {"scale": torch.tensor(2.0)}), "scale", ["scale", "multiply the query"]),
    (lambda: xt.attend(**GIVEN | {"scale": float("nan")}), "scale", ["scale", "nan", "finite"]),
    (lambda: xt.attend(**GIVEN | {"window": -1}), "window", ["window", "-1", ">= 0"]),
    (lambda: xt.attend(**GIVEN | {"window": 2.0}), "window", ["window", "2.0", "integer"]),
    (lambda: xt.attend(**GIVEN | {"window": True}), "window", ["window", "True"]),
    (
        lambda: xt.attend(**GIVEN | {"mask": torch.ones(4, 5, dtype=torch.bool)}),
        "mask",
        ["mask", "(4, 5)", "broadcast", "(2, 4, 3, 5)"],
    ),
    (lambda: xt.attend(**GIVEN | {"mask": torch.zeros(3, 5)}), "mask", ["mask", "torch.float32", "bias="]),
    (
        lambda: xt.attend(**GIVEN | {"mask": torch.zeros(3, 5, dtype=torch.long)}),
        "mask",
        ["mask", "torch.int64", "bool()"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"bias": torch.zeros(7, 1, 1, 1, 1)}),
        "bias",
        ["bias", "(7, 1, 1, 1, 1)", "broadcast"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"bias": torch.zeros(3, 5, dtype=torch.float64)}),
        "bias",
        ["bias", "torch.float64", "torch.float32"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"bias": torch.zeros(3, 5, dtype=torch.long)}),
        "bias",
        ["bias", "torch.int64"],
    ),
    (
        lambda: xt.attend(**GIVEN | {"log_weight": torch.zeros(4)}),
        "log_weight",
        ["log_weight", "(4,)", "(2, 2, 5)"],
    ),
    (lambda: xt.attend(**GIVEN | {"sink": torch.zeros(3)}), "sink", ["sink", "(3,)", "(2, 4)"]),
    (
        lambda: xt.attend(**GIVEN | {"backend": "cuda"}),
        "backend",
        ["backend", "'cuda'", "reference, tiled, cpu, gpu"],
    ),
    (lambda: xt.attend(**GIVEN | {"backend": "gpu"}), "backend", ["backend", "gpu", "CPU"]),
    (lambda: xt.log_normalizer(Q.long(), K), "query", "log_normalizer: query"),
    (lambda: xt.fisher_vector_product(Q, K, Q[..., :4]), "vector", "fisher_vector_product: vector"),
    (lambda: xt.fisher_vector_product(Q, K, [1.0]), "vector", "fisher_vector_product: vector is list"),
    (lambda: xt.unmerge(part(2, 3, False), part(2, 4, False)), "part", "same queries"),
    (
        lambda: xt.leave_one_out(torch.ones(1, 2, 3), torch.ones(1, 4, 2), torch.ones(1, 4, 2)),
        "key",
        "dimension",
    ),
    (lambda: xt.merge([]), "parts", "no parts"),
    (lambda: xt.merge([part(2, 3, False), part(2, 4, False)]), "queries", "same queries"),
    (lambda: xt.merge([part(2, 3, True)] * 2), "key_mass", "key_mass"),
    (
        lambda: attend_packed(
            *[PACKED] * 3, query_starts=torch.tensor([0, 9]), key_starts=torch.tensor([0, 5])
        ),
        "query_starts",
        "query_starts ends at 9, but query has 5 positions",
    ),
    (
        lambda: attend_packed(*[PACKED] * 3, query_starts=[0, 5], key_starts=torch.tensor([0, 5])),
        "query_starts",
        "query_starts is list, not a vector",
    ),
    (lambda: divergence(Q, K, Q, K[..., :4, :]), "keys", "p has 5 keys, q has 4"),
]
