"""The list of all claims, and how they are run.

A claim is a function of a seed and of settings that yields `Findings`, registered by `claim`. Its
docstring is what a reader sees: the statement in our words, then what is run (`Experiment:`), then a few
lines to try (`Example:`). Settings are its keyword arguments, each with a range:
``points: Annotated[int, Between(2, 4096)] = 64``.
"""

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_type_hints

import torch

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.claims.evidence import Check, Evidence, Findings, Line, Picture, Setting, joined

GROUPS = {
    "A": "Attention is an exponential family",
    "B": "Dynamics",
    "C": "Memory",
    "D": "Contrastive learning",
    "E": "Attention as a switching filter",
    "F": "To be observed in real transformers",
    "G": "Further errata of the drafts",
    "H": "Results of others",
}
MODEL = "shakespeare"  # comes with the package; claims about trained models run on it
# Names of the drafts.
POSTER = "poster"
FAMILY = "draft on exponential families"
FILTER = "draft on message passing"
TEMPLATE = "conference draft"
APPENDIX = "appendix on Hopfield networks"


class Between(NamedTuple):
    """The range of a setting."""

    least: float
    most: float


@dataclass(frozen=True)
class Claim:
    """A claim of the papers that can be run.

    Attributes:
        id: such as "A1".
        title: a few words.
        formula: what is claimed, in LaTeX, corrected where the drafts are wrong.
        source: which draft, which equation.
        printed: the formula as a draft prints it, in LaTeX, if it differs from `formula` or says more.
        experiment: the function; it takes a seed and the settings.
        question: True if the drafts ask it or only data can decide; any other claim should hold.
        seeds: over how many seeds it is run.
    """

    id: str
    title: str
    formula: str
    source: str
    printed: str
    experiment: Callable[..., Findings]
    question: bool
    seeds: int

    @property
    def statement(self) -> str:
        """The claim in our words."""
        return self._told[0]

    @property
    def procedure(self) -> str:
        """What is run, in words."""
        return self._told[1]

    @property
    def snippet(self) -> str:
        """A few lines that show it, complete with imports."""
        lines = [line[4:] for line in self._told[2].splitlines() if line.startswith((">>> ", "... "))]
        return "\n".join(["import torch", "import exptilt as xt", "", *lines])

    @property
    def _told(self) -> tuple[str, str, str]:
        text = inspect.cleandoc(self.experiment.__doc__ or "")
        statement, _, rest = text.partition("\n\nExperiment:\n")
        procedure, _, example = rest.partition("\n\nExample:\n")
        return _one_line(statement), _one_line(procedure), inspect.cleandoc(example)

    @property
    def settings(self) -> dict[str, Setting]:
        """Settings with their defaults."""
        given = inspect.signature(self.experiment).parameters.values()
        return {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}

    def with_settings(self, given: Mapping[str, Setting]) -> dict[str, Setting]:
        """All settings, those given in place of the defaults, each checked against its range.

        Args:
            given: values by name; text is read as the kind of number that the default is.
        """
        known, hints = self.settings, get_type_hints(self.experiment, include_extras=True)
        chosen = dict(known)
        for name, value in given.items():
            if name not in known:
                has = ", ".join(f"{key}={default}" for key, default in known.items()) or "none"
                raise ArgumentError(
                    f"claim {self.id} has no setting {name!r}{_nearest(name, known)}. It has: {has}."
                )
            kind, text = type(known[name]), f"claim {self.id}: {name} is {value!r}"
            try:
                chosen[name] = kind(value)
            except ValueError:
                raise ArgumentError(
                    f"{text}. Pass a {'whole number' if kind is int else 'number'}."
                ) from None
            limits = next(
                (m for m in getattr(hints[name], "__metadata__", ()) if isinstance(m, Between)), None
            )
            if limits is not None and not limits.least <= float(chosen[name]) <= limits.most:
                raise ArgumentError(f"{text}. Pass a value from {limits.least:g} to {limits.most:g}.")
        return chosen

    def run(
        self, settings: Mapping[str, Setting] | None = None, *, seed: int = 0, seeds: int | None = None
    ) -> Evidence:
        """Run the experiment with several seeds.

        Args:
            settings: other values than the defaults, by name.
            seed: the first seed; the next ones follow it.
            seeds: how many; default what the claim says.
        """
        chosen, count = self.with_settings(settings or {}), self.seeds if seeds is None else seeds
        return joined([self.once(chosen, number) for number in range(seed, seed + count)])

    def once(self, settings: Mapping[str, Setting], seed: int) -> Evidence:
        """Run the experiment with one seed.

        Args:
            settings: all of them, as `with_settings` returns them.
            seed: of everything random.
        """
        started, threads = time.perf_counter(), torch.get_num_threads()
        try:
            # Tensors are small here, and a second thread costs more than it gives (six times the time on two
            # busy cores); other models keep what torch is set to.
            if settings.get("model", MODEL) == MODEL:
                torch.set_num_threads(1)
            found = list(self.experiment(seed, **settings))
        except MissingExtraError as problem:
            nothing = Picture("nothing was run", "", "", ())
            return Evidence(self.id, (), nothing, settings, (seed,), missing=str(problem))
        finally:
            torch.set_num_threads(threads)
        took = time.perf_counter() - started
        checks = tuple(x for x in found if isinstance(x, Check))
        lines = tuple(x for x in found if isinstance(x, Line))
        (picture,) = (x._replace(lines=lines) for x in found if isinstance(x, Picture))
        return Evidence(self.id, checks, picture, settings, (seed,), seconds=took)


