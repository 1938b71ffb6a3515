"""Findings: what stands out is told, with its number; in a model of nothing but noise nothing does."""

import dataclasses

import numpy as np
import torch
import transformers as tf

import exptilt as xt
from exptilt.report.study.findings import cautions, findings
from report.made import HOSTILE, make_study


def planted(**values):
    """A made study of 6 × 8 heads without checkpoints, whose heads are alike but for what is planted."""
    study, rng = make_study(6, 8, steps=()), np.random.default_rng(0)
    words = study.heads["entropy"]

    def measure(centre, place=None, value=None, unit=""):
        x = centre * (1 + 0.02 * rng.standard_normal((6, 8)))
        if place is not None:
            x[place] = value
        return dataclasses.replace(words, value=x, error=0.01 * x, unit=unit)

    heads = {name: measure(*given) for name, given in values.items()}
    return dataclasses.replace(study, heads=heads, training=None)


def test_the_farthest_comes_first():
    study = planted(
        entropy=(2.0, (1, 1), 1.2, "nats"),
        effective_keys=(8.0, (1, 1), 3.0),
        score_max=(10.0, (1, 2), 80.0),
        previous_mass=(0.1, (3, 4), 0.9),
        write_size=(0.2,),
    )
    found = findings(study)
    assert [f.place for f in found] == [(3, 4), (1, 2), (1, 1)]
    assert found[1].z > found[2].z
    texts = {f.place: f.text for f in found}
    assert "1 of 48 heads looks mostly at the token before" in texts[3, 4]
    assert "90.00 ± 0.90 %" in texts[3, 4]
    assert "has scores up to 80.00 ± 0.80" in texts[1, 2]
    assert "looks at 3 keys in effect" in texts[1, 1]
    assert found[0].anchor.startswith("L")


def test_what_holds_of_all_heads_is_told_where_little_else_is():
    study = planted(score_max=(10.0, (1, 2), 80.0), write_size=(0.2,))
    assert [f.place for f in findings(study)] == [(1, 2), None]
    assert findings(study)[1].text.startswith("No head is dead")


def test_noise_has_no_findings():
    study = planted(entropy=(2.0,), effective_keys=(8.0,), score_max=(10.0,), write_size=(0.2,))
    assert findings(study)[0].text == "No head stands out from the others."
    assert all(f.z == 0 for f in findings(study))


def test_a_dead_head_is_told_of():
    study = planted(entropy=(2.0,), write_size=(0.2, (2, 2), 1e-4))
    assert "1 of 48 heads is dead: layer 2 head 2" in findings(study)[0].text


def test_training():
    study = make_study()
    curve = np.full((9, 4, 4), 2.0) + 0.01 * np.random.default_rng(0).standard_normal((9, 4, 4))
    curve[5:, 1, 1] = 0.2
    tops = np.full((9, 4, 4), 10.0)
    tops[-1, 2, 3] = 15.0
    training = dataclasses.replace(study.training, heads={"entropy": curve, "score_max": tops})
    texts = [f.text for f in findings(dataclasses.replace(study, training=training))]
    assert any("entropy of layer 1 head 1 fell from" in t and "between step 30 and 100" in t for t in texts)
    assert any("grew by 50 % between step 1000 and 3000, to 15 in layer 2 head 3" in t for t in texts)


def test_cautions():
    study = make_study()
    assert cautions(dataclasses.replace(study, text_facts={"tokens": 1000, "unknown tokens": 3})) == []
    few, unknown = cautions(dataclasses.replace(study, text_facts={"tokens": 20, "unknown tokens": 15}))
    assert few.startswith("Only 20 tokens")
    assert unknown.startswith("75 % of the tokens are unknown")


def test_notebooks_show_records_studies_and_heads():
    study = make_study()
    assert "made &lt;b&gt;up&lt;/b&gt;: 4 layers of 4 heads" in study._repr_html_()
    shown = "".join(detail._repr_html_() for detail in study.details)
    assert HOSTILE not in shown
    assert "<svg" in shown
    model = tf.GPT2Model(tf.GPT2Config(vocab_size=61, n_embd=32, n_layer=7, n_head=4)).eval()
    with torch.no_grad(), xt.lens.watch(model) as seen:
        model(torch.arange(9)[None])
    shown = seen.record._repr_html_()
    assert shown.count("<tr>") == 25
    assert "7 layers of 4 heads, the first 24 shown" in shown


def test_kinds_that_people_look_for_come_first():
    """Many heads of a kind are no outliers, and were left out for that."""
    study = planted(
        first_token_share=(0.8,), induction_mass=(0.05, (4, 4), 0.9), score_max=(10.0, (1, 2), 80.0)
    )
    titles = [f.title for f in findings(study)]
    assert titles[:3] == ["Induction heads", "Attention sinks", "Largest scores"]
    assert "48 of 48 heads look more at the first token than at" in findings(study)[1].text


def test_a_finding_needs_a_least_effect():
    """Heads of random weights are alike to a thousandth: the farthest is far by z, and by nothing else."""
    study = planted(entropy=(5.52,), effective_keys=(250.0,), score_max=(0.5,), write_size=(1e-3,))
    rng = np.random.default_rng(0)
    for name, centre in (("entropy", 5.52), ("effective_keys", 250.0), ("score_max", 0.5)):
        value = centre * (1 + 1e-4 * rng.standard_normal((6, 8)))
        value[1, 1] = centre * (0.99 if name != "score_max" else 1.01)
        heads = {**study.heads, name: dataclasses.replace(study.heads[name], value=value, error=1e-6 * value)}
        study = dataclasses.replace(study, heads=heads)
    found = findings(study)
    assert found[0].text == "No head stands out from the others."
    assert all(f.place is None for f in found)
