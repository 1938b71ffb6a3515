"""What every number of a study is called, means and assumes. Formulas are in the files of the measures."""

from dataclasses import dataclass

Span = tuple[float | None, float | None]


@dataclass(frozen=True)
class Definition:
    """Words about a measure; fields as in `HeadMeasure`.

    Attributes:
        title: what it is called.
        unit: of its values.
        about: what large and small values mean.
        assumes: what must hold for that.
        span: lowest and highest possible value.
        absent: why it has no value, where it has none.
    """

    title: str
    unit: str
    about: str
    assumes: str
    span: Span = (None, None)
    absent: str = "No text gave this number."


_QUERIES = "Mean over the queries of a text, then over texts, longer ones counting more."
_LINEAR = "Scores are inner products of query and key; position biases belong to the measure of the keys."
_CAPPED = "Scores are softcapped, so they are not linear in the query; or no text was long enough."
_SAMPLE = "On a sample of tokens from all texts, without the first of each text."
_NO_MATRIX = "Queries or keys are not an affine function of the module's input (they are normalised, say), so there is no such matrix."
_NO_STREAM = (
    "What a head writes to the residual stream was not found in this architecture: the stream itself was not, or what attention adds to it "
    "is not a scaling of what its output projection gives."
)
_TOKENS = "Geometric mean over tokens without the first."

