"""Natural-gradient steps and a Laplace posterior of a small transformer, by Fisher products.

The Fisher information of a model that gives logits is F = E[Jᵀ (diag p − p pᵀ) J], J the derivative of the
logits in the weights. F times a vector is a forward derivative, a covariance under p, which
`xt.fisher_vector_product` gives of the logits as a measure on the classes, and a backward derivative; nothing
of the size of F is made. Conjugate gradients on F + λ give the natural-gradient step (F + λ)⁻¹ ∇loss, and,
from a random right-hand side, draws δ of the Laplace posterior N(0, (n F + λ)⁻¹), for which the model
linearised in its weights, logits + J δ, predicts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

import exptilt as xt

LENGTH, SYMBOLS, CLASSES = 12, 6, 3
Weights = dict[str, Tensor]


class Counter(nn.Module):
    """Which of the first three symbols stands most often in a sequence?"""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(SYMBOLS, width), nn.Linear(width, CLASSES)
        self.block = nn.TransformerEncoderLayer(width, 3, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, class)``."""
        return self.write(self.block(self.read(tokens)).mean(1))


def task(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    counts = torch.stack([(tokens == c).sum(1) for c in range(CLASSES)], -1).double()
    return tokens, (counts + 0.1 * torch.arange(CLASSES)).argmax(-1)  # ties go to the later symbol


def dot(a: Weights, b: Weights) -> Tensor:
    return sum((a[name] * b[name]).sum() for name in a)  # type: ignore[return-value]


def add(a: Weights, b: Weights, factor: Tensor | float = 1.0) -> Weights:
    return {name: a[name] + factor * b[name] for name in a}


def fisher_product(model: nn.Module, tokens: Tensor) -> Callable[[Weights, Weights], Weights]:
    """The function (weights, vector) → F vector, of the mean over a batch."""

    def product(weights: Weights, vector: Weights) -> Weights:
        def logits(w: Weights) -> Tensor:
            return functional_call(model, w, (tokens,))

        out, along = jvp(logits, (weights,), (vector,))
        # Classes are keys e_c, the logits a query: Cov_p(e) times the change of the logits.
        classes = torch.eye(CLASSES, dtype=out.dtype)
        keys = classes.expand(len(out), -1, -1)
        weighted = xt.fisher_vector_product(out[:, None], keys, along[:, None], scale=1.0)
        return vjp(logits, weights)[1](weighted[:, 0] / len(tokens))[0]

    return product


def conjugate_gradients(matrix: Callable[[Weights], Weights], right: Weights, steps: int = 15) -> Weights:
    x = {name: torch.zeros_like(b) for name, b in right.items()}
    left, way, size = right, right, dot(right, right)
    for _ in range(steps):
        image = matrix(way)
        step = size / dot(way, image)
        x, left = add(x, way, step), add(left, image, -step)
        old, size = size, dot(left, left)
        way = add(left, way, size / old)
    return x


def score(model: nn.Module, weights: Weights, tokens: Tensor, generator: torch.Generator) -> Weights:
    """A draw with covariance n F: the gradient of the log-likelihood at labels drawn from the model."""
    with torch.no_grad():
        p = functional_call(model, weights, (tokens,)).softmax(-1)
    labels = torch.multinomial(p, 1, generator=generator)[:, 0]

    def total(w: Weights) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, w, (tokens,)), labels, reduction="sum")

    return torch.func.grad(total)(weights)


def main(steps: int = 8) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Counter().double()
    tokens, labels = task(256, generator)
    fresh, answers = task(1024, generator)
    start: Weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(w: Weights, tokens: Tensor = tokens, labels: Tensor = labels) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, w, (tokens,)), labels)

    with xt.differentiable(model):
        product = fisher_product(model, tokens)
        for name, natural in (("gradient", False), ("natural gradient", True)):
            weights = start
            for _ in range(steps):
                slope = torch.func.grad(loss)(weights)
                if natural:
                    slope = conjugate_gradients(lambda v, w=weights: add(product(w, v), v, 1e-3), slope)
                rates = [2.0**-k for k in range(8)]  # the best of a few lengths
                weights = min((add(weights, slope, -rate) for rate in rates), key=lambda w: float(loss(w)))
            print(f"{name:17s} after {steps} steps: loss {float(loss(weights)):.4f}")
        n, prior = len(tokens), 100.0
        found = []
        for _ in range(8):  # the right-hand side has covariance n F + prior
            noise = {name: torch.randn(w.shape, generator=generator).to(w) for name, w in weights.items()}
            right = add(score(model, weights, tokens, generator), noise, prior**0.5)
            matrix = lambda v: add({k: n * x for k, x in product(weights, v).items()}, v, prior)  # noqa: E731
            drawn = conjugate_gradients(matrix, right, 30)
            logits, change = jvp(lambda w: functional_call(model, w, (fresh,)), (weights,), (drawn,))
            found.append((logits + change).softmax(-1))
        mean = torch.stack(found).mean(0)
        point = functional_call(model, weights, (fresh,)).log_softmax(-1)
    for name, log_p in (("one set of weights", point), ("Laplace posterior", mean.log())):
        right_ones = (log_p.argmax(-1) == answers).double().mean()
        missed = nn.functional.nll_loss(log_p, answers)
        print(f"{name:18s} on new sequences: {100 * right_ones:.1f} % right, log loss {float(missed):.4f}")


if __name__ == "__main__":
    main()
