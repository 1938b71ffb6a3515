"""The measures of a study as functions of tensors: against loops in numpy, and against what theory says of
made-up heads.
"""

import numpy as np
import pytest
import torch

from exptilt.lens.heads.scores import Scores, problem
from exptilt.lens.heads.statistics import first_products, rows, statistic_lines, text_statistics, with_mass
from exptilt.lens.heads.visibility import Visibility
from exptilt.lens.questions.ascent import _turns, ascent
from exptilt.lens.questions.canonical_link import definiteness, link_r2, symmetry
from exptilt.lens.questions.depth import growth
from exptilt.lens.questions.hidden_states import cloud, holm
from exptilt.lens.questions.local_gaussian import gaussian_fit
from exptilt.lens.studying.summary import average
from exptilt.tilting import attend


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def options(case):
    """Options of attend, mixed: batch 2, heads 4 (2 for keys), 9 queries, 12 keys."""
    g = torch.Generator().manual_seed(case)
    found = {"scale": 0.7}
    if case & 1:
        found["causal"] = True
    if case & 2:
        found["bias"] = draw(1, 4, 9, 12, seed=case)
    if case & 4:
        found["mask"] = torch.rand(2, 1, 9, 12, generator=g) < 0.8
        found["mask"][..., 0] = True
    if case & 8:
        found["sink"] = draw(4, seed=case)
    if case & 16:
        found |= {"window": 5, "log_weight": draw(2, 2, 12, seed=case)}
    return found


