r"""A joint exponential family of several sites, discrete and continuous (THEORY E8, E9).

    p(x) = Π_s h_s(x_s) · e^{β U(x)} / Z(β),     U(x) = Σ_s ⟨b_s, t_s(x_s)⟩ + Σ_{s<r} t_s(x_s)' J_sr t_r(x_r)

Each site s has a measure h_s, any of `exptilt.families`, and the statistic t_s that tilting acts on. Given
the others, the law of a site is h_s, tilted:

    x_s | rest ~ h_s tilted by η_s = β (b_s + Σ_r J_sr t_r(x_r))

so conditionals are exact whatever the measures are. A Categorical coupled to a Gaussian is a mixture, a
BernoulliProduct coupled to a Gaussian or to another is a Boltzmann machine, an `Empirical` coupled to
anything is attention: its conditional weighs the points by softmax(⟨x_n, η⟩). β = 0 is the product of the
h_s, β = 1 the joint law: SMC goes from one to the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from exptilt._support.checks import finite
from exptilt._support.errors import ArgumentError
from exptilt.families import Measure

State = dict[str, Tensor]
"""The x ``(*shape, *event)`` of each site, by name."""


@dataclass(frozen=True)
class Joint:
    """A joint law of sites that tilt each other.

    Args:
        sites: a measure for each name, without batch axes.
        coupling: for pairs of names, J ``(D of the first, D of the second)``; a pair that is not named is
            not coupled.
        bias: for names, b ``(D,)``; 0 where a name is missing.

    Example:
        >>> from exptilt.families import Categorical, Gaussian
        >>> means = torch.tensor([[-3.0], [3.0]])
        >>> mixture = Joint(
        ...     {"class": Categorical(torch.zeros(2)), "x": Gaussian(torch.zeros(1), torch.eye(1))},
        ...     {("class", "x"): means},
        ... )
        >>> mixture.conditional("x", {"class": torch.tensor([0.0, 1.0])}).mean()
        tensor([3.])
    """

    sites: Mapping[str, Measure]
    coupling: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    bias: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sites or not all(isinstance(h, Measure) for h in self.sites.values()):
            raise ArgumentError(
                "Joint: sites must be measures by name, such as {'x': xt.Gaussian(mean, covariance)}."
            )
        for name, h in self.sites.items():
            if len(h.event_shapes) != 1:
                raise ArgumentError(
                    f"Joint: sites[{name!r}] is a {type(h).__name__}, whose events are not one tensor."
                )
            if h.batch_shape:
                raise ArgumentError(
                    f"Joint: sites[{name!r}] has batch axes {tuple(h.batch_shape)}. Pass one measure."
                )
        tensors = {f"coupling[{pair!r}]": J for pair, J in self.coupling.items()}
        tensors |= {f"bias[{name!r}]": b for name, b in self.bias.items()}
        dtypes = {f"site {name!r}": h.dtype for name, h in self.sites.items()}
        dtypes |= {what: x.dtype for what, x in tensors.items() if isinstance(x, Tensor)}
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{what} {dtype}" for what, dtype in dtypes.items())
            raise ArgumentError(f"Joint: sites, couplings and biases must have one dtype; got {found}.")
        for pair in self.coupling:
            twice = isinstance(pair, tuple) and pair[::-1] in self.coupling
            if not isinstance(pair, tuple) or len(pair) != 2 or pair[0] == pair[1] or twice:
                raise ArgumentError(
                    f"Joint: coupling has the key {pair!r}. Pass each pair of different sites once."
                )
        axes: dict[str, tuple[str, ...]] = {f"coupling[{pair!r}]": pair for pair in self.coupling}
        axes |= {f"bias[{name!r}]": (name,) for name in self.bias}
        for what, names in axes.items():
            for name in names:
                if name not in self.sites:
                    raise ArgumentError(f"Joint: {what} names {name!r}, which is none of {list(self.sites)}.")
            value, wanted = tensors[what], tuple(self.sites[name].dimension for name in names)
            if not isinstance(value, Tensor) or tuple(value.shape) != wanted:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(f"Joint: {what} must be a tensor {wanted}; got {got}.")
            finite("Joint", **{what: value})

    def _statistics(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The statistic t(x) ``(*shape, D)`` of every site."""
        missing = [name for name in self.sites if name not in state]
        if missing:
            raise ArgumentError(
                f"Joint: the state has no {missing[0]!r}. Pass x for each of {list(self.sites)}."
            )
        return {name: h.coordinate(state[name]) for name, h in self.sites.items()}

    def tilt_of(self, site: str, state: Mapping[str, Tensor]) -> Tensor:
        """The tilt b_s + Σ_r J_sr t_r(x_r) of one site given the others, at β = 1.

        Args:
            site: its name.
            state: x of all sites coupled to this one, ``(*shape, *event)`` each.

        Returns:
            ``(*shape, D)``.
        """
        if site not in self.sites:
            raise ArgumentError(f"Joint: there is no site {site!r} among {list(self.sites)}.")
        others = {name for pair in self.coupling if site in pair for name in pair if name != site}
        for other in others:
            if other not in state:
                raise ArgumentError(
                    f"Joint: {site!r} is coupled to {other!r}, which the state does not have."
                )
        return self._tilt(site, {other: self.sites[other].coordinate(state[other]) for other in others})

    def _tilt(self, site: str, t: Mapping[str, Tensor]) -> Tensor:
        total = self.bias.get(site)
        for (first, second), J in self.coupling.items():
            if site in (first, second):
                part = t[second] @ J.mT if site == first else t[first] @ J
                total = part if total is None else total + part
        h = self.sites[site]
        return torch.zeros(h.dimension, dtype=h.dtype, device=h.device) if total is None else total

    def conditional(self, site: str, state: Mapping[str, Tensor], *, strength: float = 1.0) -> Measure:
        """The law of one site given the others, as a measure.

        Args:
            site: its name.
            state: x of the other sites, ``(*shape, *event)`` each.
            strength: β.
        """
        eta = self.tilt_of(site, state)
        return self.sites[site].tilt(strength * eta)

    def log_tilt(self, state: Mapping[str, Tensor]) -> Tensor:
        """U(x), the exponent that tilts the product of the sites' measures.

        Args:
            state: x of all sites, ``(*shape, *event)`` each.

        Returns:
            ``(*shape)``.
        """
        return self._log_tilt(self._statistics(state))

    def _log_tilt(self, t: Mapping[str, Tensor]) -> Tensor:
        """U ``(*shape)`` as a function of the statistics."""
        parts = [t[name] @ b for name, b in self.bias.items()]
        parts += [((t[first] @ J) * t[second]).sum(-1) for (first, second), J in self.coupling.items()]
        return sum(parts, torch.zeros_like(next(iter(t.values()))[..., 0]))

    def _independent(self, shape: tuple[int, ...], generator: torch.Generator | None) -> State:
        """Draws of each site from its own measure: β = 0."""
        return {name: h.sample(shape, generator=generator) for name, h in self.sites.items()}

    def _advance(
        self,
        state: State,
        t: dict[str, Tensor],
        strength: float = 1.0,
        generator: torch.Generator | None = None,
        keep: tuple[str, ...] = (),
    ) -> None:
        """Draws each site but those in `keep` given the others, at β = `strength`.

        The state ``(*shape, *event)`` and its statistics t ``(*shape, D)`` are replaced in place.
        """
        for name, h in self.sites.items():
            if name in keep:
                continue
            eta = (strength * self._tilt(name, t)).expand(t[name].shape)
            x = h.tilt(eta).sample(generator=generator) if bool(eta.isfinite().all()) else eta
            if not bool(x.isfinite().all()):
                raise ArgumentError(
                    f"Joint: the draws of {name!r} are not finite: the sites push each other to infinity, so "
                    "there is no joint law. Pass weaker couplings."
                )
            state[name], t[name] = x, h._coordinate(x)