HEADS: dict[str, Definition] = {
    "entropy": Definition(
        title="entropy",
        unit="nats",
        about=(
            "How spread out attention is: 0 if each query looks at one key, the log of the number of keys if it looks at all evenly."
        ),
        assumes=_QUERIES + " Under a causal mask early queries see few keys, which lowers it.",
        span=(0.0, None),
    ),
    "relative_entropy": Definition(
        title="relative entropy",
        unit="",
        about=(
            "Entropy as a share of the largest possible, the log of the number of visible keys: 1 is even attention, 0 a single key."
        ),
        assumes="Queries that see only one key are left out. A learned sink counts as one more key.",
        span=(0.0, 1.0),
    ),
    "effective_keys": Definition(
        title="effective keys",
        unit="keys",
        about="Number of keys a query looks at, e to its entropy.",
        assumes=_QUERIES,
        span=(1.0, None),
    ),
    "log_normalizer": Definition(
        title="log-normalizer",
        unit="nats",
        about="G, the log of the summed exponentiated scores. Theory: its gradient is attention, its Hessian the Fisher information.",
        assumes=_QUERIES + " It contains the log of the number of visible keys.",
    ),
    "log_normalizer_variation": Definition(
        title="log-normalizer variation",
        unit="nats",
        about=(
            "Standard deviation over queries of the log-normalizer per visible key, log(Z/n): near 0 if Z is nearly constant over "
            "contexts (A15). Where it is small it equals the coefficient of variation of Z."
        ),
        assumes="Within one text. The number of visible keys is divided out, or a causal mask alone would make Z vary.",
        span=(0.0, None),
    ),
    "normalizer_cv": Definition(
        title="coefficient of variation of Z",
        unit="",
        about="Standard deviation over mean, over queries, of Z per visible key: near 0 if Z is nearly constant over contexts (A15).",
        assumes="Within one text. A few queries of large Z can decide it; log-normalizer variation is the sturdier number.",
        span=(0.0, None),
    ),
    "score_variance": Definition(
        title="score variance",
        unit="nats²",
        about=(
            "Variance of the scores under attention: the Fisher information along the query, or how much attention would change if "
            "the query were scaled."
        ),
        assumes=_QUERIES,
        span=(0.0, None),
    ),
    "score_max": Definition(
        title="maximum logit",
        unit="nats",
        about="Largest score of a text, mean over texts. Growth over training is a sign of instability.",
        assumes="Scores include scale, softcap and position bias. Longer texts have larger maxima.",
    ),
    "first_key_mass": Definition(
        title="mass on the first key",
        unit="",
        about="Share of attention that goes to the first token (attention sink).",
        assumes="Over queries that see it and have a choice. Texts begin where they were cut, so the first token is often arbitrary.",
        span=(0.0, 1.0),
    ),
    "key_mass_concentration": Definition(
        title="key-mass concentration",
        unit="nats",
        about=(
            "How unevenly keys draw attention: KL divergence of their shares from what even attention would give. 0 is even. "
            "Not the quantity of the same name in a watch's record, which is Σm²/(Σm)²."
        ),
        assumes="Shares are summed over all queries of a text; the baseline knows the mask.",
        span=(0.0, None),
    ),
    "ascent_cosine": Definition(
        title="ascent: cosine",
        unit="",
        about=(
            "Cosine between what the head writes into the residual stream and the direction in which its own log-normalizer grows "
            "(F3). 1 if the head is a gradient step on G, 0 if unrelated, negative if it descends. Baseline: gradients of the other"
            " heads of the layer."
        ),
        assumes=(
            "Keys are held fixed. The gradient runs through norm, query projection and rotation, from the residual stream before the block."
        ),
        span=(-1.0, 1.0),
        absent=_NO_STREAM,
    ),
    "ascent_gain": Definition(
        title="ascent: change in G",
        unit="nats",
        about=(
            "Change in the head's log-normalizer when its write is added to the hidden state its query came from (F3): positive if "
            "it climbs. Baseline: change in the other heads' G after the same write."
        ),
        assumes="Keys are held fixed, the write counts by itself, and the block's norm acts on the sum.",
        absent=_NO_STREAM,
    ),
    "gaussian_r2": Definition(
        title="Gaussian keys: R² of G",
        unit="",
        about=(
            "How well the mean and covariance of the visible keys predict the log-normalizer per key (F2): 1 exactly, 0 no better "
            "than a constant, negative if worse, which happens when the keys have lighter tails than a Gaussian and scores are "
            "large."
        ),
        assumes=_LINEAR + " Over the queries of a text, none fitted.",
        span=(None, 1.0),
        absent=_CAPPED,
    ),
    "gaussian_output_error": Definition(
        title="Gaussian keys: error of the output",
        unit="",
        about=(
            "Relative error of m + Cq against the mean key that attention makes (F2): 0 exact, 1 no better than even attention, "
            "above 1 worse."
        ),
        assumes=_LINEAR + " In key space, relative to how far attention moves the mean.",
        span=(0.0, None),
        absent=_CAPPED,
    ),
    "local_gaussian_r2": Definition(
        title="Gaussian neighbourhood: R² of G",
        unit="",
        about=(
            "As for all keys, but within the 16 visible keys nearest to the mean key of each query (F2): is the measure locally Gaussian?"
        ),
        assumes=_LINEAR + " Only queries that see at least 32 keys.",
        span=(None, 1.0),
        absent=_CAPPED,
    ),
    "local_gaussian_output_error": Definition(
        title="Gaussian neighbourhood: error of the output",
        unit="",
        about="Relative error of m + Cq within the 16 visible keys nearest to the mean key of each query (F2).",
        assumes=_LINEAR + " Only queries that see at least 32 keys.",
        span=(0.0, None),
        absent=_CAPPED,
    ),
    "link_symmetry": Definition(
        title="link: symmetry",
        unit="",
        about=(
            "Share of W_q W_kᵀ that is symmetric (E7): 1 as for any gradient map, such as the canonical link; ½ as for a random "
            "matrix; 0 antisymmetric."
        ),
        assumes=(
            "Of the weights alone, in coordinates of the attention module's input, query and key at the same position (rotary "
            "embeddings cancel there)."
        ),
        span=(0.0, 1.0),
        absent=_NO_MATRIX,
    ),
    "link_definiteness": Definition(
        title="link: definiteness",
        unit="",
        about=(
            "Share of positive eigenvalues, by size, of the symmetric part of W_q W_kᵀ (E7): 1 as for the link of a convex G, ½ "
            "balanced, 0 negative."
        ),
        assumes="As for symmetry.",
        span=(0.0, 1.0),
        absent=_NO_MATRIX,
    ),
    "link_r2": Definition(
        title="link: R² of a linear link",
        unit="",
        about=(
            "How well a linear map takes the mean key back to the query that made it (E7), on queries it was not fitted to: 1 for "
            "Gaussian keys, 0 no better than the mean query, negative if worse."
        ),
        assumes=_LINEAR
        + " One map for all positions of a text; under a causal mask each query has a G of its own.",
        span=(None, 1.0),
        absent="No text has enough queries to fit and test a linear map of this head dimension, or scores are softcapped.",
    ),
}

