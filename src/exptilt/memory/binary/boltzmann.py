r"""`RestrictedBoltzmann`: visible and hidden units, joined only to each other.

    binary hidden     E(v,h) = −⟨b,v⟩ − ⟨c,h⟩ − v'Wh            F(v) = −⟨b,v⟩ − Σ_j log(1 + e^{c_j + (v'W)_j})
    Gaussian hidden   E(v,h) = −⟨b,v⟩ − ⟨c,h⟩ − v'Wh + ½⟨h,h⟩    F(v) = −⟨b,v⟩ − ½‖c + W'v‖² − (H/2) log 2π

F is the free energy, p(v) = e^{−F(v)}/Z. Given one side, units of the other are independent: a hidden unit is
a coin (0 or 1) or a unit Gaussian about c + W'v, a visible one a coin. Visible units are {0,1}, or ±1
(`visible="spin"`), in which case Gaussian hidden units make a classical Hopfield network
(`hopfield_to_boltzmann`).

Z is exact, by enumeration, where one side of coins is small.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exptilt._support.checks import choice, number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.transforms import is_concrete
from exptilt.memory.binary.classical import spins

_MOST_UNITS = 24  # most units that are enumerated: 2^24 states, block by block
_BLOCK = 1 << 14
_LEVELS = {"binary": (0.0, 1.0), "spin": (-1.0, 1.0)}


def _mean(kind: str, field: Tensor) -> Tensor:
    """E[u] ``(..., units)`` of coins with weights e^{field u}, or of Gaussians about the field."""
    if kind == "gaussian":
        return field
    low, high = _LEVELS[kind]
    return low + (high - low) * torch.sigmoid((high - low) * field)


def _draw(kind: str, field: Tensor, generator: torch.Generator | None) -> Tensor:
    """A draw ``(..., units)`` of coins with weights e^{field u}, or of Gaussians about the field."""
    if kind == "gaussian":
        return field + torch.empty_like(field).normal_(generator=generator)
    low, high = _LEVELS[kind]
    up = torch.empty_like(field).uniform_(generator=generator) < torch.sigmoid((high - low) * field)
    return torch.where(up, high, low).to(field.dtype)


def _log_integral(kind: str, field: Tensor) -> Tensor:
    """log Σ_u e^{⟨field,u⟩} over all states of coins, or log ∫ e^{⟨field,u⟩ − ½⟨u,u⟩} du: ``(...)``."""
    if kind == "gaussian":
        return field.square().sum(-1) / 2 + field.shape[-1] / 2 * math.log(2 * math.pi)
    if kind == "binary":
        return F.softplus(field, threshold=40.0).sum(-1)
    # log 2 cosh f; second derivatives of torch.logaddexp(−f, f) are NaN for large f
    return (F.softplus(2 * field, threshold=40.0) - field).sum(-1)


@dataclass(frozen=True, eq=False)
class RestrictedBoltzmann:
    """A restricted Boltzmann machine; frozen, learning returns a new one.

    Args:
        weight: ``(V, H)``.
        visible_bias: ``(V,)``.
        hidden_bias: ``(H,)``.
        hidden: ``binary`` ({0,1}) or ``gaussian``.
        visible: ``binary`` ({0,1}) or ``spin`` (±1).

    Example:
        >>> machine = RestrictedBoltzmann(torch.zeros(3, 2), torch.zeros(3), torch.zeros(2))
        >>> machine.log_likelihood(torch.tensor([1.0, 0.0, 1.0])).exp()  # one of 8
        tensor(0.1250)
    """

    weight: Tensor
    visible_bias: Tensor
    hidden_bias: Tensor
    hidden: str = "binary"
    visible: str = "binary"

    def __post_init__(self) -> None:
        who, given = "RestrictedBoltzmann", (self.weight, self.visible_bias, self.hidden_bias)
        choice(who, "hidden", self.hidden, ("binary", "gaussian"))
        choice(who, "visible", self.visible, ("binary", "spin"))
        kinds = [f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__ for x in given]
        if len(set(kinds)) > 1 or not isinstance(given[0], Tensor) or not given[0].is_floating_point():
            got, wanted = ", ".join(kinds), "Pass floating tensors of one dtype."
            raise ArgumentError(f"{who}: weight, visible_bias, hidden_bias are {got}. {wanted}")
        w, b, c = (tuple(x.shape) for x in given)
        if len(w) != 2 or (*b, *c) != w or len(b) != 1 or not self.weight.numel():
            got = f"weight {w}, visible_bias {b}, hidden_bias {c}"
            raise ArgumentError(f"{who}: got {got}. Pass (V, H), (V,) and (H,), not empty.")
        if is_concrete(*given) and not all(bool(x.isfinite().all()) for x in given):
            raise ArgumentError(f"{who}: a parameter holds NaN or infinity. Pass finite numbers.")

    @classmethod
    def random(
        cls,
        visible_units: int,
        hidden_units: int,
        *,
        hidden: str = "binary",
        visible: str = "binary",
        size: float = 0.01,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> "RestrictedBoltzmann":
        """A machine with small random weights and biases 0, to start learning from.

        Args:
            visible_units: V.
            hidden_units: H.
            hidden: as in the constructor.
            visible: as in the constructor.
            size: standard deviation of the weights.
            generator: draws them.
            dtype: of the parameters.
        """
        whole("RestrictedBoltzmann.random", "visible_units", visible_units)
        whole("RestrictedBoltzmann.random", "hidden_units", hidden_units)
        w = size * torch.randn(visible_units, hidden_units, dtype=dtype, generator=generator)
        return cls(w, w.new_zeros(visible_units), w.new_zeros(hidden_units), hidden, visible)

    @property
    def levels(self) -> tuple[float, float]:
        """The two values of a visible unit."""
        return _LEVELS[self.visible]

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        """The energy E(v,h) of pairs.

        Args:
            visible: ``(..., V)``.
            hidden: ``(..., H)``.

        Returns:
            ``(...)``.
        """
        field = self._hidden_field(visible)
        self._check_size("hidden", hidden, 1)
        linear = -(visible @ self.visible_bias) - (field * hidden).sum(-1)
        return linear + hidden.square().sum(-1) / 2 if self.hidden == "gaussian" else linear

    def free_energy(self, visible: Tensor) -> Tensor:
        """The free energy F(v) = −log ∫ e^{−E(v,h)} dh (a sum for binary units).

        Args:
            visible: ``(..., V)``.

        Returns:
            ``(...)``.
        """
        self.check(visible)
        return -(visible @ self.visible_bias) - _log_integral(self.hidden, self._hidden_field(visible))

    def _hidden_field(self, visible: Tensor) -> Tensor:
        """c + W'v ``(..., H)``."""
        self._check_size("visible", visible, 0)
        return self.hidden_bias + visible @ self.weight

    def _visible_field(self, hidden: Tensor) -> Tensor:
        """b + Wh ``(..., V)``."""
        self._check_size("hidden", hidden, 1)
        return self.visible_bias + hidden @ self.weight.mT

    def hidden_mean(self, visible: Tensor) -> Tensor:
        """The mean E[h | v] of the hidden units.

        Args:
            visible: ``(..., V)``.

        Returns:
            ``(..., H)``.
        """
        return _mean(self.hidden, self._hidden_field(visible))

    def visible_mean(self, hidden: Tensor) -> Tensor:
        """The mean E[v | h] of the visible units.

        Args:
            hidden: ``(..., H)``.

        Returns:
            ``(..., V)``.
        """
        return _mean(self.visible, self._visible_field(hidden))

    def gibbs(self, visible: Tensor, steps: int, generator: torch.Generator | None = None) -> Tensor:
        """The visible units after `steps` of block Gibbs sampling: h given v, then v given h.

        Args:
            visible: ``(..., V)``, where the chains begin.
            steps: number of steps.
            generator: draws the units.

        Returns:
            ``(..., V)``.
        """
        self.check(visible)
        for _ in range(steps):
            hidden = _draw(self.hidden, self._hidden_field(visible), generator)
            visible = _draw(self.visible, self._visible_field(hidden), generator)
        return visible

    def log_partition(self) -> Tensor:
        """log Z, exactly: a sum over the states of the smaller side, or of the visible one if h is Gaussian.

        Returns:
            ``()``.
        """
        w, b, c = self.weight, self.visible_bias, self.hidden_bias
        V, H = w.shape
        by_hidden = self.hidden == "binary" and H < V
        units = H if by_hidden else V
        if units > _MOST_UNITS:
            raise ArgumentError(
                f"log_partition: it is exact by enumeration, and here that takes 2^{units} states; at most "
                f"2^{_MOST_UNITS}. For larger machines compare free energies, whose differences need no Z."
            )
        low, high = (0.0, 1.0) if by_hidden else self.levels
        total = w.new_full((), -torch.inf)
        for start in track(range(0, 1 << units, _BLOCK), "log Z"):
            code = torch.arange(start, min(1 << units, start + _BLOCK), device=w.device)
            bits = (code[:, None] >> torch.arange(units, device=w.device)) & 1
            state = torch.where(bits.bool(), high, low).to(w.dtype)
            if by_hidden:
                value = state @ c + _log_integral(self.visible, b + state @ w.mT)
            else:
                value = -self.free_energy(state)
            total = torch.logaddexp(total, torch.logsumexp(value, 0))
        return total

    def log_likelihood(self, visible: Tensor) -> Tensor:
        """log p(v), exactly.

        Args:
            visible: ``(..., V)``.

        Returns:
            ``(...)``.
        """
        return -self.free_energy(visible) - self.log_partition()

    def _check_size(self, name: str, units: Tensor, side: int) -> None:
        w, known = self.weight, isinstance(units, Tensor)
        if not known or units.shape[-1:] != w.shape[side : side + 1] or units.dtype != w.dtype:
            got = f"{tuple(units.shape)} {units.dtype}" if known else f"a {type(units).__name__}"
            raise ArgumentError(
                f"RestrictedBoltzmann: {name} is {got}. Pass (..., {w.shape[side]}) {w.dtype}."
            )

    def check(self, visible: Tensor) -> None:
        """Raise unless `visible` holds values that visible units take.

        Args:
            visible: ``(..., V)``.
        """
        self._check_size("visible", visible, 0)
        if not is_concrete(visible):
            return
        low, high = self.levels
        if not bool(((visible == low) | (visible == high)).all()):
            raise ArgumentError(
                f"RestrictedBoltzmann: a visible unit has a value that '{self.visible}' units do not take. "
                f"Pass {low:g} and {high:g} only."
            )


def hopfield_to_boltzmann(patterns: Tensor, *, beta: float = 1.0) -> RestrictedBoltzmann:
    """The machine of ±1 and Gaussian units whose free energy is β times Hebb's energy, up to a constant.

    Args:
        patterns: ``(P, N)`` of ±1.
        beta: inverse temperature.
    """
    number("hopfield_to_boltzmann", "beta", beta, above=0)
    x = spins("hopfield_to_boltzmann", "patterns", patterns)
    P, N = x.shape
    return RestrictedBoltzmann((beta / N) ** 0.5 * x.mT, x.new_zeros(N), x.new_zeros(P), "gaussian", "spin")
