"""What an earlier release pickled or exported under the old module names is still read."""

import pickle

import pytest
import torch

from exptilt import families as f
from exptilt._support.transforms import pytree
from exptilt.families.relations import Predictive

MEASURES = [
    f.Gamma(torch.ones(2), torch.ones(2)),
    f.Empirical(torch.eye(2)),
    f.Mixture(torch.zeros(2), f.Poisson(torch.tensor([[1.0], [5.0]]))),
]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: type(measure).__name__)
def test_old_module_names(measure: f.Measure) -> None:
    now = pickle.dumps(measure, protocol=0)
    old = now.replace(b"exptilt.families.members.", b"exptilt.families.")
    assert old != now
    read = pickle.loads(old)
    assert type(read) is type(measure)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(read._leaves(), measure._leaves(), strict=True))


def test_predictive_laws_had_a_module_of_their_own() -> None:
    law = Predictive(f.Gamma(torch.ones(1), torch.ones(1)), f.Exponential)
    old = pickle.dumps(law, protocol=0).replace(b"families.relations", b"families.predictive")
    assert torch.equal(pickle.loads(old).log_prob(torch.ones(1)), law.log_prob(torch.ones(1)))


def test_names_in_exported_programs() -> None:
    _, spec = pytree.tree_flatten(MEASURES[0])
    assert "exptilt.families.gamma.Gamma" in pytree.treespec_dumps(spec)
