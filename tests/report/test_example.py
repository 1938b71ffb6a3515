"""The first page: its numbers against plain numpy, its identities, its text."""

import re

import numpy as np
import pytest

from exptilt.report import example, render


@pytest.fixture(scope="module")
def study():
    return example.compute(seed=0)


def test_numbers_against_plain_numpy(study):
    score = study.beta[:, None] * (study.keys @ study.direction)
    top = score.max(1)
    weight = np.exp(score - top[:, None])
    total = weight.sum(1)
    p = weight / total[:, None]
    mean = (p * score).sum(1)
    expected = {
        "log_normalizer": top + np.log(total),
        "entropy": -(p * np.log(p, where=p > 0, out=np.zeros_like(p))).sum(1),
        "score_mean": mean,
        "score_variance": (p * (score - mean[:, None]) ** 2).sum(1),
        "score_max": top,
        "output": p @ study.keys,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(study, name), values, rtol=1e-10, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(study.key_mass, p[study.shown], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(study.beta[study.shown], example.SHOWN)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_identities_hold(seed):
    *exact, (_, integral) = example.residuals(example.compute(seed=seed))
    assert max(value for _, value in exact) < 1e-11
    assert integral < 1e-5


@pytest.mark.parametrize("field", ["log_normalizer", "entropy", "score_mean", "score_variance", "score_max", "output", "key_mass"])
def test_identities_would_see_an_error(study, field):
    import dataclasses

    wrong = dataclasses.replace(
        study,
        **{field: getattr(study, field) * (1 + 1e-3 * np.sin(np.arange(getattr(study, field).size))).reshape(getattr(study, field).shape)},
    )
    assert max(value for _, value in example.residuals(wrong)) > 1e-5


def test_what_the_page_says_is_so(study):
    assert study.effective_keys[0] == pytest.approx(len(study.keys), rel=1e-2)
    assert (np.diff(study.entropy) < 0).all()
    assert (np.diff(study.score_mean / study.beta) > -1e-12).all()
    assert study.effective_keys[-1] < 3
    assert study.log_normalizer[-1] == pytest.approx(study.score_max[-1], rel=1e-2)


def test_seed_decides(study):
    np.testing.assert_array_equal(example.compute(seed=0).keys, study.keys)
    assert not np.array_equal(example.compute(seed=1).keys, study.keys)


def test_page_and_text(study, tmp_path):
    html = render(example.layout(study))
    assert html.count("<svg") == 7
    assert len(re.findall(r'role="img" aria-label="[^"]{20,}"', html)) == 7
    shown = example.table(study)
    for _, *cells in shown.rows:
        assert len(cells) == 3
        for cell in cells:
            assert f'data-value="{cell!r}"' in html
    text = example.text(study)
    assert len({len(line) for line in text.splitlines()[1:]}) == 1
    assert example.write(study, tmp_path).read_text("utf-8").startswith("<!DOCTYPE html>")
