"""The parameters that a curvature is taken in, and their vectors: flat, as a dict, or as a list."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError

Weights = dict[str, Tensor]


class Parameters:
    """Names, shapes and order of the chosen parameters of a model.

    A parameter that stands at several places (a head that shares the embedding's weight) is one parameter,
    under the name that `named_parameters` gives it; `shared` lists its other names. Parameters with
    ``requires_grad=False`` are frozen: constants, whatever is asked for.

    Attributes:
        names: the chosen parameters, in the order of ``model.named_parameters()``.
        shapes: their shapes.
        frozen: names of parameters that do not require gradients.
        shared: other names of the chosen parameters.
    """

    def __init__(self, model: nn.Module, chosen: str | Iterable[str] | None) -> None:
        self.model = model
        first: dict[Tensor, str] = {}
        alias: dict[str, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            alias[name] = first.setdefault(p, name)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        wanted = set(trained) if chosen is None else self._pick(chosen, alias, trained)
        if not wanted:
            raise ArgumentError(
                f"Curvature: no parameter of {type(model).__name__} requires a gradient, so there is nothing "
                "to differentiate. Call model.requires_grad_(True)."
            )
        self.names = [name for name in trained if name in wanted]
        self.shared = {name: kept for name, kept in alias.items() if name != kept and kept in wanted}
        for name in self.names:
            if not trained[name].is_floating_point():
                raise ArgumentError(
                    f"Curvature: parameter {name} is {trained[name].dtype}; only real numbers have a "
                    "curvature here. Leave it out with parameters=."
                )
        self.shapes = [trained[name].shape for name in self.names]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.count = sum(self.sizes)
        self.dtype = trained[self.names[0]].dtype
        for name in self.names:
            self.dtype = torch.promote_types(self.dtype, trained[name].dtype)
        self.device = trained[self.names[0]].device

    def _pick(
        self, chosen: str | Iterable[str], alias: Mapping[str, str], trained: Mapping[str, Any]
    ) -> set[str]:
        patterns = [chosen] if isinstance(chosen, str) else list(chosen)
        if not patterns:
            raise ArgumentError(
                "Curvature: parameters is empty. Pass names or patterns such as 'model.layers.0.*', or None "
                "for all."
            )
        found: set[str] = set()
        for pattern in patterns:
            hit = {
                kept
                for name, kept in alias.items()
                if isinstance(pattern, str) and (fnmatchcase(name, pattern) or name.startswith(pattern + "."))
            }
            if not hit:
                some = ", ".join(list(alias)[:3])
                raise ArgumentError(
                    f"Curvature: parameters has {pattern!r}, and none is called so. Pass names, patterns "
                    f"with * or modules, out of {some}, ..."
                )
            if not hit & set(trained):
                raise ArgumentError(
                    f"Curvature: {pattern!r} picks only frozen parameters, such as {min(hit)}. Call "
                    "requires_grad_(True) on them, or leave them out."
                )
            found |= hit & set(trained)
        return found

    def layers(self) -> dict[str, list[str]]:
        """The chosen names by layer: up to the first number in a name, else without its last word."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
            place = numbered.group() if numbered else name.rpartition(".")[0] or name
            found.setdefault(place, []).append(name)
        return found

    def weights(self) -> Weights:
        """The chosen parameters as they are now, without their graph."""
        named = dict(self.model.named_parameters())
        return {name: named[name].detach() for name in self.names}

    def flat(self, vector: Mapping[str, Tensor]) -> Tensor:
        """One vector ``(P,)`` of a dict; gradients that are missing count as 0."""
        return self.gathered(dict(vector))

    def gathered(self, vector: Weights) -> Tensor:
        """One vector ``(P,)`` of a dict, which is emptied on the way to save memory."""
        found = torch.zeros(self.count, dtype=self.dtype, device=self.device)
        for name, part in zip(self.names, found.split(self.sizes), strict=True):
            if name in vector:
                part.copy_(vector.pop(name).reshape(-1))
        return found

    def split(self, flat: Tensor) -> Weights:
        """The vector ``(P,)`` as a dict, each part with shape and dtype of its parameter."""
        now = self.weights()
        return {
            name: part.view(shape).to(now[name].dtype)
            for name, shape, part in zip(self.names, self.shapes, flat.split(self.sizes), strict=True)
        }

    def read(self, vector: Any) -> tuple[Tensor, Any]:
        """The vector ``(P,)`` or matrix ``(P, K)`` of any form, and a function that restores the form."""
        if isinstance(vector, Mapping):
            self._check_names(vector)
            return self.flat(vector), self.split
        if isinstance(vector, Sequence) and not isinstance(vector, str | bytes):
            if len(vector) != len(self.names):
                raise ArgumentError(
                    f"Curvature: the vector is a list of {len(vector)} tensors. Pass {len(self.names)}, one "
                    "for each parameter, or one flat tensor."
                )
            named = dict(zip(self.names, vector, strict=True))
            self._check_names(named)
            return self.flat(named), lambda flat: list(self.split(flat).values())
        if isinstance(vector, np.ndarray):
            given = torch.from_numpy(np.ascontiguousarray(vector))
            kind = vector.dtype
            return (
                self._checked(given).to(self.device, self.dtype),
                lambda flat: (
                    flat.cpu().float().numpy().astype(kind)
                    if flat.dtype in (torch.bfloat16, torch.float16)
                    else flat.cpu().numpy().astype(kind)
                ),
            )
        if not isinstance(vector, Tensor):
            raise ArgumentError(
                f"Curvature: the vector is a {type(vector).__name__}. Pass a tensor of {self.count:,} "
                "numbers, a matrix with that many rows, or a dict of tensors by parameter name."
            )
        given = self._checked(vector)
        return given.detach().to(self.device, self.dtype), lambda flat: flat.to(vector)

    def _checked(self, vector: Tensor) -> Tensor:
        if vector.ndim not in (1, 2) or vector.shape[0] != self.count or not vector.is_floating_point():
            raise ArgumentError(
                f"Curvature: the vector is {tuple(vector.shape)} {vector.dtype}. Pass ({self.count},) or "
                f"({self.count}, K) real numbers, in the order of named_parameters."
            )
        return vector

    def _check_names(self, vector: Mapping[str, Any]) -> None:
        for name in vector:
            if name not in self.names:
                kept = self.shared.get(name)
                why = f"shares its weight with {kept}; pass that one" if kept else "is not among the chosen"
                why = "is frozen; leave it out" if name in self.frozen else why
                raise ArgumentError(f"Curvature: parameter {name} of the vector {why}.")
        for name, shape in zip(self.names, self.shapes, strict=True):
            got = getattr(vector.get(name), "shape", None)
            if got != shape:
                raise ArgumentError(
                    f"Curvature: the vector's part {name} is {None if got is None else tuple(got)}. Pass a "
                    f"tensor {tuple(shape)}."
                )