PLACES: dict[str, Definition] = {
    "hidden_norm": Definition(
        title="norm",
        unit="",
        about="Mean length of a hidden state.",
        assumes="Without the first token of each text, often an outlier.",
        span=(0.0, None),
    ),
    "first_norm": Definition(
        title="norm of the first token",
        unit="",
        about="Length of the first token's hidden state; far above the others if it is a sink.",
        assumes="",
        span=(0.0, None),
    ),
    "spread": Definition(
        title="spread",
        unit="",
        about="Distance of hidden states from their mean, root mean square.",
        assumes=_SAMPLE,
        span=(0.0, None),
    ),
    "effective_rank": Definition(
        title="effective rank",
        unit="dimensions",
        about="Number of dimensions the hidden states fill: e to the entropy of the spectrum.",
        assumes=_SAMPLE + " At most the number of tokens in the sample.",
        span=(1.0, None),
    ),
    "anisotropy": Definition(
        title="anisotropy",
        unit="",
        about="Mean cosine between two hidden states: 0 if directions balance, 1 if all point the same way.",
        assumes=_SAMPLE,
        span=(-1.0, 1.0),
    ),
    "kurtosis": Definition(
        title="excess kurtosis",
        unit="",
        about="Heaviness of tails, median over coordinates: 0 for a Gaussian.",
        assumes=_SAMPLE,
        span=(-2.0, None),
    ),
    "sliced": Definition(
        title="sliced non-Gaussianity",
        unit="",
        about=(
            "Anderson–Darling statistic of random slices through the 16 leading components, whitened; mean over slices. About 0.4 "
            "for a Gaussian; grows with the size of the sample otherwise."
        ),
        assumes=_SAMPLE,
        span=(0.0, None),
    ),
    "gaussian_p": Definition(
        title="p-value of Gaussianity",
        unit="",
        about=(
            "Chance of such slices if hidden states were Gaussian, corrected by Holm's rule for the number of places: below 0.05 "
            "they are not."
        ),
        assumes=_SAMPLE
        + (
            " Tokens of one text depend on each other, which makes p-values too small; the sample spreads them out but does not cure it."
        ),
        span=(0.0, 1.0),
    ),
    "spectrum": Definition(
        title="spectrum",
        unit="",
        about="Share of variance of each principal component, largest first.",
        assumes=_SAMPLE,
        span=(0.0, 1.0),
    ),
}

BLOCKS: dict[str, Definition] = {
    "attention_expansion": Definition(
        title="expansion by attention",
        unit="×",
        about="Factor by which adding attention's write multiplies the norm of a token (F6).",
        assumes=_TOKENS,
        span=(0.0, None),
        absent="The residual stream after attention was not found in this architecture.",
    ),
    "mlp_expansion": Definition(
        title="expansion by the MLP",
        unit="×",
        about="Factor by which adding the MLP's write multiplies the norm of a token (F6).",
        assumes=_TOKENS,
        span=(0.0, None),
        absent="The MLP's write was not found in this architecture.",
    ),
    "norm_contraction": Definition(
        title="action of the norms",
        unit="×",
        about=(
            "Factor by which the block's norms multiply the norm of a token (F6); below 1 they contract. Before a sublayer "
            "(pre-norm) they act on what it reads, after it (post-norm) on the residual stream itself."
        ),
        assumes="Geometric mean over tokens without the first and over the norms of the block.",
        span=(0.0, None),
        absent="No norm of the stream's width was found.",
    ),
}
