r"""The chain of a fit: transitions driven by covariates and by how long a regime has lasted; stationary laws.

With base probabilities P, covariates z_t and the age d = 1 … D of the present regime (D: D or more)

    P(j next | i now, of age d, z_t)  ∝  P_ij exp(g_ij · z_t + b_i (d − 1) [j ≠ i])

so that P is the transition matrix of a new regime where z = 0, and with a positive b_i regime i is more
likely to end the longer it has lasted (Durland, McCurdy 1994). The age is part of the mode: regime i of age d
is mode i D + d − 1, a semi-Markov chain as a Markov chain of M D modes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..._support.errors import ArgumentError
from ..checks import row_softmax, safe_log
from ..inference.problem import as_double
from ..parameters import RANKS, ModelParameters
from ..series import read

INPUT, AGE = "transition_input", "transition_age"
EDGE = 1 - 1e-6  # the largest modulus of an eigenvalue of dynamics whose stationary law is computed
Named = dict[str, torch.Tensor]


def stationary(transition: torch.Tensor) -> torch.Tensor:
    """The stationary probabilities ``(M,)`` of a chain."""
    one = torch.ones(len(transition), dtype=transition.dtype)
    try:
        eye = torch.eye(len(one), dtype=one.dtype)
        found: torch.Tensor = torch.linalg.solve(eye - transition.mT + 1.0, one)
    except RuntimeError:
        raise ArgumentError(
            "fit: the chain has no single stationary law. Let every regime reach the others."
        ) from None
    return found


def stationary_states(named: Mapping[str, torch.Tensor], diffuse: np.ndarray, strict: bool) -> Named:
    """The stationary law of the state under each mode's dynamics; diffuse states are left as they are.

    Dynamics without one raise an error if `strict`. Else they are scaled down to largest eigenvalue `EDGE`,
    so that the objective of a climb has no jump there.
    """
    W, Q, c = named["dynamics"], named["process_noise"], named.get("dynamics_offset")
    if W.ndim == 4 or Q.ndim == 4 or (c is not None and c.ndim == 3):
        raise ArgumentError('fit: initial="stationary" needs dynamics that do not vary in time.')
    keep = np.flatnonzero(~diffuse)
    mean, cov = named["initial_mean"], named["initial_covariance"]
    if len(keep) == 0:
        return {}
    if W[:, keep][:, :, np.flatnonzero(diffuse)].any():
        raise ArgumentError(
            'fit: initial="stationary", but a diffuse state drives one that is not. Mark that diffuse too.'
        )
    W, Q, n = W[:, keep][:, :, keep], Q[:, keep][:, :, keep], len(keep)
    size = torch.linalg.eigvals(W.detach()).abs().amax(-1)
    if strict and bool((size >= 1).any()):
        raise ArgumentError(
            f"fit: dynamics of mode {int(size.argmax())} have an eigenvalue of modulus "
            f"{float(size.max()):.6g}: there is no stationary law. Start below 1, or mark such states "
            "diffuse (inf in initial_covariance)."
        )
    W = W * torch.where(size > EDGE, EDGE / size, 1.0)[:, None, None]
    eye = torch.eye(n * n, dtype=W.dtype)
    pairs = torch.einsum("kab,kcd->kacbd", W, W).reshape(-1, n * n, n * n)
    P = torch.linalg.solve(eye - pairs, Q.reshape(-1, n * n, 1)).reshape(-1, n, n)
    grid = torch.from_numpy(keep)
    block = torch.zeros_like(cov).index_put(
        (torch.arange(len(cov))[:, None, None], grid[:, None], grid), (P + P.mT) / 2
    )
    out = {"initial_covariance": torch.where(torch.isinf(cov), cov, block)}
    level = torch.zeros_like(mean)
    if c is not None:
        level = level.index_copy(1, grid, torch.linalg.solve(eye[:n, :n] - W, c[:, keep]))
    return out | {"initial_mean": torch.where(torch.from_numpy(diffuse), mean, level)}


def driven(
    P: torch.Tensor,
    weight: torch.Tensor | None,
    inputs: torch.Tensor | None,
    age: torch.Tensor | None,
    durations: int,
) -> torch.Tensor:
    """P(j next | i now, of age d, z_t), ``(T or 1, M, D, M)``."""
    if weight is None and age is None:
        return P[None, :, None, :].expand(1, -1, durations, -1)
    logits = safe_log(P)[None, :, None, :]
    if weight is not None:
        logits = logits + torch.einsum("ijk,tk->tij", weight, inputs)[:, :, None, :]
    if age is not None:
        leave = 1.0 - torch.eye(len(P), dtype=P.dtype)
        since = torch.arange(durations, dtype=P.dtype)
        logits = logits + age[:, None, None] * since[:, None] * leave[:, None, :]
    return row_softmax(logits)


def spread_out(P: torch.Tensor) -> torch.Tensor:
    """The transition matrix ``(T, M D, M D)`` of regimes and their ages, from the result of `driven`."""
    T, M, D, _ = P.shape
    regime, age, to = np.indices((M, D, M))
    after = np.where(to == regime, np.minimum(age + 1, D - 1), 0) + D * to
    index = torch.from_numpy(after.reshape(1, M * D, M)).expand(T, -1, -1)
    return P.new_zeros(T, M * D, M * D).scatter(-1, index, P.reshape(T, M * D, M))


@dataclass(frozen=True)
class Chain:
    """Initial law and transitions of a fit, as functions of its named parameters.

    Attributes:
        initial: "given", "stationary", or "stationary chain", which leaves the law of the state as given.
        inputs: ``(T, k)``, the covariates of the transitions.
        durations: D.
    """

    initial: str = "given"
    inputs: torch.Tensor | None = None
    durations: int = 1

    @property
    def plain(self) -> bool:
        """Whether the named parameters are those of the model, with nothing to compute."""
        return self.initial == "given" and self.inputs is None and self.durations == 1

    def extra(self, transition: np.ndarray) -> dict[str, np.ndarray]:
        """Starting values of the parameters that only the fit has: effects of covariates and of age."""
        M, out = len(transition), dict[str, np.ndarray]()
        if self.inputs is not None:
            out[INPUT] = np.zeros((M, M, self.inputs.shape[1]))
        if self.durations > 1:
            out[AGE] = np.zeros(M)
        return out

    def held(self, transition: np.ndarray) -> dict[str, np.ndarray]:
        """Masks of entries of `extra` that are not learned: staying, and transitions of probability 0."""
        if not self.extra(transition):
            return {}
        never = (transition == 0) | np.eye(len(transition), dtype=bool)
        out = {} if self.inputs is None else {INPUT: np.repeat(never[..., None], self.inputs.shape[1], 2)}
        return out | ({AGE: never.all(1)} if self.durations > 1 else {})

    def assemble(self, base: ModelParameters, named: Named, strict: bool) -> Named:
        """The parameters of the model, from named ones; `strict` as for `stationary_states`."""
        if self.plain:
            return named
        every = {name: as_double(value) for name in RANKS if (value := getattr(base, name)) is not None}
        every |= {name: value for name, value in named.items() if name in RANKS}
        if self.initial == "stationary":
            every |= stationary_states(every, base.diffuse, strict)
        M, D = base.modes, self.durations
        if self.inputs is not None or D > 1:
            P = driven(every["transition"], named.get(INPUT), self.inputs, named.get(AGE), D)
            dense = spread_out(P)
            for name, value in every.items():
                every[name] = value.repeat_interleave(D, value.ndim - RANKS[name])
            every["transition"] = dense[0] if len(dense) == 1 else dense
            new = torch.arange(M * D) % D == 0
            every["initial_probability"] = torch.where(new, every["initial_probability"], 0.0)
        if self.initial != "given":
            P = every["transition"]
            every["initial_probability"] = stationary(P if P.ndim == 2 else P[0]).clamp(min=0.0)
        return every


def read_chain(
    base: ModelParameters, rows: int, initial: str, inputs: ArrayLike | None, durations: int
) -> Chain:
    """Check the options of a fit that concern its chain."""
    if initial not in ("given", "stationary", "stationary chain"):
        raise ArgumentError(f'fit: initial is {initial!r}. Pass "given", "stationary" or "stationary chain".')
    if durations < 1:
        raise ArgumentError(
            f"fit: durations is {durations}. Pass the number of ages to tell apart, 1 or more."
        )
    z = None if inputs is None else read_covariates(inputs, rows, "fit")
    if (z is not None or durations > 1) and (base.transition.ndim == 3 or base.maps is not None):
        raise ArgumentError(
            "fit: transition_inputs and durations need a model without maps whose transition does not vary "
            "in time. Pass transition (M, M)."
        )
    return Chain(initial, z, durations)


def read_covariates(inputs: ArrayLike, rows: int, what: str) -> torch.Tensor:
    """Covariates of transitions as ``(T, k)``, a row for every step at least."""
    shape = np.shape(inputs)
    width = int(shape[-1]) if len(shape) > 1 else 1
    data = read(inputs, width, what=f"{what}: transition_inputs", missing=False)
    if data.series != 1 or len(data.rows) < rows:
        raise ArgumentError(
            f"{what}: transition_inputs have shape {shape}, the data {rows} steps. Pass (T, k), a row for "
            "every step."
        )
    return data.tensor.detach()
