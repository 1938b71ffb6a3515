"""Random tensors, and random problems with options mixed at random, for hypothesis."""

import torch
from hypothesis import strategies as st

FIELDS = ("output", "log_normalizer", "entropy", "score_mean", "score_variance", "score_max", "key_mass")
BACKENDS = ("reference", "cpu", "tiled")


def normal(seed, *shape, dtype=torch.float32):
    """Standard normal numbers, the same in every dtype but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair_shape(draw, lead, Hq, Q, K):
    """A shape that broadcasts to (*lead, Hq, Q, K)."""
    full = (*lead, Hq, Q, K)
    shape = tuple(n if draw(st.booleans()) else 1 for n in full)
    return shape[draw(st.integers(0, len(lead) + 1)) :]


@st.composite
def problems(draw, largest=40, dtype=torch.float64, batch_axes=2, least_keys=0):
    """(query, key, value, options), with any of the options on or off."""
    seed = draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    lead = tuple(draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, batch_axes))))
    Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    Hq = Hkv * group
    Q, K = draw(st.integers(1, largest)), draw(st.integers(least_keys, largest))
    D, Dv = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    spread = draw(st.sampled_from([0.1, 1.0, 10.0]))

    def random(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(0, K + 2))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([-0.7, 0.0, 0.3, 2.0]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        options["log_weight"] = random(
            *lead[draw(st.integers(0, len(lead))) :], draw(st.sampled_from([1, Hkv])), K
        )
    if draw(st.booleans()):
        bias = random(*pair_shape(draw, lead, Hq, Q, K))
        options["bias"] = (
            bias.masked_fill(torch.rand(bias.shape, generator=g) < 0.2, -torch.inf)
            if draw(st.booleans())
            else bias
        )
    if draw(st.booleans()):
        options["mask"] = torch.rand(pair_shape(draw, lead, Hq, Q, K), generator=g) < draw(
            st.sampled_from([0.1, 0.5, 0.9])
        )
    if draw(st.booleans()):
        options["sink"] = random(*lead[draw(st.integers(0, len(lead))) :], Hq)
    query, key, value = spread * random(*lead, Hq, Q, D), random(*lead, Hkv, K, D), random(*lead, Hkv, K, Dv)
    if draw(st.booleans()):  # same numbers, strange strides
        query, key, value = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (query, key, value))
    return query, key, value, options


def close(a, b, tolerance):
    """Equal where infinite, within tolerance (relative to 1 or more) elsewhere."""
    same = a == b
    a, b = torch.where(same, 0.0, a), torch.where(same, 0.0, b)
    return bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())
