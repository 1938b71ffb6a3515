"""Bad input to samplers of joint exponential families."""

import torch

from exptilt import families as f
from exptilt.sampling import Joint, gibbs, smc
from exptilt.sampling.resampling import effective_size, systematic

GAUSS = f.Gaussian(torch.zeros(1), torch.eye(1))

ROWS = [
    (lambda: Joint({}), "sites", "measures by name"),
    (lambda: Joint({"x": 3}), "sites", "measures by name"),
    (
        lambda: Joint({"x": f.Gaussian(torch.zeros(2, 1), torch.eye(1))}),
        "sites",
        r"sites\['x'\] has batch axes",
    ),
    (lambda: Joint({"x": f.NormalGamma(*(torch.ones(1),) * 4)}), "sites", "not one tensor"),
    (
        lambda: Joint({"x": GAUSS}, {("x", "x"): torch.ones(1, 1)}),
        "coupling",
        "each pair of different sites once",
    ),
    (lambda: Joint({"x": GAUSS}, {("x", "y"): torch.ones(1, 1)}), "coupling", "names 'y'"),
    (lambda: Joint({"x": GAUSS}, bias={"x": torch.ones(2)}), "bias", "must be a tensor"),
    (lambda: Joint({"x": GAUSS}, bias={"x": torch.tensor([torch.nan])}), "bias", "finite"),
    (lambda: Joint({"x": GAUSS}).conditional("y", {"x": torch.ones(1)}), "site", "no site 'y'"),
    (lambda: Joint({"x": GAUSS}).log_tilt({}), "state", "no 'x'"),
    (lambda: gibbs(Joint({"x": GAUSS}), 0), "sweeps", "sweeps is 0"),
    (lambda: gibbs(Joint({"x": GAUSS}), 2, given={"y": torch.ones(1)}), "given", "names 'y'"),
    (lambda: gibbs(Joint({"x": GAUSS}), 2, start={"x": torch.ones(3, 1)}, chains=2), "start", "has shape"),
    (
        lambda: gibbs(Joint({"c": f.Poisson(torch.ones(1))}), 2, given={"c": torch.tensor([-1.0])}),
        "given",
        "support",
    ),
    (lambda: smc(Joint({"x": GAUSS}), target=1.0), "target", "target is 1.0"),
    (
        lambda: smc(Joint({"x": f.Gamma(torch.ones(1), torch.ones(1))}, bias={"x": torch.ones(1)})),
        "eta",
        "below the rate",
    ),
    (lambda: systematic(torch.full((2, 3), -torch.inf)), "log_weight", "not −inf throughout"),
    (lambda: systematic(torch.tensor([0.0, torch.nan])), "log_weight", "not −inf throughout"),
    (lambda: effective_size(3.0), "log_weight", "log_weight"),
]
