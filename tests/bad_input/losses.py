"""Bad input to losses."""

import torch

from exptilt import losses as L

X, Y = torch.eye(4), torch.eye(4)
HEAD = {
    "hidden": torch.ones(6, 5, dtype=torch.float64),
    "weight": torch.ones(11, 5, dtype=torch.float64),
    "target": torch.arange(6),
}

ROWS = [
    (lambda: L.info_nce(X[:1], Y[:1]), "query", "a batch of 1"),
    (lambda: L.info_nce(X, Y[:3]), "query", "of one shape"),
    (lambda: L.info_nce(X, Y[:, :3]), "query", "of one shape"),
    (lambda: L.info_nce(X, Y.double()), "query", "same dtype"),
    (lambda: L.info_nce(X, Y, temperature=0), "temperature", "temperature is 0"),
    (lambda: L.info_nce(X, Y, temperature=torch.tensor(-1.0)), "temperature", "temperature must be positive"),
    (lambda: L.info_nce(X, Y, temperature=torch.ones(2)), "temperature", "one number"),
    (lambda: L.info_nce(X, Y, in_batch=False), "in_batch", "no negatives"),
    (lambda: L.info_nce(X, Y, negatives=torch.ones(3, 2, 4)), "negatives", r"\(batch, N, dimension\)"),
    (lambda: L.info_nce(X, Y, negatives=torch.ones(3, 5)), "query", "dimension 4, negatives has 5"),
    (lambda: L.info_nce(X, 2 * Y, similarity="unit"), "similarity", "a row of length 2"),
    (lambda: L.info_nce(X, 0 * Y), "key", r"key\[0\] is 0"),
    (lambda: L.info_nce(X, Y * torch.nan), "key", "finite"),
    (lambda: L.info_nce(X, Y, similarity="euclidean"), "similarity", "'cosine', 'unit', 'dot'"),
    (lambda: L.info_nce(X, Y, reduction="average"), "reduction", "'mean', 'sum', 'none'"),
    (lambda: L.nt_xent(X), "views", "torch.stack"),
    (lambda: L.nt_xent(X[:, None]), "views", "at least two items"),
    (lambda: L.supervised_contrastive(X, torch.arange(4)), "label", "no row"),
    (lambda: L.supervised_contrastive(X, torch.tensor([0, 0, 1, 2])), "label", r"row 2 \(label 1\)"),
    (
        lambda: L.supervised_contrastive(X, torch.arange(4), without_positives="skip"),
        "without_positives",
        "no row",
    ),
    (lambda: L.supervised_contrastive(X, torch.zeros(4)), "label", "whole number"),
    (lambda: L.supervised_contrastive(X[:2], torch.zeros(2, dtype=torch.long)), "embedding", "a batch of 2"),
    (lambda: L.sigmoid(X[:1], Y[:1]), "image", "a batch of 1"),
    (lambda: L.sigmoid(X, Y, bias=torch.ones(2)), "bias", "one number"),
    (
        lambda: L.sampled_softmax(X, Y, torch.tensor([0, 1, 2, 4]), torch.tensor([0])),
        "target",
        r"target\[3\]",
    ),
    (lambda: L.sampled_softmax(X, Y, torch.arange(4), torch.tensor([[0]])), "sampled", "sampled is"),
    (lambda: L.nce(X, Y, torch.arange(4), torch.tensor([0.0])), "sampled", "whole numbers"),
    (
        lambda: L.nce(X, Y, torch.arange(4), torch.tensor([0]), log_noise=torch.ones(3)),
        "log_noise",
        "4 outcomes",
    ),
    (lambda: L.diagnose(X[:1], Y[:1]), "query", "a batch of 1"),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"target": torch.tensor([0, 1, 2, 3, 4, 11])}),
        "target",
        r"target\[5\] must be from 0 to 10",
    ),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"target": torch.tensor([0, -1, 2, 3, 4, 5])}),
        "target",
        r"target\[1\]",
    ),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"target": torch.full((6,), -100)}),
        "target",
        "every target is ignored",
    ),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"target": torch.zeros(5, dtype=torch.long)}),
        "hidden",
        "one target for each row",
    ),
    (lambda: L.linear_cross_entropy(**HEAD | {"target": torch.rand(6)}), "target", "class probabilities"),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"weight": torch.zeros(11, 4, dtype=torch.float64)}),
        "hidden",
        "same dimension",
    ),
    (lambda: L.linear_cross_entropy(**HEAD | {"weight": torch.zeros(11, 5)}), "hidden", "same dtype"),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"bias": torch.zeros(3, dtype=torch.float64)}),
        "bias",
        "11 outcomes",
    ),
    (
        lambda: L.linear_cross_entropy(**HEAD | {"label_smoothing": 1.5}),
        "label_smoothing",
        "label_smoothing is 1.5",
    ),
    (lambda: L.linear_cross_entropy(**HEAD | {"z_loss": -1.0}), "z_loss", "z_loss is -1.0"),
    (lambda: L.linear_cross_entropy(**HEAD | {"reduction": "average"}), "reduction", "'mean', 'sum', 'none'"),
    (lambda: L.linear_cross_entropy(**HEAD | {"softcap": 0.0}), "softcap", "softcap"),
    (lambda: L.clip(X, Y[:3]), "text", "clip: image is .* of one shape"),
    (lambda: L.fisher_vector_product(X, Y, (X, None)), "direction", "direction has 2 entries"),
    (
        lambda: L.linear_kl(X, X, X[:3], X),
        "teacher_hidden",
        r"teacher_hidden is \(3, 4\). Pass one row of each",
    ),
    (lambda: L.linear_kl(X, X, X, X, temperature=0.0), "temperature", "temperature is 0.0"),
]
