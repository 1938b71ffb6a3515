"""Title, meaning and assumptions of every number of a study; formulas are in the files of the measures.

A measure has a line ``name | title | unit | lowest..highest possible value`` and indented sentences: what
large and small values mean, what must hold for that, and the reason where it has no value. A word in braces
stands for a sentence of `_COMMON`. All are read into a `HeadMeasure` without a value, those of layers too.
"""

from exptilt.lens.studying.results import HeadMeasure

_COMMON = {
    "queries": "Mean over the queries of a text, then over texts, longer ones counting more.",
    "median": "Median over the queries of a text that see at least 32 keys (or half as many as any does).",
    "around": "Median over queries that see most around them, in pieces of 64 tokens whatever the chunks.",
    "linear": "Scores are inner products of query and key; position biases belong to the measure of the "
    "keys.",
    "capped": "Scores are softcapped, so they are not linear in the query; or no text was long enough.",
    "asked": "In a long text each head is asked at 128 queries or a few more, drawn at random.",
    "sample": "On a sample of tokens from all texts, without the first of each text.",
    "places": "Queries and keys are not at the same places of one text (cross-attention).",
    "repeats": "The texts have too few different tokens, or this is cross-attention.",
    "tokens": "Geometric mean over tokens without the first.",
    "no_matrix": "Queries or keys are not an affine function of the module's input (they are normalised, "
    "say), so there is no such matrix; or the module does not run on our test inputs.",
    "no_stream": "The write of a head to the residual stream was not found in this architecture: there is no "
    "residual stream, or attention adds something other than a multiple of its output projection, or the "
    "block does not run on other hidden states.",
}


def _read(text: str) -> dict[str, HeadMeasure]:
    """Measures without values by name, from lines as the module describes them."""
    found = {}
    for part in text.strip().replace("\n    ", " ").split("\n"):
        name, title, unit, rest = (x.strip() for x in part.split("|"))
        span, _, words = rest.partition(" ")
        low, high = (float(x) if x else None for x in span.split(".."))
        words, _, absent = words.format(**_COMMON).partition(" Absent: ")
        about, _, assumes = words.partition(" Assumes: ")
        reason = absent or "No text gave this number."
        found[name] = HeadMeasure(title, unit, about, assumes, None, reason=reason, span=(low, high))
    return found


