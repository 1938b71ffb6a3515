"""What a run keeps, measures, tabulates and draws."""

import math

import pytest
import torch

from exptilt.dynamics import Flow, clusters, gaussianity
from oracles import dynamics as oracle

F64 = torch.float64


def cloud(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def test_states_are_the_repeated_update():
    points, flow = cloud(12, 3), Flow("whiten", beta=0.8, step=0.6)
    path = flow.run(points, 4)
    state = points
    assert torch.equal(path.states[0], points)
    for step in range(1, 5):
        state = oracle.update(state, "whiten", 0.8, 0.6)
        torch.testing.assert_close(path.states[step], state, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(path.time, 0.6 * torch.arange(5, dtype=F64))


def test_rows_are_what_they_say():
    """Each number of each row by its definition, on the state it belongs to."""
    points, flow = 2 * cloud(2, 9, 3) + 1, Flow("batch", beta=0.5, step=0.7)
    path = flow.run(points, 3)
    for t in range(4):
        for item in range(2):
            x = path.states[t, item]
            assert path.log_normalizer[t, item].item() == pytest.approx(
                float(oracle.slope(x, x, 0.5)[0].mean())
            )
            lengths = [math.dist(p, [0.0] * 3) for p in x.tolist()]
            got = [float(getattr(path.norms, name)[t, item]) for name in ("mean", "smallest", "largest")]
            assert got == pytest.approx([sum(lengths) / 9, min(lengths), max(lengths)])
            covariance = oracle.covariance(x)
            assert path.covariance_trace[t, item].item() == pytest.approx(float(covariance.trace()))
            torch.testing.assert_close(path.spectrum[t, item], torch.linalg.eigvalsh(covariance).flip(0))
            cosines = [
                float(x[i] @ x[j]) / lengths[i] / lengths[j] for i in range(9) for j in range(9) if i != j
            ]
            assert path.mean_cosine[t, item].item() == pytest.approx(sum(cosines) / 72)
            assert path.clusters.count[t, item] == clusters(x).count
            torch.testing.assert_close(path.gaussianity.sliced[t, item], gaussianity(x).sliced)
            if t == 0:
                assert path.growth.expansion[t, item].isnan()
                continue
            before = path.states[t - 1, item]
            ascended = before + 0.7 * oracle.slope(before, before, 0.5)[1]
            grew = [float(value[t, item]) for value in vars(path.growth).values()]
            wanted = [ascended.norm() / before.norm(), x.norm() / ascended.norm()]
            assert grew == pytest.approx([float(value) for value in wanted])


def test_wide_clouds_have_the_same_spectrum():
    x = cloud(4, 7)
    path = Flow(None).run(x, 0)
    torch.testing.assert_close(
        path.spectrum[0], torch.linalg.eigvalsh(oracle.covariance(x)).flip(0), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", [0, 1, 2, 3, 4, 5]), ("last", [5]), (2, [0, 2, 4, 5]), (1, [0, 1, 2, 3, 4, 5]), (9, [0, 5])],
)
def test_what_is_kept(keep, kept):
    points = cloud(7, 2)
    whole, path = Flow("rms").run(points, 5), Flow("rms").run(points, 5, keep=keep)
    assert path.kept.tolist() == kept
    assert torch.equal(path.states, whole.states[kept])
    assert torch.equal(path.last, whole.last)
    assert torch.equal(path.log_normalizer, whole.log_normalizer)


@pytest.mark.parametrize(
    ("every", "rows"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (None, [0, 5]), (7, [0, 5])]
)
def test_what_is_measured(every, rows):
    points = cloud(7, 2)
    whole, path = Flow("rms").run(points, 5), Flow("rms").run(points, 5, measure_every=every)
    assert path.steps.tolist() == rows
    torch.testing.assert_close(path.growth.expansion, whole.growth.expansion[rows], equal_nan=True)
    assert torch.equal(path.norms.mean, whole.norms.mean[rows])


def test_no_steps():
    path = Flow("rms").run(cloud(7, 2), 0)
    assert (path.steps.tolist(), path.kept.tolist()) == ([0], [0])


def test_run_takes_no_gradients():
    points = cloud(5, 2).requires_grad_()
    assert not Flow("sphere").run(points, 2).last.requires_grad


def test_frame():
    path = Flow("batch").run(cloud(2, 3, 8, 2), 3, measure_every=2)
    frame = path.to_frame()
    assert len(frame) == 3 * 6
    assert frame.columns[:4].tolist() == ["step", "time", "batch_0", "batch_1"]
    row = frame[(frame.step == 2) & (frame.batch_0 == 1) & (frame.batch_1 == 2)].iloc[0]
    assert row.norm_largest == pytest.approx(float(path.norms.largest[1, 1, 2]))
    assert row.spectrum_1 == pytest.approx(float(path.spectrum[1, 1, 2, 1]))
    assert row.cluster_count == path.clusters.count[1, 1, 2]
    assert row.kurtosis_p == pytest.approx(float(path.gaussianity.kurtosis_p[1, 1, 2]))
    assert Flow("batch").run(cloud(8, 2), 3).to_frame().shape[0] == 4


def test_plot(tmp_path):
    figure = Flow("whiten").run(cloud(2, 20, 3), 4).plot()
    assert len(figure.axes) == 6
    effective = figure.axes[4].get_lines()[2].get_ydata()
    assert len(effective) == 5
    figure.savefig(tmp_path / "path.png", dpi=30)
    Flow("sphere").ode(cloud(9, 2), 0.5, samples=3).plot().savefig(tmp_path / "ode.png", dpi=30)


def test_plot_of_points_that_run_off():
    path = Flow(None).run(cloud(20, 3), 40)
    axes = path.plot().axes
    assert [a.get_yscale() for a in axes[:3]] == ["log"] * 3
    low, high = axes[2].get_ylim()
    assert low < path.spectrum.min() < path.spectrum.max() < high
    torch.testing.assert_close(torch.tensor(axes[2].get_lines()[1].get_ydata()), path.spectrum[:, 1])
    assert list(axes[0].get_lines()[0].get_ydata()) == path.log_normalizer.tolist()
    names = {line.get_label(): list(line.get_ydata()) for line in axes[1].get_lines() + axes[5].get_lines()}
    assert names["largest"] == path.norms.largest.tolist()
    assert names["smallest"] == path.norms.smallest.tolist()
    assert names["ascent"][1:] == path.growth.expansion[1:].tolist()


@pytest.mark.filterwarnings("error")
def test_plot_of_one_place(tmp_path):
    figure = Flow("sphere").run(torch.ones(5, 3, dtype=F64), 2).plot()
    figure.savefig(tmp_path / "one.png", dpi=30)
    words = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert words[2] == ["one point: no spread"]
    assert words[3] == ["nothing to test: one point, or too few"]
    assert figure.axes[3].get_legend() is None
    assert figure.axes[4].get_ylim()[0] > 0.5
    assert Flow("sphere").run(cloud(5, 2), 0).plot().axes[5].texts[0].get_text() == "no steps"


def test_plot_of_a_continuous_flow_has_no_steps():
    smooth = Flow("sphere").ode(cloud(5, 2), 3.0, samples=5, keep=2)
    assert smooth.plot().axes[5].texts[0].get_text() == "continuous: no steps"


def test_large_cloud_in_little_memory():
    """3000 points: a matrix of scores would be 72 MB of float64; torch's own count of what is allocated
    stays far below.
    """
    points = cloud(3000, 8)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        Flow("layer").run(points, 1, keep="last", measure_every=None)
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert largest < 36e6
