"""One text through tiny trained-like models, against attention worked out by hand in float64."""

import numpy as np
import pytest
import torch

from exptilt.lens.inputs.texts import Chunk
from exptilt.lens.questions.canonical_link import measure_weights
from exptilt.lens.studying.one_text import Options, measure_unit
from oracles.transformers_by_hand import by_hand, tiny

KINDS = ["llama", "gpt2", "bert"]
TOKENS = 38
# Llama's norm runs in float32 whatever the model is, which is what the tolerance is about.
CLOSE = {
    "llama": {"rtol": 2e-4, "atol": 1e-6},
    "gpt2": {"rtol": 1e-9, "atol": 1e-11},
    "bert": {"rtol": 1e-9, "atol": 1e-11},
}


@pytest.fixture(scope="module")
def measured():
    found = {}
    for kind in KINDS:
        model = tiny(kind)
        ids = torch.randint(1, 60, (TOKENS,), generator=torch.Generator().manual_seed(1))
        unit = measure_unit(model, Chunk(ids, 0), Options(neighbours=6, strip=10))
        weights = measure_weights(model, Chunk(ids[:1], 0).inputs(model))
        found[kind] = model, ids, unit, weights, by_hand(model, ids)
    return found


def rows(layers, value):
    """(layer, head) of value(layer, head)."""
    return np.array([[float(value(layer, head)) for head in range(4)] for layer in layers])


def check(measured, kind, name, value):
    np.testing.assert_allclose(
        measured[kind][2][f"head:{name}"], rows(measured[kind][4], value), **CLOSE[kind]
    )


def entropies(layer, head):
    return [-sum(float(p) * np.log(float(p)) for p in row if p > 0) for row in layer.probability[head]]


def normalizers(layer, head):
    return np.array([float(layer.G(head, i, layer.query[head, i])) for i in range(TOKENS)])


