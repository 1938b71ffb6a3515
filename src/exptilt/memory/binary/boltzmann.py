r"""`RestrictedBoltzmann`: visible and hidden units, joined only to each other.

    binary hidden     E(v,h) = −<b,v> − <c,h> − v'Wh,  h ∈ {0,1}^H        F(v) = −<b,v> − Σ_j log(1 + e^{c_j + (v'W)_j})
    Gaussian hidden   E(v,h) = −<b,v> − <c,h> − v'Wh + ½<h,h>             F(v) = −<b,v> − ½‖c + W'v‖² − (H/2) log 2π

F is the free energy, p(v) = e^{−F(v)}/Z. Given one side, units of the other are independent: a hidden unit is a coin or a unit Gaussian
about c + W'v, a visible one a coin. Visible units are {0,1}, or ±1 (`visible="spin"`), in which case Gaussian hidden units make a
classical Hopfield network (``equivalence.py``).

Real data have Gaussian visible units (`visible="gaussian"`, the usual "Gaussian–binary" machine): ½‖v − b‖² stands for −<b,v> above, and
given h, v is Gaussian about b + Wh with variance 1 (scale the data to that). Hidden units are then binary: Gaussian ones on both sides
make a plain Gaussian law, and no law at all if ‖W‖ ≥ 1. Z is exact, by enumeration, where one side of coins is small.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.transforms import is_concrete
from exptilt.memory.checks import check_count

_MOST_UNITS = 24  # enumerated: 2^24 states, block after block
_BLOCK = 1 << 14


@dataclass(frozen=True, eq=False)
class RestrictedBoltzmann:
    """A restricted Boltzmann machine; frozen, learning returns a new one.

    Args:
        weight: ``(V, H)``.
        visible_bias: ``(V,)``.
        hidden_bias: ``(H,)``.
        hidden: ``binary`` ({0,1}) or ``gaussian``.
        visible: ``binary`` ({0,1}), ``spin`` (±1), or with binary hidden units ``gaussian`` (real, of variance 1).

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
        w, b, c = self.weight, self.visible_bias, self.hidden_bias
        if self.hidden not in ("binary", "gaussian") or self.visible not in ("binary", "spin", "gaussian"):
            got = f"hidden {self.hidden!r}, visible {self.visible!r}"
            raise ArgumentError(
                f"RestrictedBoltzmann: {got}. Pass hidden 'binary' or 'gaussian', visible 'binary', 'spin' or 'gaussian'."
            )
        if self.hidden == self.visible == "gaussian":
            raise ArgumentError(
                "RestrictedBoltzmann: Gaussian units on both sides make a plain Gaussian law. Pass hidden='binary'."
            )
        if not all(
            isinstance(x, Tensor) and x.is_floating_point() and x.dtype == w.dtype and x.device == w.device
            for x in (w, b, c)
        ):
            got = ", ".join(
                f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__ for x in (w, b, c)
            )
            raise ArgumentError(
                f"RestrictedBoltzmann: weight, visible_bias, hidden_bias are {got}. Pass floating tensors of one dtype."
            )
        if w.ndim != 2 or tuple(b.shape) != w.shape[:1] or tuple(c.shape) != w.shape[1:] or not w.numel():
            got = f"weight {tuple(w.shape)}, visible_bias {tuple(b.shape)}, hidden_bias {tuple(c.shape)}"
            raise ArgumentError(f"RestrictedBoltzmann: got {got}. Pass (V, H), (V,) and (H,), not empty.")
        if is_concrete(w, b, c) and not bool(w.isfinite().all() & b.isfinite().all() & c.isfinite().all()):
            raise ArgumentError("RestrictedBoltzmann: a parameter holds NaN or infinity.")

    @classmethod
    def random(
        cls, visible_units: int, hidden_units: int, *, hidden: str = "binary", visible: str = "binary", size: float = 0.01,
        generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64,
    ) -> "RestrictedBoltzmann":  # fmt: skip
        """A machine to begin learning with: small random weights, biases 0.

        Args:
            visible_units: V.
            hidden_units: H.
            hidden: as in the constructor.
            visible: as in the constructor.
            size: standard deviation of the weights.
            generator: draws them.
            dtype: of the parameters.
        """
        check_count("RestrictedBoltzmann.random", "visible_units", visible_units)
        check_count("RestrictedBoltzmann.random", "hidden_units", hidden_units)
        w = size * torch.randn(visible_units, hidden_units, dtype=dtype, generator=generator)
        return cls(w, w.new_zeros(visible_units), w.new_zeros(hidden_units), hidden, visible)

    @property
    def levels(self) -> tuple[float, float]:
        """The two values of a visible unit that is a coin."""
        if self.visible == "gaussian":
            raise ArgumentError(
                "RestrictedBoltzmann: Gaussian visible units take all real values, not two. See `visible_mean`."
            )
        return (0.0, 1.0) if self.visible == "binary" else (-1.0, 1.0)

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        """E of pairs.

        Args:
            visible: ``(..., V)``.
            hidden: ``(..., H)``.

        Returns:
            ``(...)``.
        """
        self._check_size("visible", visible, 0)
        self._check_size("hidden", hidden, 1)
        linear = (
            self._own_energy(visible) - hidden @ self.hidden_bias - ((visible @ self.weight) * hidden).sum(-1)
        )
        return linear + hidden.square().sum(-1) / 2 if self.hidden == "gaussian" else linear

    def _own_energy(self, visible: Tensor) -> Tensor:
        """What visible units cost by themselves: −<b,v>, or ½‖v − b‖²."""
        if self.visible == "gaussian":
            return (visible - self.visible_bias).square().sum(-1) / 2
        return -(visible @ self.visible_bias)

    def free_energy(self, visible: Tensor) -> Tensor:
        """F(v) = −log ∫ e^{−E(v,h)} dh (a sum for binary units).

        Args:
            visible: ``(..., V)``.

        Returns:
            ``(...)``.
        """
        self._check(visible)
        field = self.hidden_bias + visible @ self.weight
        if self.hidden == "gaussian":
            integral = field.square().sum(-1) / 2 + field.shape[-1] / 2 * torch.log(
                torch.as_tensor(2 * torch.pi, dtype=field.dtype)
            )
        else:
            integral = F.softplus(field).sum(-1)
        return self._own_energy(visible) - integral

    def hidden_mean(self, visible: Tensor) -> Tensor:
        """E[h | v].

        Args:
            visible: ``(..., V)``.

        Returns:
            ``(..., H)``.
        """
        self._check_size("visible", visible, 0)
        field = self.hidden_bias + visible @ self.weight
        return field if self.hidden == "gaussian" else torch.sigmoid(field)

    def visible_probability(self, hidden: Tensor) -> Tensor:
        """The probability that a visible unit has its upper value.

        Args:
            hidden: ``(..., H)``.

        Returns:
            ``(..., V)``.
        """
        low, high = self.levels
        self._check_size("hidden", hidden, 1)
        return torch.sigmoid((high - low) * (self.visible_bias + hidden @ self.weight.mT))

    def visible_mean(self, hidden: Tensor) -> Tensor:
        """E[v | h].

        Args:
            hidden: ``(..., H)``.

        Returns:
            ``(..., V)``.
        """
        if self.visible == "gaussian":
            self._check_size("hidden", hidden, 1)
            return self.visible_bias + hidden @ self.weight.mT
        low, high = self.levels
        return low + (high - low) * self.visible_probability(hidden)

    def sample_hidden(self, visible: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A draw of h given v.

        Args:
            visible: ``(..., V)``.
            generator: draws it.

        Returns:
            ``(..., H)``.
        """
        mean = self.hidden_mean(visible)
        if self.hidden == "gaussian":
            return mean + torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return (torch.rand(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator) < mean).to(
            mean.dtype
        )

    def sample_visible(self, hidden: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A draw of v given h.

        Args:
            hidden: ``(..., H)``.
            generator: draws it.

        Returns:
            ``(..., V)``.
        """
        if self.visible == "gaussian":
            mean = self.visible_mean(hidden)
            return mean + torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        p = self.visible_probability(hidden)
        low, high = self.levels
        return torch.where(
            torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=generator) < p, high, low
        ).to(p.dtype)

    def gibbs(self, visible: Tensor, steps: int, generator: torch.Generator | None = None) -> Tensor:
        """Block Gibbs sampling: h given v, v given h, so many times.

        Args:
            visible: ``(..., V)``, where the chains begin.
            steps: how many.
            generator: draws.

        Returns:
            ``(..., V)``.
        """
        self._check(visible)
        for _ in range(steps):
            visible = self.sample_visible(self.sample_hidden(visible, generator), generator)
        return visible

    def log_partition(self) -> Tensor:
        """Log Z, exactly: over all states of the smaller side (of the side of coins, where the other is Gaussian).

        Returns:
            ``()``.
        """
        V, H = self.weight.shape
        by_hidden = self.hidden == "binary" and (H < V or self.visible == "gaussian")
        units = H if by_hidden else V
        if units > _MOST_UNITS:
            raise ArgumentError(
                f"log_partition: it is exact by enumeration, and here that takes 2^{units} states; at most 2^{_MOST_UNITS}. "
                "For larger machines compare free energies, whose differences need no Z."
            )
        low, high = (0.0, 1.0) if by_hidden else self.levels
        total = torch.full((), -torch.inf, dtype=self.weight.dtype, device=self.weight.device)
        for start in track(range(0, 1 << units, _BLOCK), "log Z"):
            number = torch.arange(start, min(1 << units, start + _BLOCK), device=self.weight.device)
            bits = (number[:, None] >> torch.arange(units, device=number.device)) & 1
            state = torch.where(bits.bool(), high, low).to(self.weight.dtype)
            if self.visible == "gaussian":  # ∫ e^{−½‖v − b‖² + <Wh, v>} dv = (2π)^{V/2} e^{<b, Wh> + ½‖Wh‖²}
                pull = state @ self.weight.mT
                value = (
                    state @ self.hidden_bias
                    + pull @ self.visible_bias
                    + pull.square().sum(-1) / 2
                    + V / 2 * math.log(2 * math.pi)
                )
            elif by_hidden:  # Σ_v e^{<b + Wh, v>} unit by unit
                field = self.visible_bias + state @ self.weight.mT
                value = state @ self.hidden_bias + torch.logaddexp(
                    field * self.levels[0], field * self.levels[1]
                ).sum(-1)
            else:
                value = -self.free_energy(state)
            total = torch.logaddexp(total, torch.logsumexp(value, 0))
        return total

    def log_likelihood(self, visible: Tensor) -> Tensor:
        """Log p(v), exactly.

        Args:
            visible: ``(..., V)``.

        Returns:
            ``(...)``.
        """
        return -self.free_energy(visible) - self.log_partition()

    def _check_size(self, name: str, units: Tensor, side: int) -> None:
        known = isinstance(units, Tensor)
        if (
            not known
            or units.shape[-1:] != self.weight.shape[side : side + 1]
            or units.dtype != self.weight.dtype
        ):
            got = f"{tuple(units.shape)} {units.dtype}" if known else f"a {type(units).__name__}"
            wanted = f"(..., {self.weight.shape[side]}) {self.weight.dtype}"
            raise ArgumentError(f"RestrictedBoltzmann: {name} is {got}. Pass {wanted}.")

    def _check(self, visible: Tensor) -> None:
        self._check_size("visible", visible, 0)
        if self.visible == "gaussian":
            if is_concrete(visible) and not bool(visible.isfinite().all()):
                raise ArgumentError(
                    "RestrictedBoltzmann: visible holds NaN or infinity. Pass finite numbers."
                )
            return
        low, high = self.levels
        if is_concrete(visible) and not bool(((visible == low) | (visible == high)).all()):
            raise ArgumentError(
                f"RestrictedBoltzmann: visible units are '{self.visible}'. Pass values {low:g} and {high:g} only."
            )
