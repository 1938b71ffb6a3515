"""exptilt: softmax attention is an exponential family, and everything follows from its log-normalizer.

    G(q) = log Σ_j e^{⟨k_j, q⟩},   attention = ∇G,   uncertainty = ∇²G

The names below are loaded on first use (PEP 562), so `import exptilt` costs nothing, `exptilt --help` answers
at once, and plotting or model libraries are imported only by those who call for them. To add a public name:
its folder exports it, and `_HOME` says which folder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Notes which process this is, before anybody forks.
from exptilt import _support  # noqa: F401

if TYPE_CHECKING:
    from exptilt import (
        attention,
        claims,
        distributed,
        dynamics,
        families,
        lens,
        losses,
        memory,
        report,
        sampling,
        switching,
        taylor,
        tilting,
    )
    from exptilt.attention import MultiheadAttention, compact
    from exptilt.families import Empirical, Gaussian, GaussianMixture, kl, maximum_entropy, project
    from exptilt.lens import differentiable
    from exptilt.taylor import laplacian, score_skewness
    from exptilt.tilting import (
        AttentionResult,
        Tilted,
        attend,
        divergence,
        fisher_vector_product,
        leave_one_out,
        log_normalizer,
        merge,
        unmerge,
    )

__version__ = "0.3.0"

_HOME = {
    "AttentionResult": "tilting",
    "Empirical": "families",
    "Gaussian": "families",
    "GaussianMixture": "families",
    "MultiheadAttention": "attention",
    "Tilted": "tilting",
    "attend": "tilting",
    "compact": "attention",
    "differentiable": "lens",
    "divergence": "tilting",
    "fisher_vector_product": "tilting",
    "kl": "families",
    "laplacian": "taylor",
    "leave_one_out": "tilting",
    "log_normalizer": "tilting",
    "maximum_entropy": "families",
    "merge": "tilting",
    "project": "families",
    "score_skewness": "taylor",
    "unmerge": "tilting",
}
_FOLDERS = (
    "attention",
    "claims",
    "distributed",
    "dynamics",
    "families",
    "lens",
    "losses",
    "memory",
    "report",
    "sampling",
    "switching",
    "taylor",
    "tilting",
)

__all__ = [
    "AttentionResult",
    "Empirical",
    "Gaussian",
    "GaussianMixture",
    "MultiheadAttention",
    "Tilted",
    "__version__",
    "attend",
    "attention",
    "claims",
    "compact",
    "differentiable",
    "distributed",
    "divergence",
    "dynamics",
    "families",
    "fisher_vector_product",
    "kl",
    "laplacian",
    "leave_one_out",
    "lens",
    "log_normalizer",
    "losses",
    "maximum_entropy",
    "memory",
    "merge",
    "project",
    "report",
    "sampling",
    "score_skewness",
    "switching",
    "taylor",
    "tilting",
    "unmerge",
]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
