"""`attend`: softmax attention with its statistics and all its derivatives, never holding the n×n matrix."""

from torch import Tensor

from exptilt.tilting.arguments import prepare
from exptilt.tilting.merge import Tilted
from exptilt.tilting.tilt import run


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, log_weight: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, causal: bool = False, window: int | None = None, softcap: float | None = None, sink: Tensor | None = None,
    key_mass: bool = False, backend: str | None = None, check: bool | None = None,
) -> Tilted:  # fmt: skip
    r"""Exact softmax attention, with the statistics of its scores from the same sweep over the keys.

        s_ij = softcap(scale <q_i, k_j>) + bias_ij + log_weight_j,     p_ij = e^{s_ij − G_i},     output_i = Σ_j p_ij v_j

    Differentiable in query, key, value, bias, log_weight and sink through every statistic: backwards, forwards and twice, in O(n) memory.

    Args:
        query: ``(..., Hq, Q, D)``; float64, float32, bfloat16 or float16 (the last two are summed in float32, and statistics are float32).
        key: ``(..., Hkv, K, D)``; Hkv divides Hq, and query head h reads key head h // (Hq/Hkv).
        value: ``(..., Hkv, K, Dv)``.
        scale: factor of <q,k>; 1/sqrt(D) if None.
        log_weight: ``(..., Hkv, K)``, the log of each key's own weight h.
        bias: broadcasts to ``(..., Hq, Q, K)``; added to the scores, −inf hides a key.
        mask: booleans that broadcast to ``(..., Hq, Q, K)``; True where a query may see a key.
        causal: query i sees key j where j <= i + K − Q: the two sequences end together.
        window: w keeps keys with i' − j < w, i' = i + K − Q; without causal also j − i' < w.
        softcap: c > 0, for scores c·tanh(s/c).
        sink: ``(..., Hq)``, the score of one more outcome per head with value 0. It counts in G, entropy, mean and variance, not in score_max.
        key_mass: also return the attention each key receives (a second sweep).
        backend: ``reference``, ``tiled``, ``cpu`` or ``gpu``; None chooses by device and dtype.
        check: raise if NaN or an infinity in query, key, bias or log_weight reaches a result; None means yes on the CPU, no elsewhere.

    Returns:
        `Tilted`: output ``(..., Hq, Q, Dv)``, statistics ``(..., Hq, Q)``, key_mass ``(..., Hq, K)`` or None. A query that sees nothing has output 0,
        log_normalizer −inf, score_max −inf, and 0 for the rest.

    Example:
        >>> q, k = torch.zeros(1, 2, 4), torch.randn(1, 8, 4)
        >>> attend(q, k, k).entropy.exp()  # effective number of keys
        tensor([[8., 8.]])
    """
    call = prepare(
        "attend", query, key, value, scale=scale, log_weight=log_weight, bias=bias, mask=mask, causal=causal, window=window,
        softcap=softcap, sink=sink, backend=backend, check=check,
    )  # fmt: skip
    return run(call, key_mass=key_mass)