def dense(query, key, opts, item):
    """Scores (head, Q, K), log h and probabilities of one item, by loops over pairs; the last outcome is the
    sink, if there is one.
    """
    heads, Q, K = query.shape[1], query.shape[2], key.shape[2]
    s, w = np.zeros((heads, Q, K)), np.full((heads, Q, K), -np.inf)
    for h in range(heads):
        for i in range(Q):
            for j in range(K):
                s[h, i, j] = opts["scale"] * float(query[item, h, i] @ key[item, h // 2, j])
                own = i + K - Q
                seen = (j <= own or not opts.get("causal")) and (
                    opts.get("window") is None or abs(own - j) < opts["window"]
                )
                seen = seen and (opts.get("mask") is None or bool(opts["mask"][item, 0, i, j]))
                if seen:
                    w[h, i, j] = 0.0 if opts.get("bias") is None else float(opts["bias"][0, h, i, j])
                    w[h, i, j] += (
                        0.0 if opts.get("log_weight") is None else float(opts["log_weight"][item, h // 2, j])
                    )
    sink = opts.get("sink")
    sink = np.full(heads, -np.inf) if sink is None else sink.numpy()
    Z = (np.exp(s + w)).sum(-1) + np.exp(sink)[:, None]
    return s, w, np.exp(s + w) / Z[..., None], np.exp(w).sum(-1) + np.exp(sink)[:, None]


@pytest.mark.parametrize("case", range(0, 32, 3))
def test_sums_over_blocks(case, monkeypatch):
    monkeypatch.setattr("exptilt.lens.heads.scores.BLOCK", 4 * 12 * 2)  # two rows at a time
    query, key, opts, item = draw(2, 4, 9, 5), draw(2, 2, 12, 5, seed=1), options(case), 1
    tilted = attend(query, key, key, **opts)
    G = tilted.log_normalizer[item]
    scores = Scores.of(query, key, opts, item)
    m = text_statistics(query, key, opts, tilted, item)
    _, w, p, total = dense(query, key, opts, item)
    np.testing.assert_allclose(m.drawn, p.sum(1), rtol=1e-9, atol=1e-12)
    seen = w > -np.inf
    visible = Visibility.of(query, key, opts)
    np.testing.assert_array_equal(visible.visible.expand(2, 4, 9)[item], seen.sum(-1))
    np.testing.assert_array_equal(m.seen_by.expand(4, 12), seen.sum(1))
    lines = rows(statistic_lines(tilted), first_products(query, key, None), opts, visible)
    np.testing.assert_allclose(with_mass(lines)[5, item], p[..., 0], rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(lines[5, item] > -np.inf, seen[..., 0])
    even = (seen / np.maximum(seen.sum(-1, keepdims=True), 1)).sum(1)
    np.testing.assert_allclose(m.even.expand(4, 12), even, rtol=1e-9, atol=1e-12)
    keys = key[item].repeat_interleave(2, 0).numpy()
    np.testing.assert_allclose(m.mean_key, p @ keys, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(scores.strip(G, 4), p[:, :4, :4], rtol=1e-9, atol=1e-12)
    live = seen.any(-1)
    outcomes = seen.sum(-1) + ("sink" in opts)
    choice = seen[..., 0] & (outcomes > 1) & (outcomes >= outcomes.max() / 2)
    for h in range(4):
        z = np.exp(G[h].numpy()[live[h]]) / total[h][live[h]]
        shares, wanted = p[h].sum(0) / p[h].sum(), even[h] / even[h].sum()
        there = shares > 0
        expected = {
            "log_normalizer_variation": np.log(z).std(ddof=1),
            "normalizer_cv": z.std(ddof=1) / z.mean(),
            "first_token_mass": np.median(p[h, choice[h], 0]),
            "first_key_mass": p[h, live[h], 0].mean(),
            "key_mass_divergence": (shares[there] * np.log(shares[there] / wanted[there])).sum(),
            "key_mass_simpson": (shares**2).sum(),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(float(m.by_name[name][h]), value, rtol=1e-8, err_msg=name)

    fit = gaussian_fit(scores, G, m.mean_key)
    for h in range(4):
        truth, guess, wrong, moved = [], [], 0.0, 0.0
        for i in range(9):
            if seen[h, i].sum() < 2:
                continue
            weight, k = np.exp(w[h, i]), np.r_[keys[h], np.zeros((1, 5))]
            weight = np.r_[weight, np.exp(float(opts["sink"][h])) if "sink" in opts else 0.0] / total[h, i]
            eta = opts["scale"] * query[item, h, i].numpy()
            mean = weight @ k
            C = (k - mean).T @ (weight[:, None] * (k - mean))
            truth.append(float(G[h, i]) - np.log(total[h, i]))
            guess.append(mean @ eta + eta @ C @ eta / 2)
            target = p[h, i] @ keys[h]
            wrong += np.sum((mean + C @ eta - target) ** 2)
            moved += np.sum((target - mean) ** 2)
        truth, guess = np.array(truth), np.array(guess)
        r2 = 1 - ((truth - guess) ** 2).sum() / ((truth - truth.mean()) ** 2).sum()
        np.testing.assert_allclose(float(fit.r2[h]), r2, rtol=1e-7)
        np.testing.assert_allclose(float(fit.output_error[h]), np.sqrt(wrong / moved), rtol=1e-7)


def test_softcap_reaches_the_mass():
    query, key = 9 * draw(1, 2, 6, 4), draw(1, 1, 7, 4, seed=1)
    found = attend(query, key, key, softcap=2.0, causal=True, key_mass=True)
    rule, inputs = problem(query, key, {"softcap": 2.0, "causal": True})
    p = torch.exp(rule.column(inputs, torch.tensor([3])) - found.log_normalizer)
    torch.testing.assert_close(p.sum(-1)[0], found.key_mass[0, :, 3])
    blocks = Scores.of(query, key, {"softcap": 2.0, "causal": True}).blocks(rows=4)
    sums = sum(
        torch.exp(b.score + b.log_weight - found.log_normalizer[0, :, b.rows, None]).sum(1) for b in blocks
    )
    torch.testing.assert_close(sums, found.key_mass[0])


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="temperature"):
        Scores.of(draw(1, 1, 2, 2), draw(1, 1, 2, 2), {"temperature": 2.0})


def test_constant_normalizer_has_no_variation():
    """Keys on a sphere and queries of one length, so many of them that Z is nearly the same for all: A15 by
    construction.
    """
    key = torch.nn.functional.normalize(draw(1, 1, 4000, 3), dim=-1)
    query = torch.nn.functional.normalize(draw(1, 1, 50, 3, seed=1), dim=-1)
    found = attend(query, key, key, scale=1.0)
    statistics = text_statistics(query, key, {"scale": 1.0}, found).by_name
    assert statistics["log_normalizer_variation"] < 0.02
    assert abs(statistics["normalizer_cv"] / statistics["log_normalizer_variation"] - 1) < 0.02
    np.testing.assert_allclose(
        float(statistics["log_normalizer"]), np.log(4000 * np.sinh(1)), atol=0.01
    )  # ∫ e^{<q,k>} over the sphere


def test_gaussian_keys_are_predicted():
    """Keys from a Gaussian: two moments tell G and the mean key, up to the size of the sample."""
    mix = draw(4, 4, seed=2)
    key = (draw(1, 1, 60000, 4) @ mix + 1.0).contiguous()
    query = 0.3 * draw(1, 1, 40, 4, seed=1)
    found = attend(query, key, key, scale=1.0)
    scores = Scores.of(query, key, {"scale": 1.0})
    fit = gaussian_fit(scores, found.log_normalizer[0], found.output[0])
    assert fit.r2 > 0.995
    assert fit.output_error < 0.12
    assert link_r2(scores.inputs.query, found.output[0]) > 0.9
    two = torch.where(draw(1, 1, 60000, 4) > 0, 4.0, -4.0).double()  # corners of a cube are not Gaussian
    scores = Scores.of(4 * query, two, {"scale": 1.0})
    found = attend(4 * query, two, two, scale=1.0)
    assert gaussian_fit(scores, found.log_normalizer[0], found.output[0]).r2 < 0


def test_local_gaussian_sees_clusters():
    """Two far clusters, each Gaussian: no Gaussian as a whole, but one in every neighbourhood."""
    key = torch.cat([0.3 * draw(1, 1, 300, 3), 0.3 * draw(1, 1, 300, 3, seed=1) + 6.0], 2)
    query = draw(1, 1, 60, 3, seed=2)
    found = attend(query, key, key, scale=1.0)
    scores = Scores.of(query, key, {"scale": 1.0})
    everywhere, nearby = (
        gaussian_fit(scores, found.log_normalizer[0], found.output[0], neighbours=k) for k in (None, 16)
    )
    assert everywhere.r2 < 0.5
    assert nearby.r2 > 0.99


def test_a_long_text_is_asked_at_some_queries(monkeypatch):
    """Without causality queries do not know of each other: the fit is that of the queries asked alone."""
    monkeypatch.setattr("exptilt.lens.questions.local_gaussian.ASKED", 20)
    query, key = draw(1, 2, 61, 3), draw(1, 2, 80, 3, seed=1)

    def fit(query, asked):
        monkeypatch.setattr("exptilt.lens.questions.local_gaussian.ASKED", asked)
        found = attend(query, key, key, scale=1.0)
        scores = Scores.of(query, key, {"scale": 1.0})
        return gaussian_fit(scores, found.log_normalizer[0], found.output[0], neighbours=16)

    some, alone = fit(query, 20), fit(query[:, :, ::3], 1000)
    torch.testing.assert_close(some, alone)
    assert not torch.allclose(some.r2, fit(query, 1000).r2)


def test_flat_heads_have_no_r2():
    key, query = draw(1, 1, 20, 3), torch.zeros(1, 1, 8, 3, dtype=torch.float64)
    found = attend(query, key, key)
    assert gaussian_fit(Scores.of(query, key, {}), found.log_normalizer[0], found.output[0]).r2.isnan().all()


class TestAscent:
    W = draw(2, 6, 3)  # two heads, width 6

    def run(self, write):
        hidden, key = draw(1, 10, 6, seed=1), draw(1, 2, 15, 3, seed=2)
        W = self.W
        found = ascent(
            lambda h: torch.einsum("bnd,hdk->bhnk", h, W), hidden, key, {"scale": 0.5}, write(hidden, key)
        )
        return found

    def tied(self, sign):
        """Values are keys and the output map is the query map: the write is the gradient (THEORY B1)."""

        def write(hidden, key):
            query = torch.einsum("bnd,hdk->bhnk", hidden, self.W)
            mean = attend(query, key, key, scale=0.5).output[0]
            return sign * 0.01 * torch.einsum("hnk,hdk->hnd", mean, self.W)

        return self.run(write)

    def test_tied_head_ascends(self):
        found = self.tied(1)
        torch.testing.assert_close(found.cosine, torch.ones(2, dtype=torch.float64))
        assert (found.gain > 0).all()
        assert (found.cosine_baseline.abs() < 0.99).all()
        assert (found.gain > found.gain_baseline).all()

    def test_opposite_head_descends(self):
        found = self.tied(-1)
        torch.testing.assert_close(found.cosine, -torch.ones(2, dtype=torch.float64))
        assert (found.gain < 0).all()

    def test_gain_is_cosine_times_lengths_to_first_order(self):
        found, step = self.tied(1), 1e-2
        hidden, key = draw(1, 10, 6, seed=1), draw(1, 2, 15, 3, seed=2)
        query = torch.einsum("bnd,hdk->bhnk", hidden, self.W)
        slope = 0.5 * torch.einsum("hnk,hdk->hnd", attend(query, key, key, scale=0.5).output[0], self.W)
        torch.testing.assert_close(found.gain, 2 * step * slope.square().sum(-1).mean(-1), rtol=0.05, atol=0)

    def test_silent_queries_do_not_count(self):
        def write(hidden, key):
            w = draw(2, 10, 6, seed=5)
            w[:, 4:] = 0.0
            return w

        both = self.run(write)
        assert both.cosine.isfinite().all()
        alone = self.run(
            lambda hidden, key: torch.cat(
                [write(hidden, key)[:, :4], 1e-9 * torch.ones(2, 6, 6, dtype=torch.float64)], 1
            )
        )
        assert not torch.allclose(both.cosine, alone.cosine)

    def test_a_long_text_is_asked_at_some_queries(self, monkeypatch):
        """Each head at a few queries, drawn at random: the means over those, query by query."""
        monkeypatch.setattr("exptilt.lens.questions.ascent.ASKED", 7)
        hidden, key, write = draw(1, 23, 6, seed=1), draw(1, 2, 15, 3, seed=2), 0.3 * draw(5, 23, 6, seed=3)
        W = draw(5, 6, 3, seed=4)

        def query_at(h):
            return torch.einsum("bnd,hdk->bhnk", h, W)

        def G(head, state):
            scores = 0.5 * (state @ W[head]) @ key[0, 0].T
            return torch.logsumexp(scores, -1)

        key = key[:, :1]
        turns = _turns(5, 23)
        assert turns.shape == (2, 23)
        assert (turns[0] != turns[1]).all()
        found = ascent(query_at, hidden, key, {"scale": 0.5}, write)
        for head in range(5):
            asked = [(t, i) for t in range(2) for i in range(23) if turns[t, i] == head]
            assert len(asked) >= 7
            gains, cosines = [], []
            for _, i in asked:
                state = hidden[0, i].clone().requires_grad_()
                (slope,) = torch.autograd.grad(G(head, state), state)
                cosines.append(float(torch.cosine_similarity(slope, write[head, i], dim=0)))
                gains.append(float(G(head, hidden[0, i] + write[head, i]) - G(head, hidden[0, i])))
            assert float(found.gain[head]) == pytest.approx(np.mean(gains), rel=1e-9)
            assert float(found.cosine[head]) == pytest.approx(np.mean(cosines), rel=1e-9)

    def test_one_head_has_no_baseline(self):
        found = ascent(lambda h: h[:, None], draw(1, 4, 3), draw(1, 1, 5, 3), {}, draw(1, 4, 3))
        assert found.cosine_baseline.isnan().all()


def test_symmetric_and_definite_maps():
    a, b = draw(3, 10, 4), draw(3, 10, 4, seed=1)
    one, half = torch.ones(3, dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(symmetry(a, a), one)
    torch.testing.assert_close(definiteness(a, a), one)
    torch.testing.assert_close(definiteness(a, -a), 0 * one)
    skew = torch.cat([a, b], -1), torch.cat([b, -a], -1)  # M = ab' − ba'
    torch.testing.assert_close(symmetry(*skew), 0 * one)
    swapped = (
        torch.cat([a, b], -1),
        torch.cat([b, a], -1),
    )  # M = ab' + ba': symmetric, as much negative as positive
    torch.testing.assert_close(symmetry(*swapped), one)
    wide = draw(3, 3000, 4), draw(3, 3000, 4, seed=1)
    torch.testing.assert_close(symmetry(*wide), half, atol=0.01, rtol=0)
    torch.testing.assert_close(definiteness(*wide), half, atol=0.05, rtol=0)


def test_linear_link():
    mean, C = draw(2, 60, 4), draw(4, 4, seed=1)
    torch.testing.assert_close(link_r2(mean @ C + 3.0, mean), torch.ones(2, dtype=torch.float64))
    assert (link_r2(draw(2, 60, 4, seed=2), mean) < 0.2).all()  # unrelated
    assert link_r2(mean[:, :15], mean[:, :15]).isnan().all()  # too few to tell


def test_cloud():
    x = draw(4000, 6) * torch.tensor([4.0, 2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64) + 10.0
    found = cloud(x)
    share = np.linalg.eigvalsh(np.cov(x.numpy().T))[::-1]
    np.testing.assert_allclose(found.spread, np.sqrt(share.sum()), rtol=1e-9)
    share = share / share.sum()
    np.testing.assert_allclose(found.spectrum[:6], share, rtol=1e-9)
    np.testing.assert_allclose(found.effective_rank, np.exp(-(share * np.log(share)).sum()), rtol=1e-9)
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    gram = unit @ unit.T
    np.testing.assert_allclose(found.anisotropy, (gram.sum() - 4000) / (4000 * 3999), rtol=1e-9)
    assert abs(found.kurtosis) < 0.3
    assert found.p > 0.001
    heavy = cloud(x.sub(10).sinh())
    assert heavy.p < 1e-6
    assert heavy.kurtosis > 1
    one = cloud(draw(300, 1) * torch.ones(1, 5, dtype=torch.float64))
    np.testing.assert_allclose(one.effective_rank, 1.0, atol=1e-6)
    assert np.isnan(cloud(draw(1, 3)).spread)


def test_holm_keeps_false_alarms_down():
    np.testing.assert_allclose(holm(np.array([0.02, np.nan, 0.01, 0.5])), [0.04, np.nan, 0.03, 0.5])
    rng = np.random.default_rng(0)
    alarms = np.mean([holm(rng.random(20)).min() < 0.05 for _ in range(2000)])
    assert 0.03 < alarms < 0.065


def test_growth():
    x = draw(7, 5)
    assert growth(x, 3 * x) == pytest.approx(3.0)
    assert growth(x, torch.cat([2 * x[:3], 8 * x[3:6], 4 * x[6:]])) == pytest.approx(4.0)


def test_average_and_its_error():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 2, 3)), np.array([1.0, 2.0, 3.0, 1.0, 5.0])
    x[1, 0, 0] = np.nan
    mean, error = average(x, w)
    for place in np.ndindex(2, 3):
        values, weights = [
            np.array(a)
            for a in zip(
                *[(v, u) for v, u in zip(x[(slice(None), *place)], w, strict=True) if v == v], strict=True
            )
        ]
        m, n = np.average(values, weights=weights), len(values)
        assert mean[place] == pytest.approx(m)
        assert error[place] == pytest.approx(
            np.sqrt(n / (n - 1) * ((weights * (values - m)) ** 2).sum()) / weights.sum()
        )
    plain = average(x[:, 1:], np.ones(5))[1]
    np.testing.assert_allclose(plain, x[:, 1:].std(0, ddof=1) / np.sqrt(5))
    assert average(x[:1], w[:1])[1] is None