def visible(layer):
    return np.arange(1, TOKENS + 1) if layer.causal else np.full(TOKENS, TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_statistics(measured, kind):
    def maximum(layer, head):
        s = layer.scale * layer.query[head] @ layer.key[head].T
        return s[torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if layer.causal else slice(None)].max()

    def variance(layer, head):
        s, p = layer.scale * layer.query[head] @ layer.key[head].T, layer.probability[head]
        return ((p * s**2).sum(1) - (p * s).sum(1) ** 2).mean()

    def relative(layer, head):
        choice = visible(layer) > 1
        return np.mean(np.array(entropies(layer, head))[choice] / np.log(visible(layer)[choice]))

    check(measured, kind, "entropy", lambda layer, head: np.mean(entropies(layer, head)))
    check(measured, kind, "effective_keys", lambda layer, head: np.mean(np.exp(entropies(layer, head))))
    check(measured, kind, "relative_entropy", relative)
    check(measured, kind, "log_normalizer", lambda layer, head: normalizers(layer, head).mean())
    check(
        measured,
        kind,
        "log_normalizer_variation",
        lambda layer, head: np.std(normalizers(layer, head) - np.log(visible(layer)), ddof=1),
    )
    check(measured, kind, "score_max", maximum)
    check(measured, kind, "score_variance", variance)

    def cv(layer, head):
        z = np.exp(normalizers(layer, head)) / visible(layer)
        return np.std(z, ddof=1) / np.mean(z)

    check(measured, kind, "normalizer_cv", cv)


@pytest.mark.parametrize("kind", KINDS)
def test_mass(measured, kind):
    def first(layer, head):
        many = np.array(visible(layer)) >= min(32, TOKENS / 2)
        return np.median(layer.probability[head, :, 0].numpy()[many])

    def concentration(layer, head):
        even = np.zeros(TOKENS)
        for n in visible(layer):
            even[:n] += 1 / n
        p, q = layer.probability[head].sum(0).numpy() / TOKENS, even / TOKENS
        return (p * np.log(p / q)).sum()

    check(measured, kind, "first_token_mass", first)
    check(measured, kind, "key_mass_divergence", concentration)
    _, ids, unit, _, layers = measured[kind]
    token = int(unit["token_ids"][3])
    places = [j for j in range(1, TOKENS) if int(ids[j]) == token]
    seen_by = [TOKENS - j if layers[1].causal else TOKENS for j in places]
    wanted = sum(
        float(layers[1].probability[2, :, j].sum()) / n for j, n in zip(places, seen_by, strict=True)
    )
    np.testing.assert_allclose(unit["token_mass"][1, 2, 3], wanted, rtol=1e-4)
    assert unit["token_counts"][3] == len(places)
    np.testing.assert_allclose(
        unit["strip"][1], layers[1].probability[:, :10, :10].numpy(), rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ascent(measured, kind):
    def cosine(layer, head, other):
        pairs = [(layer.write(head, i), layer.gradient(other, i)) for i in range(TOKENS)]
        return np.mean([float(torch.dot(w, g) / (w.norm() * g.norm())) for w, g in pairs])

    def gain(layer, head, other):
        total = 0.0
        for i in range(TOKENS):
            moved = layer.query_of(other, i, layer.hidden[i] + layer.write(head, i))
            total += float((layer.G(other, i, moved) - layer.G(other, i, layer.query[other, i])).detach())
        return total / TOKENS

    _, _, unit, _, layers = measured[kind]
    tolerance = {"rtol": 2e-3, "atol": 2e-5} if kind == "llama" else {"rtol": 1e-7, "atol": 1e-9}
    for name, value in (("ascent_cosine", cosine), ("ascent_gain", gain)):
        layer, head = layers[1], 2
        np.testing.assert_allclose(unit[f"head:{name}"][1, head], value(layer, head, head), **tolerance)
        np.testing.assert_allclose(unit[f"head:{name}"][0, 1], value(layers[0], 1, 1), **tolerance)
        others = np.mean([value(layer, head, other) for other in (0, 1, 3)])
        np.testing.assert_allclose(unit[f"head:{name}_baseline"][1, head], others, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_local_gaussian(measured, kind):
    def fits(layer, head, neighbours):
        truth, guess, wrong, moved = [], [], [], []
        for i, n in enumerate(visible(layer)):
            if n < (2 if neighbours is None else 2 * neighbours):
                continue
            keys, eta = layer.key[head, :n].numpy(), layer.scale * layer.query[head, i].numpy()
            weights = layer.probability[head, i, :n].numpy()
            if neighbours is not None:
                distance = np.linalg.norm(keys - weights @ keys, axis=1)
                keys = keys[np.argsort(distance)[:neighbours]]
            scores = keys @ eta
            G = np.log(np.exp(scores).sum())
            m, C = keys.mean(0), np.cov(keys.T, bias=True)
            target = np.exp(scores - G) @ keys
            truth.append(G - np.log(len(keys)))
            guess.append(m @ eta + eta @ C @ eta / 2)
            wrong.append(np.sum((m + C @ eta - target) ** 2))
            moved.append(np.sum((target - m) ** 2))
        truth, guess = np.array(truth), np.array(guess)
        r2 = 1 - ((truth - guess) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
        return r2, np.sqrt(sum(wrong) / sum(moved))

    tolerance = {"rtol": 1e-2, "atol": 1e-3} if kind == "llama" else {"rtol": 1e-7, "atol": 1e-9}
    _, _, unit, _, layers = measured[kind]
    for prefix, neighbours in (("", None), ("local_", 6)):
        wanted = np.array([[fits(layer, head, neighbours) for head in range(4)] for layer in layers])
        np.testing.assert_allclose(unit[f"head:{prefix}gaussian_r2"], wanted[..., 0], **tolerance)
        np.testing.assert_allclose(unit[f"head:{prefix}gaussian_output_error"], wanted[..., 1], **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_link(measured, kind):
    model, _, unit, weights, layers = measured[kind]
    for index in range(2):
        for head in range(4):
            W_q, W_k = query_key_weights(model, index, head)
            M = W_q @ W_k.T
            S = (M + M.T) / 2
            values = np.linalg.eigvalsh(S)
            np.testing.assert_allclose(
                weights["head:link_symmetry"][index, head], (S**2).sum() / (M**2).sum(), rtol=1e-5
            )
            np.testing.assert_allclose(
                weights["head:link_definiteness"][index, head],
                values[values > 0].sum() / abs(values).sum(),
                rtol=1e-5,
            )
    layer, head = layers[0], 3
    eta = (layer.scale * layer.query[head]).numpy()
    mean = np.c_[(layer.probability[head] @ layer.key[head]).numpy(), np.ones(TOKENS)]
    left = total = 0.0
    for fit, test in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        solved = np.linalg.lstsq(mean[fit], eta[fit], rcond=None)[0]
        left += ((eta[test] - mean[test] @ solved) ** 2).sum()
        total += ((eta[test] - eta[fit].mean(0)) ** 2).sum()
    np.testing.assert_allclose(
        unit["head:link_r2"][0, head], 1 - left / total, rtol=1e-2 if kind == "llama" else 1e-6
    )


def query_key_weights(model, index, head):
    """(width, D) each, read from the named parameters."""
    rows, group = slice(head * 8, (head + 1) * 8), slice(head // 2 * 8, (head // 2 + 1) * 8)
    if hasattr(model, "model"):
        attention = model.model.layers[index].self_attn
        found = attention.q_proj.weight[rows].T, attention.k_proj.weight[group].T
    elif hasattr(model, "transformer"):
        weight = model.transformer.h[index].attn.c_attn.weight
        found = weight[:, rows], weight[:, 32:][:, rows]
    else:
        attention = model.encoder.layer[index].attention.self
        found = attention.query.weight[rows].T, attention.key.weight[rows].T
    return [x.detach().numpy() for x in found]


@pytest.mark.parametrize("kind", KINDS)
def test_depth(measured, kind):
    model, ids, unit, _, _ = measured[kind]
    inside = {}
    block = (
        model.model.layers
        if kind == "llama"
        else model.transformer.h
        if kind == "gpt2"
        else model.encoder.layer
    )[1]
    second = {"llama": "post_attention_layernorm", "gpt2": "ln_2", "bert": "attention.output.LayerNorm"}[kind]
    final = {"bert": "output.LayerNorm"}.get(kind)
    handles = [
        block.get_submodule(second).register_forward_hook(
            lambda m, a, o: inside.update(middle=a[0], normed=o)
        )
    ]
    handles.append(
        block.register_forward_hook(
            lambda m, a, o: inside.update(before=a[0], after=o[0] if isinstance(o, tuple) else o)
        )
    )
    if final:
        handles.append(
            block.get_submodule(final).register_forward_hook(lambda m, a, o: inside.update(last=a[0]))
        )
    with torch.no_grad():
        states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()

    def ratio(a, b):
        return float((b[0, 1:].norm(dim=-1) / a[0, 1:].norm(dim=-1)).log().mean().exp())

    np.testing.assert_allclose(
        unit["place:hidden_norm"][:2], [float(h[0, 1:].norm(dim=-1).mean()) for h in states[:2]], rtol=1e-5
    )
    np.testing.assert_allclose(unit["place:first_norm"][2], float(inside["after"][0, 0].norm()), rtol=1e-5)
    np.testing.assert_allclose(
        unit["block:attention_expansion"][1], ratio(inside["before"], inside["middle"]), rtol=1e-5
    )
    pair = (inside["normed"], inside["last"]) if final else (inside["middle"], inside["after"])
    np.testing.assert_allclose(unit["block:mlp_expansion"][1], ratio(*pair), rtol=1e-5)
    assert list(unit["place_labels"]) == ["embedding", "after layer 0", "after layer 1"]
    assert unit["sample:2"].shape == (TOKENS - 1, 32)
    np.testing.assert_allclose(unit["sample:1"], states[1][0, 1:].numpy(), rtol=1e-4, atol=1e-5)


def test_loss(measured):
    for kind in ("llama", "gpt2"):
        model, ids, unit, _, _ = measured[kind]
        with torch.no_grad():
            wanted = float(model(input_ids=ids[None], labels=ids[None]).loss)
        np.testing.assert_allclose(float(unit["loss"]), wanted, rtol=1e-6)
    assert np.isnan(float(measured["bert"][2]["loss"]))