HEADS = _read(
    """
entropy | entropy | nats | 0..
    How spread out attention is: 0 if each query looks at one key, the log of the number of keys if it looks
    at all evenly.
    Assumes: {queries} Under a causal mask early queries see few keys, which lowers it.
relative_entropy | relative entropy | | 0..1
    Entropy as a share of the largest possible, the log of the number of visible keys: 1 is even attention,
    0 a single key.
    Assumes: Queries that see only one key are left out. A learned sink counts as one more key.
evenness | relative entropy of short pieces | | 0..1
    Relative entropy in pieces of 64 tokens, whatever the length of the chunks: above 0.9 a head is called
    diffuse.
    Assumes: As for relative entropy. Where no text is as long as a piece, that of the chunks.
effective_keys | effective keys | keys | 1..
    Number of keys a query looks at, e to its entropy.
    Assumes: {queries}
log_normalizer | log-normalizer | nats | ..
    G, the log of the summed exponentiated scores. Theory: its gradient is attention, its Hessian the Fisher
    information.
    Assumes: {queries} It contains the log of the number of visible keys.
log_normalizer_variation | log-normalizer variation | nats | 0..
    Standard deviation over queries of the log-normalizer per visible key, log(Z/n): near 0 if Z is nearly
    constant over contexts (A15). Where it is small it equals the coefficient of variation of Z.
    Assumes: Within one text. The number of visible keys is divided out, or a causal mask alone would make Z
    vary.
normalizer_cv | coefficient of variation of Z | | 0..
    Standard deviation over mean, over queries, of Z per visible key: near 0 if Z is nearly constant over
    contexts (A15).
    Assumes: Within one text. A few queries of large Z can decide it; log-normalizer variation is the
    sturdier number.
score_variance | score variance | nats² | 0..
    Variance of the scores under attention: the Fisher information along the query, or how much attention
    would change if the query were scaled.
    Assumes: {queries}
score_max | maximum logit | nats | ..
    Largest score of a text, mean over texts. Growth over training is a sign of instability.
    Assumes: Scores include scale, softcap and position bias. Longer texts have larger maxima.
first_token_mass | mass on the first token | | 0..1
    Share of attention that the typical query gives to the first token (attention sink).
    Assumes: {median} Texts begin where they were cut, so the first token is often arbitrary.
key_mass_divergence | key-mass concentration | nats | 0..
    How unevenly keys get attention: KL divergence of their shares from those under uniform attention. 0
    is uniform.
    Assumes: Shares are summed over all queries of a text; the baseline knows the mask.
previous_mass | mass on the token before | | 0..1
    Share of attention that goes to the token before: near 1 for a previous-token head.
    Assumes: {queries} Self-attention only.
    Absent: {places}
next_mass | mass on the token after | | 0..1
    Share of attention that goes to the token after.
    Assumes: {queries} Only where later tokens are seen.
    Absent: No query sees the token after it, or this is cross-attention.
delimiter_mass | mass on delimiters | | 0..1
    Share of attention that goes to blanks, line ends, punctuation and special tokens, the first token left
    out. Baseline: their share under uniform attention.
    Assumes: Over all queries of a text. A delimiter is recognised by its characters; unknown tokens are
    not delimiters.
    Absent: {places}
first_token_share | first token against those around | | 0..1
    Of what the typical query gives to the first token, the last one, and the 16 nearest on either side: the
    share of the first. In a picture, patches at most 4 away are around. Baseline: even attention.
    Assumes: {around}
    Absent: {places}
near_share | nearest tokens against those around | | 0..1
    Of the same keys, the share of the 4 nearest on either side and of the token itself; in a picture, of
    patches at most 2 away. Baseline: even attention.
    Assumes: {around}
    Absent: {places}
duplicate_mass | duplicate mass | | 0..1
    On a random sequence of tokens that is repeated once: share of attention from a token in the second copy
    on the same token in the first.
    Assumes: Tokens of the text in random order, so that nothing else connects the two copies.
    Absent: {repeats}
induction_mass | induction mass | | 0..1
    On a random sequence of tokens that is repeated once: share of attention from a token in the second copy
    on the token that followed it in the first, which is the token to predict.
    Assumes: As for duplicates. Random tokens are not a text: induction heads show more clearly on them.
    Absent: {repeats}
write_size | size of the write | | 0..
    Length of what the head writes to a token's state in the residual stream, over the length of that state;
    root mean square over tokens.
    Assumes: As the block adds it; a head that writes next to nothing is dead.
    Absent: {no_stream}
ascent_cosine | ascent: cosine | | -1..1
    Cosine between what the head writes into the residual stream and the direction in which its own
    log-normalizer grows (F3). 1 if the head is a gradient step on G, 0 if unrelated, negative if it
    descends. Baseline: gradients of the other heads of the layer.
    Assumes: {asked} Keys are held fixed. The gradient runs through norm, query projection and rotation, from
    the residual stream before the block.
    Absent: {no_stream}
ascent_gain | ascent: change in G | nats | ..
    Change in the head's log-normalizer when its write is added to the hidden state its query came from
    (F3): positive if it climbs. Baseline: change in the other heads' G after the same write.
    Assumes: {asked} Keys are held fixed, the write counts by itself, and the block's norm acts on the sum.
    Absent: {no_stream}
gaussian_r2 | Gaussian keys: R² of G | | ..1
    How well the mean and covariance of the visible keys predict the log-normalizer per key (F2): 1 exactly,
    0 no better than a constant, negative if worse, which happens when the keys have lighter tails than a
    Gaussian and scores are large.
    Assumes: {linear} Over the queries of a text, none fitted.
    Absent: {capped}
gaussian_output_error | Gaussian keys: error of the output | | 0..
    Relative error of m + Cq against the mean key that attention makes (F2): 0 exact, 1 no better than even
    attention, above 1 worse.
    Assumes: {linear} In key space, relative to how far attention moves the mean.
    Absent: {capped}
local_gaussian_r2 | Gaussian neighbourhood: R² of G | | ..1
    As for all keys, but within the 16 visible keys nearest to the mean key of each query (F2): is the
    measure locally Gaussian?
    Assumes: {linear} Only queries that see at least 32 keys; of a long text 128 to 255, evenly spread.
    Absent: {capped}
local_gaussian_output_error | Gaussian neighbourhood: error of the output | | 0..
    Relative error of m + Cq within the 16 visible keys nearest to the mean key of each query (F2).
    Assumes: {linear} Only queries that see at least 32 keys; of a long text 128 to 255, evenly spread.
    Absent: {capped}
link_symmetry | link: symmetry | | 0..1
    Share of W_q W_kᵀ that is symmetric (E7): 1 as for any gradient map, such as the canonical link; ½ as
    for a random matrix; 0 antisymmetric.
    Assumes: Of the weights alone, in coordinates of the attention module's input, query and key at the same
    position (rotary embeddings cancel there).
    Absent: {no_matrix}
link_definiteness | link: definiteness | | 0..1
    Share of positive eigenvalues, by size, of the symmetric part of W_q W_kᵀ (E7): 1 as for the link of a
    convex G, ½ balanced, 0 negative.
    Assumes: As for symmetry.
    Absent: {no_matrix}
link_r2 | link: R² of a linear link | | ..1
    How well a linear map takes the mean key back to the query that made it (E7), on queries it was not
    fitted to: 1 for Gaussian keys, 0 no better than the mean query, negative if worse.
    Assumes: {linear} One map for all positions of a text; under a causal mask each query has a G of its
    own.
    Absent: No text has enough queries to fit and test a linear map of this head dimension, or scores are
    softcapped.
"""
)