_CLAIMS: dict[str, Claim] = {}


def claim(
    id: str,
    title: str,
    formula: str,
    source: str,
    *,
    printed: str = "",
    question: bool = False,
    seeds: int = 3,
) -> Callable[[Callable[..., Findings]], Callable[..., Findings]]:
    """Register the function below as the experiment of a claim; the arguments are those of `Claim`."""

    def register(function: Callable[..., Findings]) -> Callable[..., Findings]:
        _CLAIMS[id] = Claim(id, title, formula, source, printed, function, question, seeds)
        return function

    return register


def _order(id: str) -> tuple[str, int, str]:
    return id[0], int(id[1:].rstrip("ab")), id


def every(*, others: bool = False) -> tuple[Claim, ...]:
    """All claims, in the order of the theory.

    Args:
        others: the published results of others instead.

    Example:
        >>> len(xt.claims.every())
        48
    """
    return tuple(_CLAIMS[id] for id in sorted(_CLAIMS, key=_order) if (id[0] == "H") is others)


def find(id: str) -> Claim:
    """The claim of this id.

    Args:
        id: such as "A1", in capitals or not.

    Example:
        >>> xt.claims.find("b5a").title
        'Moving points: is their equilibrium Gaussian?'
    """
    key = id[:1].upper() + id[1:].lower()
    if key not in _CLAIMS:
        raise ArgumentError(
            f"there is no claim {id!r}{_nearest(key, _CLAIMS)}. There are A1 to A15, B1 to B7, "
            "C1 to C6, D1, E1 to E10, F1 to F7, G1, and H1 to H9 for results of others."
        )
    return _CLAIMS[key]


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), 1, 0.4)
    return f" (did you mean {found[0]}?)" if found else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def run(
    ids: Iterable[str] = (),
    *,
    settings: Mapping[str, Setting] | None = None,
    seed: int = 0,
    seeds: int | None = None,
) -> Iterator[Evidence]:
    """Run claims one after the other, and yield the evidence of each as soon as it is done.

    Args:
        ids: which; none for all.
        settings: other values than the defaults, by name; with several claims each takes those it has.
        seed: the first seed.
        seeds: how many; default what each claim says.

    Example:
        >>> for found in xt.claims.run(["A1", "A10"]):
        ...     print(found.id, found.verdict.value)
        A1 holds exactly
        A10 holds with a correction
    """
    chosen, given = chosen_claims(ids), dict(settings or {})
    strange = [name for name in given if not any(name in claim.settings for claim in chosen)]
    if strange:
        chosen[0].with_settings({strange[0]: given[strange[0]]})  # raises, and names the settings there are
    plans = [(c, c.with_settings({k: v for k, v in given.items() if k in c.settings})) for c in chosen]
    return (each.run(own, seed=seed, seeds=seeds) for each, own in plans)


def chosen_claims(ids: Iterable[str] = (), *, others: bool = False) -> list[Claim]:
    """The claims of these ids, or all, or with `others` all results of others."""
    return list(dict.fromkeys(find(id) for id in ids)) or list(every(others=others))


def counted(found: Sequence[Evidence]) -> str:
    """How many claims there are, and on which models where there are several."""
    models = list(dict.fromkeys(str(each.settings["model"]) for each in found if "model" in each.settings))
    on = f", those about trained models on {' and '.join(models)}" if len(models) > 1 else ""
    return f"{len({each.id for each in found})} claims{on}"


def fails(found: Evidence) -> bool:
    """Whether a claim that should hold does not; one that could not be run is open, and does not fail."""
    return not find(found.id).question and not found.missing and not found.verdict.holds
