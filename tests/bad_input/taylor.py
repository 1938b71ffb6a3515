"""Bad input to the forward Laplacian and to the skewness of scores."""

import torch

import exptilt as xt

X = torch.ones(2, 3)
NAN = torch.full((1, 2, 4), torch.nan)

ROWS = [
    (lambda: xt.laplacian(3, X), "function", ["int", "module"]),
    (lambda: xt.laplacian(torch.sin, [1.0]), "x", ["list", "as_tensor"]),
    (lambda: xt.laplacian(torch.sin, X.long()), "x", ["int64", "float"]),
    (lambda: xt.laplacian(torch.sin, X[:0]), "x", ["(0, 3)", "coordinate"]),
    (lambda: xt.laplacian(torch.sin, X, batch_dims=3), "batch_dims", ["3", "(2, 3)", "at most 2"]),
    (lambda: xt.laplacian(torch.sin, X, batch_dims=-1), "batch_dims", ["-1"]),
    (lambda: xt.laplacian(torch.sin, X, chunk_size=0), "chunk_size", ["0"]),
    (lambda: xt.laplacian(lambda x: (x, x), X), "function", ["tuple", "one tensor"]),
    (lambda: xt.laplacian(lambda x: x > 0, X), "function", ["torch.bool", "real numbers"]),
    (lambda: xt.laplacian(torch.sum, X, batch_dims=1), "function", ["()", "(2, 3)", "each sample"]),
    (lambda: xt.laplacian(torch.bernoulli, X), "laplacian", ["no rule", "torch.bernoulli", "hessian"]),
    (
        lambda: xt.laplacian(lambda x: xt.attend(x[None], x[None], x[None], dropout=0.5).output, X),
        "dropout",
        ["no rule", "Leave"],
    ),
    (lambda: xt.score_skewness(X, X), "query", ["(2, 3)", "unsqueeze"]),
    (lambda: xt.score_skewness(NAN, torch.ones(1, 2, 4)), "query", ["finite", "nan"]),
    (lambda: xt.score_skewness(torch.ones(1, 2, 4), torch.ones(1, 2, 3)), "query", ["dimension 4", "3"]),
]