PLACES = _read(
    """
hidden_norm | norm | | 0..
    Mean length of a hidden state.
    Assumes: Without the first token of each text, often an outlier.
first_norm | norm of the first token | | 0..
    Length of the first token's hidden state; far above the others if it is a sink.
spread | spread | | 0..
    Distance of hidden states from their mean, root mean square.
    Assumes: {sample}
effective_rank | effective rank | dimensions | 1..
    Number of dimensions the hidden states fill: e to the entropy of the spectrum.
    Assumes: {sample} At most the number of tokens in the sample.
anisotropy | anisotropy | | -1..1
    Mean cosine between two hidden states: 0 if directions balance, 1 if all point the same way.
    Assumes: {sample}
kurtosis | excess kurtosis | | -2..
    Heaviness of tails, median over coordinates: 0 for a Gaussian.
    Assumes: {sample}
sliced | sliced non-Gaussianity | | 0..
    Anderson–Darling statistic of random slices through the 16 leading components, whitened; mean over
    slices. About 0.4 for a Gaussian; grows with the size of the sample otherwise.
    Assumes: {sample}
gaussian_p | p-value of Gaussianity | | 0..1
    Chance of such slices if hidden states were Gaussian, corrected by Holm's rule for the number of places:
    below 0.05 they are not.
    Assumes: {sample} Tokens of one text depend on each other, which makes p-values too small; the sample
    spreads them out but does not cure it.
spectrum | spectrum | | 0..1
    Share of variance of each principal component, largest first.
    Assumes: {sample}
"""
)

BLOCKS = _read(
    """
attention_expansion | expansion by attention | × | 0..
    Factor by which adding attention's write multiplies the norm of a token (F6).
    Assumes: {tokens}
    Absent: The residual stream after attention was not found in this architecture.
mlp_expansion | expansion by the MLP | × | 0..
    Factor by which adding the MLP's write multiplies the norm of a token (F6).
    Assumes: {tokens}
    Absent: The MLP's write was not found in this architecture.
norm_contraction | action of the norms | × | 0..
    Factor by which the block's norms multiply the norm of a token (F6); below 1 they contract. Before a
    sublayer (pre-norm) they act on what it reads, after it (post-norm) on the residual stream itself.
    Assumes: Geometric mean over tokens without the first and over the norms of the block.
    Absent: No norm of the stream's width was found.
"""
)
