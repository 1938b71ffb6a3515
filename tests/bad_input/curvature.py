"""Bad input to curvature."""

import torch
from torch import nn

from exptilt import curvature as C


def model(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *more, nn.Linear(4, 2))


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.tensor([0, 1, 1, 0]))]
ONES = torch.ones(26)


def made(model=model, loss="cross_entropy", data=DATA, kind="ggn", parameters=None, sample=None, seed=0):
    """A curvature of a small model; `model` is one, or makes one."""
    built = model if isinstance(model, nn.Module) else model()
    return C.Curvature(built, loss, data, kind, parameters, sample=sample, seed=seed)


def frozen():
    return model().requires_grad_(False)


class Noisy(nn.Module):
    """Drops at random in evaluation too."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


def checkpointed():
    built = model(nn.Tanh())
    built[1].gradient_checkpointing = True
    return built


class Shuffled:
    """A loader that gives its rows in another order each time."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        order = torch.roll(torch.arange(4), self.passes)
        return iter([(X[order], DATA[0][1][order])])


def contrastive(output, batch):
    return output.logsumexp(0)[0] - output[:, 0]


def mean(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


ROWS = [
    (lambda: C.Curvature("gpt2", "cross_entropy", DATA), "model", "is a str"),
    (lambda: made(loss="mse"), "loss", "'mse'. Pass 'cross_entropy', or a function"),
    (lambda: made(loss=lambda out, batch: 1.0) @ ONES, "loss", "returned float"),
    (lambda: made(loss=contrastive), "loss", "item 0 depends on the outputs of other items"),
    (lambda: made(loss=mean, data=DATA * 2), "loss", "there are 2 batches, whose weights it does not say"),
    (lambda: made(loss=mean, kind="empirical") @ ONES, "loss", "one for each sample"),
    (lambda: made(loss=mean, kind="fisher"), "sample", "labels drawn from the model"),
    (lambda: made(kind="newton"), "kind", "'ggn', 'hessian', 'fisher', 'empirical'"),
    (lambda: made(seed=-1), "seed", "seed is -1"),
    (lambda: made(data=DATA[0][0]), "data", "a list of batches"),
    (lambda: made(data=iter(DATA)), "data", "read only once"),
    (lambda: made(data=[]), "data", "no batches"),
    (lambda: made(data=[X]), "data", "has no labels"),
    (lambda: made(data=[(X, X)]), "data", "labels of data are torch.float32"),
    (lambda: made(data=[(X, torch.tensor([0, 1, 1, -100, 0]))]), "data", r"labels of data are \(5,\)"),
    (lambda: made(data=[(X, torch.tensor([0, 1, 1, 2]))]), "data", "from 0 to 1"),
    (lambda: made(data=[(X, torch.full((4,), -100))]), "data", "all are −100"),
    (lambda: made(data=Shuffled()) @ ONES, "data", "batch 0 of data .* Turn off shuffling"),
    (lambda: made(model=model(nn.Dropout(0.1))), "model", r"1 \(Dropout\) .*model\.eval"),
    (lambda: made(model=model(nn.BatchNorm1d(4))), "model", r"1 \(BatchNorm1d\) .*model\.eval"),
    (lambda: made(model=model(Noisy()).eval()), "model", r"1 \(Noisy\) draws random numbers"),
    (lambda: made(model=checkpointed()), "model", r"1 \(Tanh\) checkpoints its activations"),
    (lambda: made(model=frozen()), "model", "requires_grad_"),
    (lambda: made(parameters=[]), "parameters", "empty"),
    (lambda: made(parameters="3.*"), "parameters", r"has '3\.\*'"),
    (lambda: made().matvec(torch.ones(25)), "vector", r"Pass \(26,\) or \(26, K\)"),
    (lambda: made().matvec(torch.ones(26, dtype=torch.long)), "vector", "int64"),
    (lambda: made().matvec(ONES * torch.nan), "vector", "NaN"),
    (lambda: made().matvec(3.0), "vector", "is a float"),
    (lambda: made().matvec([ONES]), "vector", "a list of 1 tensors. Pass 4"),
    (lambda: made().matvec({"0.weight": torch.ones(4, 3)}), "vector", "part 0.bias is None"),
    (
        lambda: made().matvec({"5.weight": torch.ones(4, 3)}),
        "vector",
        "5.weight of the vector is not among the chosen",
    ),
    (lambda: made().matvec(ONES[:, None]), "vector", "matmat"),
    (lambda: made().matmat(ONES), "matrix", "matvec"),
    (lambda: made().solve(ONES, damping=-1.0), "damping", "-1"),
    (lambda: made().trace(probes=1), "probes", "≥ 2"),
    (lambda: made().trace(method="exact"), "method", "hutchinson"),
    (lambda: made().eigenvalues(27), "k", "26 rows"),
    (lambda: made().eigenvalues(2, which="first"), "which", "'largest'"),
    (lambda: C.influence(model(), DATA, damping=0.1), "curvature", "Sequential"),
    (lambda: C.LaplacePosterior(made(kind="hessian")), "curvature", "'hessian'"),
    (lambda: C.LaplacePosterior(made(), basis=torch.eye(25)), "basis", r"\(26, k\)"),
]
