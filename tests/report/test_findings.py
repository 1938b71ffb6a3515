def test_kinds_that_people_look_for_come_first():
    """Many heads of a kind are no outliers, and were left out for that."""
    study = planted(
        first_token_mass=(0.8,), induction_mass=(0.05, (4, 4), 0.9), score_max=(10.0, (1, 2), 80.0)
    )
    titles = [f.title for f in findings(study)]
    assert titles[:3] == ["Induction heads", "Attention sinks", "Largest scores"]
    assert "48 of 48 heads look mostly at the first token" in findings(study)[1].text


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
