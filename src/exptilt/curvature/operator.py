r"""`Curvature`: the curvature of a model's loss as a linear operator, exact, in memory that grows as n.

With L(w) = (1/N) Σ ℓ_i(z_i(w)), the mean over N items (tokens) of a loss of the model's outputs z,

    Hessian       ∇²L
    Gauss–Newton  (1/N) Σ J_iᵀ ∇²ℓ_i J_i          J = ∂z/∂w, ∇²ℓ in z
    Fisher        (1/N) Σ E_{y ~ model} ∇ℓ_i ∇ℓ_iᵀ
    empirical     (1/N) Σ_s ∇ℓ_s ∇ℓ_sᵀ            ℓ_s the sum of the losses of sequence s

A product is a forward derivative along the vector, a small matrix in between, and a backward pass: J v, then
∇²ℓ, then Jᵀ. Nothing is kept between the two, so the memory is that of a gradient. The empirical one is the
same with ℓ_s in place of z, and the Hessian is a forward derivative of the gradient.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.autograd import forward_ad

from exptilt._support import checks
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.files import draft, prepare_folder
from exptilt._support.solution import Solution
from exptilt._support.transforms import autocasts, full_precision, version
from exptilt.curvature.batches import Batches, fingerprint
from exptilt.curvature.estimates import Estimates
from exptilt.curvature.memory import freed_memory_returned
from exptilt.curvature.objectives import CrossEntropy, FunctionLoss, Outputs, Weights, push
from exptilt.curvature.parameters import Parameters
from exptilt.curvature.refusals import first_not_finite, randomness_refused, refuse_training
from exptilt.lens.differentiable import differentiable

KINDS = ("ggn", "hessian", "fisher", "empirical")
Form = TypeVar("Form")  # of a vector: tensor, array, dict or list
Loss = str | Callable[[Any, Any], Tensor]
Sampler = Callable[[Any, Any, torch.Generator], Any]


class Curvature(Estimates):
    r"""A curvature matrix of a model's loss, as a linear operator that is never formed.

    Products are exact, of the mean loss over all items of all batches, whatever the sizes of the batches.
    The model is used as it is, with its weights of the moment; `differentiable` computes its attention, and
    logits are not kept where the model's head is linear. Vectors are flat, in the order of
    ``named_parameters``, or a dict of tensors by name, or a list of tensors as curvlinops takes them; what
    comes back has the same form.

    Args:
        model: any module in evaluation mode; a transformers model without changes.
        loss: "cross_entropy", the mean over labels ≠ −100 as in the model's own loss (of the next token for
            causal models), or a function of the model's output and the batch that returns ``(...)``, one loss
            for each item, or one number ``()`` if there is a single batch.
        data: a list of batches or a loader that repeats itself: dicts such as
            ``{"input_ids": ids, "labels": ids}``, or (inputs, labels).
        kind: "ggn" (Gauss–Newton), "hessian", "fisher" (exact for cross-entropy, where it equals "ggn"; a
            function needs `sample`), or "empirical" (gradients of whole sequences, as they are in the data).
        parameters: names, patterns with * or names of modules; None for all. Frozen parameters
            (``requires_grad=False``) are constants, shared ones count once.
        sample: for ``kind="fisher"`` of a function: ``sample(output, batch, generator)`` returns a batch with
            labels drawn from the model, and the expectation is over one such draw for each item.
        seed: for those draws, which are the same in every product.
        checkpoint: a folder that keeps every product on disk. Work that was interrupted, called again in the
            same way, takes them from there. None keeps nothing.
        progress: whether to show bars: True, False, or None for terminals only.

    Attributes:
        shape: (P, P), P the number of chosen numbers.
        dtype: of flat vectors.
        device: of flat vectors.
        items: N, how many labels or losses the mean is over.
        parameters: names, shapes, what is frozen and what is shared.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> data = [(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))]
        >>> ggn = xt.curvature.Curvature(model, "cross_entropy", data)
        >>> ggn.shape, (ggn @ torch.ones(26)).shape
        ((26, 26), torch.Size([26]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Iterable[Any],
        kind: str = "ggn",
        parameters: str | Iterable[str] | None = None,
        *,
        sample: Sampler | None = None,
        seed: int = 0,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"Curvature: model is a {type(model).__name__}. Pass a torch.nn.Module.")
        self.kind = checks.choice("Curvature", "kind", kind, KINDS)
        if not callable(loss) and loss != "cross_entropy":
            raise ArgumentError(
                f"Curvature: loss is {loss!r}. Pass 'cross_entropy', or a function of output and batch."
            )
        refuse_training(model)
        self.model, self.loss, self.sample = model, loss, sample
        self.seed = checks.whole("Curvature", "seed", seed, least=0)
        self.parameters = Parameters(model, parameters)
        self.progress, self.checkpoint = progress, None if checkpoint is None else Path(checkpoint)
        if self.checkpoint is not None:
            prepare_folder(self.checkpoint)
        self.batches = Batches(data, progress)
        with self._attention(), randomness_refused(model):
            self.objective: CrossEntropy | FunctionLoss = (
                CrossEntropy(model, next(iter(data)))
                if isinstance(loss, str)
                else FunctionLoss(model, loss, len(self.batches))
            )
            self.items = sum(self.objective.count(batch) for batch in self.batches)
        if not self.items:
            raise ArgumentError("Curvature: no label of data counts, all are −100. Pass labels to predict.")
        if kind == "fisher" and not isinstance(loss, str) and sample is None:
            raise ArgumentError(
                "Curvature: the Fisher information of a function needs labels drawn from the model. Pass "
                "sample=, or kind='ggn', which equals it for likelihoods of exponential families."
            )
        self.shape = (self.parameters.count, self.parameters.count)
        self.dtype, self.device = self.parameters.dtype, self.parameters.device
        self._weights_mark: tuple[Any, str] | None = None

    def __repr__(self) -> str:
        chosen = self.parameters
        said = f"{self.kind} of {type(self.model).__name__}, {chosen.count:,} numbers"
        said += f" in {len(chosen.names)} tensors"
        said += f", {self.items:,} items in {len(self.batches)} batches"
        said += f"; {len(chosen.frozen)} frozen" if chosen.frozen else ""
        said += "".join(f"; {name} is {kept}" for name, kept in chosen.shared.items())
        return f"Curvature({said})"

    def restrict(self, parameters: str | Iterable[str]) -> "Curvature":
        """The diagonal block of the matrix that belongs to some of the parameters.

        Args:
            parameters: names, patterns or modules, as in the constructor.
        """
        found = object.__new__(Curvature)
        found.__dict__.update(self.__dict__)
        found.parameters = Parameters(self.model, parameters)
        found.shape = (found.parameters.count, found.parameters.count)
        found.dtype = found.parameters.dtype
        return found

    def layers(self) -> dict[str, "Curvature"]:
        """The diagonal block of each layer, by its name: "model.layers.0", ..."""
        return {place: self.restrict(names) for place, names in self.parameters.layers().items()}

    def gradient(self) -> Tensor:
        """The gradient of the mean loss.

        Returns:
            ``(P,)``, flat.
        """
        total: Weights = {}
        with self._explained():
            for batch in self.batches:
                losses = self.objective.losses(batch)
                self._add(total, self._pull(losses, torch.ones_like))
        return self._checked(self.parameters.gathered(total).div_(self.items))

    def natural_gradient(
        self, *, damping: float, tolerance: float = 1e-3, max_steps: int = 50
    ) -> Solution[Tensor]:
        """The step (A + damping)⁻¹ ∇L, for `move` to subtract from the weights.

        Args:
            damping: added to the diagonal.
            tolerance: of the residual, relative to the gradient.
            max_steps: products at most.

        Returns:
            A `Solution` whose value is ``(P,)``, flat.
        """
        return self.solve(self.gradient(), damping=damping, tolerance=tolerance, max_steps=max_steps)

    @torch.no_grad()
    def move(self, step: Any, *, rate: float = 1.0) -> None:
        """Subtract rate times a step from the model's weights, in place.

        Args:
            step: ``(P,)`` or a dict, as for a product.
            rate: its factor.
        """
        flat, _ = self.parameters.read(step)
        named = dict(self.model.named_parameters())
        for name, part in self.parameters.split(flat).items():
            named[name].sub_(part, alpha=checks.number("Curvature.move", "rate", rate))

    def matvec(self, vector: Form) -> Form:
        """The product with one vector, in the form of the vector.

        Args:
            vector: ``(P,)`` as a tensor or array, or a dict or list of tensors by parameter.
        """
        flat, form = self.parameters.read(vector)
        if flat.ndim != 1:
            raise ArgumentError(
                f"Curvature.matvec: vector is {tuple(flat.shape)}. Use matmat or @ for a matrix."
            )
        found: Form = form(self._products(flat[:, None])[:, 0])
        return found

    def matmat(self, matrix: Form) -> Form:
        """The product with every column; each batch is read once.

        Args:
            matrix: ``(P, K)``, a tensor or array.
        """
        flat, form = self.parameters.read(matrix)
        if flat.ndim != 2:
            raise ArgumentError(
                f"Curvature.matmat: matrix is {tuple(flat.shape)}. Use matvec or @ for a vector."
            )
        found: Form = form(self._products(flat))
        return found

    def __matmul__(self, vector: Any) -> Any:
        flat, form = self.parameters.read(vector)
        found = self._products(flat if flat.ndim == 2 else flat[:, None])
        return form(found if flat.ndim == 2 else found[:, 0])

    @property
    def T(self) -> "Curvature":
        """The matrix itself, which is symmetric."""
        return self

    def adjoint(self) -> "Curvature":
        """The matrix itself, which is symmetric."""
        return self

    def to_scipy(self) -> LinearOperator:
        """The operator for SciPy's solvers, in float64 if the weights are, else in float32."""
        kind = np.float64 if self.dtype == torch.float64 else np.float32

        def product(x: Any) -> Any:
            return self @ np.asarray(x, kind)

        return LinearOperator(
            self.shape, matvec=lambda x: product(x.reshape(-1)), rmatvec=product, matmat=product, dtype=kind
        )

    def dense(self) -> Tensor:
        """The matrix itself, for small models: P products.

        Returns:
            ``(P, P)``.
        """
        if self.shape[0] > 20_000:
            raise ArgumentError(
                f"Curvature: a dense matrix of {self.shape[0]:,} rows takes "
                f"{self.shape[0] ** 2 * 4 / 1e9:,.0f} GB. Restrict the parameters, or use products."
            )
        return self._products(torch.eye(self.shape[0], dtype=self.dtype, device=self.device))

    def _products(self, columns: Tensor) -> Tensor:
        """The matrix times ``(P, K)``."""
        if not bool(columns.isfinite().all()):
            raise ArgumentError("Curvature: the vector has NaN or infinite entries. Pass finite numbers.")
        found: list[Tensor] = [columns[:, 0]] * columns.shape[1]
        left = []
        for k in range(columns.shape[1]):
            kept = self._kept(columns[:, k])
            if kept is not None and kept.exists():
                found[k] = self._load(kept)
            else:
                left.append((k, kept))
        totals: list[Weights] = [{} for _ in left]
        if left:
            with self._explained():
                for place, batch in enumerate(self.batches):
                    for total, (k, _) in zip(totals, left, strict=True):
                        self._add(total, self._one(batch, place, self.parameters.split(columns[:, k])))
        for total, (k, kept) in zip(totals, left, strict=True):
            found[k] = self._checked(self.parameters.gathered(total).div_(self.items))
            if kept is not None:
                wide = found[k].float() if self.dtype.itemsize == 2 else found[k]
                with draft(kept) as path, path.open("wb") as file:
                    np.save(file, wide.cpu().numpy(), allow_pickle=False)
        return found[0][:, None] if len(found) == 1 else torch.stack(found, 1)

    def _one(self, batch: Any, place: int, vector: Weights) -> Weights:
        """The product with a vector for one batch, not yet divided by the number of items."""
        weights = self.parameters.weights()
        if self.kind == "hessian":
            losses = self.objective.losses(batch)
            with forward_ad.dual_level(), torch.enable_grad():
                leaves = {k: forward_ad.make_dual(w.requires_grad_(), vector[k]) for k, w in weights.items()}
                slopes = torch.autograd.grad(losses(leaves).sum(), list(leaves.values()), allow_unused=True)
                along = [None if x is None else forward_ad.unpack_dual(x).tangent for x in slopes]
            return {name: x.detach() for name, x in zip(leaves, along, strict=True) if x is not None}
        if self.kind == "empirical":
            return self._outer(self.objective.sequences(batch), weights, vector)
        if self.kind == "fisher" and self.sample is not None:
            drawn = self._drawn(batch, place, weights)
            return self._outer(self.objective.losses(drawn), weights, vector)
        outputs = self.objective.outputs(batch)
        with torch.no_grad():
            z, along = push(outputs, weights, vector)
            with full_precision(self.device):
                bent = self.objective.bend(batch, z, along, weights)
        del z, along
        return self._pull(outputs, lambda _: bent)

    def _outer(self, losses: Callable[[Weights], Tensor], weights: Weights, vector: Weights) -> Weights:
        """Σ_s ∇ℓ_s ⟨∇ℓ_s, v⟩: the slopes of all ℓ_s along v in one forward pass, then one backward pass."""
        with torch.no_grad():
            slopes = push(losses, weights, vector)[1]
        return self._pull(losses, lambda _: slopes)

    def _drawn(self, batch: Any, place: int, weights: Weights) -> Any:
        generator = torch.Generator(self.device).manual_seed(self.seed + place)
        with torch.no_grad():
            output = self.objective.model(weights, batch, labels=False)
        return self.sample(output, batch, generator)  # type: ignore[misc]

    def _pull(self, function: Callable[[Weights], Any], cotangents: Callable[[Any], Any]) -> Weights:
        """Jᵀ times the cotangents, J the derivative of `function` in the weights."""
        leaves = {name: w.requires_grad_() for name, w in self.parameters.weights().items()}
        with torch.enable_grad():
            found = function(leaves)
        outputs: Outputs = found if isinstance(found, tuple) else (found,)
        given = cotangents(found)
        given = given if isinstance(given, tuple) else (given,)
        pairs = [(z, u) for z, u in zip(outputs, given, strict=True) if z.requires_grad]
        if not pairs:
            return {}
        slopes = torch.autograd.grad(
            [z for z, _ in pairs], list(leaves.values()), [u for _, u in pairs], allow_unused=True
        )
        return {name: x for name, x in zip(leaves, slopes, strict=True) if x is not None}

    def _add(self, total: Weights, part: Weights) -> None:
        for name, x in part.items():
            x = x.detach()
            total[name] = total[name].add_(x) if name in total else x.to(_sums(x.dtype))

    def slopes(self, vector: Any) -> Tensor:
        """⟨∇ℓ_s, v⟩ for every sequence s of the data, ℓ_s the sum of its losses, in one forward pass.

        Args:
            vector: ``(P,)`` or a dict, as for a product.

        Returns:
            ``(S,)``, in the order of the data.
        """
        flat, _ = self.parameters.read(vector)
        along, weights, found = self.parameters.split(flat), self.parameters.weights(), []
        with self._explained(), torch.no_grad():
            for batch in self.batches:
                found.append(push(self.objective.sequences(batch), weights, along)[1])
        return self._checked(torch.cat(found))

    def _kept(self, vector: Tensor) -> Path | None:
        """The file that keeps the product with this vector; None without a checkpoint."""
        if self.checkpoint is None:
            return None
        now = [(name, p.data_ptr(), version(p)) for name, p in self.model.named_parameters()]
        if self._weights_mark is None or self._weights_mark[0] != now:
            everything = list(self.model.state_dict().values()), self._examples()
            self._weights_mark = (now, fingerprint(everything))
        rounded = torch.get_autocast_dtype(self.device.type) if autocasts(self.device) else None
        marks = self.batches.marks, self._weights_mark[1]
        key = repr((self.kind, self.seed, marks, self.parameters.names, rounded))
        mark = hashlib.blake2b(key.encode(), digest_size=16)
        mark.update(vector.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return self.checkpoint / f"{mark.hexdigest()}.npy"

    def _examples(self) -> Any:
        """The losses of the first batch, and labels drawn for it: two functions may have the same name."""
        if isinstance(self.loss, str):
            return None
        weights, batch = self.parameters.weights(), next(iter(self.batches.data))
        with torch.no_grad(), self._attention():
            drawn = self._drawn(batch, 0, weights) if self.sample is not None else None
            return self.objective.losses(batch)(weights), drawn

    def _load(self, path: Path) -> Tensor:
        try:
            found = torch.from_numpy(np.load(path, allow_pickle=False))
        except (ValueError, OSError, EOFError) as problem:
            raise ArgumentError(
                f"Curvature: {path} is no product that was kept ({problem}). Delete it."
            ) from None
        return found.to(self.device, self.dtype)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Context in which attention is the core's, and padding rows of embeddings are constants.

        torch's gradient leaves those rows out, its forward derivative does not: the matrix of the two would
        not be symmetric.
        """

        def constant(place: int, row: Tensor) -> Callable[..., Tensor]:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                return torch.where(inputs[0].eq(place)[..., None], row, output)

            return hook

        hooks = []
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                with torch.no_grad():
                    row: Tensor = module(torch.tensor([module.padding_idx], device=module.weight.device))
                hooks.append(module.register_forward_hook(constant(module.padding_idx, row[0])))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "differentiable: .* none of its attention", ExptiltWarning)
                with differentiable(self.model):
                    yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context in which attention is the core's, and an error of a derivative names its module."""
        entered: list[tuple[str, str]] = []
        names = {module: name for name, module in self.model.named_modules()}
        hooks = [
            module.register_forward_pre_hook(
                lambda module, _: entered.append((names[module] or "the model", type(module).__name__))
            )
            for module in names
        ] + [module.register_forward_hook(lambda *_: _left(entered)) for module in names]
        try:
            with self._attention(), freed_memory_returned():
                yield
        except (NotImplementedError, RuntimeError) as problem:
            text = str(problem)
            words = (
                "forward AD",
                "jvp",
                "setup_context",
                "once_differentiable",
                "derivative for",
                "functorch",
            )
            if isinstance(problem, ArgumentError) or not any(word in text for word in words):
                raise
            name, kind = entered[-1] if entered else ("the backward pass", type(self.model).__name__)
            raise ArgumentError(
                f"Curvature: {name} ({kind}) has no derivative that kind={self.kind!r} needs: "
                f"{text.splitlines()[0]} Write it with torch's own functions, or give its autograd.Function "
                "setup_context and jvp."
            ) from problem
        finally:
            for hook in hooks:
                hook.remove()

    def _checked(self, vector: Tensor) -> Tensor:
        """The vector, or an error that names the module or parameter where it is not finite."""
        if bool(vector.isfinite().all()):
            return vector
        with torch.no_grad(), self._attention():
            losses = (self.objective.losses(batch)(self.parameters.weights()) for batch in self.batches)
            module = first_not_finite(self.model, losses)
        where = f"module {module} returns NaN or infinity" if module else "no module returns any"
        if len(vector) == self.shape[0]:
            parts = self.parameters.split(vector).items()
            where = f"{next(name for name, x in parts if not bool(x.isfinite().all()))}; {where}"
        raise ArgumentError(
            f"Curvature: the product has NaN or infinite entries, first in {where}. Check weights and "
            "data, or use a wider dtype."
        )


def _left(entered: list[tuple[str, str]]) -> None:
    entered.pop()


def _sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over batches are taken in."""
    return torch.float32 if dtype.itemsize < 4 else dtype
