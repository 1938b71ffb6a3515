"""TrainingMonitor in a plain loop: what is read, when, where it goes, and when it warns."""

import csv
import math
import sys
import types
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import exptilt as xt
from exptilt._support.errors import ArgumentError, BackendError, ExptiltWarning
from exptilt.lens.heads.statistics import FIELDS, text_statistics
from exptilt.lens.studying.definitions import HEADS
from exptilt.lens.training.logs import COLUMNS, STATISTICS, CsvLog, TensorBoardLog
from exptilt.lens.training.readings import HeadReading, read_heads
from exptilt.lens.watching.record import _COLUMNS


def bert():
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertModel(config)


def batch(items, length, seed, padded=0):
    tokens = torch.randint(3, 50, (items, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, length - padded :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def collect():
    got = []
    return got, lambda step, readings: got.append((step, list(readings)))


class Small(nn.Module):
    """One layer of attention whose scores are set by hand."""

    def __init__(self, heads=2):
        super().__init__()
        self.inner = nn.MultiheadAttention(4 * heads, heads, bias=False, batch_first=True)
        self.gain = [1.0] * heads

    def forward(self, x):
        with torch.no_grad():
            identity = torch.eye(self.inner.embed_dim)
            for head, gain in enumerate(self.gain):
                identity[4 * head : 4 * head + 4] *= gain
            self.inner.in_proj_weight.copy_(torch.cat([identity, torch.eye(self.inner.embed_dim), identity]))
        return self.inner(x, x, x, need_weights=False)[0]


def test_a_reading_is_over_all_real_queries_of_all_calls():
    model = bert().eval()
    batches = [batch(3, 12, 1, padded=5), batch(2, 7, 2)]
    rows = {}

    def observe(call):
        real = (
            torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool)
            if call.real_query is None
            else call.real_query
        )
        for name in ("score_max", "entropy", "log_normalizer"):
            rows.setdefault((call.layer, name), []).append(getattr(call.tilted, name).transpose(1, 2)[real])

    with torch.no_grad():
        with xt.lens.watch(model, observe=observe):
            for one in batches:
                model(**one)
        got, log = collect()
        monitor = xt.lens.TrainingMonitor(model, log=log)
        with monitor.step():
            for one in batches:
                model(**one)
    ((step, readings),) = got
    assert step == 0
    assert [(r.layer, r.head) for r in readings] == [(layer, head) for layer in range(2) for head in range(4)]
    assert readings == monitor.readings
    for r in readings:
        every = {
            name: torch.cat(rows[r.layer, name])[:, r.head].double()
            for name in ("score_max", "entropy", "log_normalizer")
        }
        assert r.queries == len(every["entropy"]) == 3 * 12 - 5 + 2 * 7
        assert r.name == f"encoder.layer.{r.layer}.attention.self"
        assert r.score_max == every["score_max"].max().item()
        assert r.entropy == pytest.approx(every["entropy"].mean().item(), rel=1e-5)
        assert r.log_normalizer == pytest.approx(every["log_normalizer"].mean().item(), rel=1e-5)


def test_no_calls_no_readings():
    assert read_heads(xt.lens.Record(), {}) == []


def test_every_kth_step_is_watched_and_training_is_the_same():
    losses, ends = {}, {}
    for watched in (False, True):
        model = bert()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        got, log = collect()
        monitor = xt.lens.TrainingMonitor(model, every=3, log=log)
        before = model.config._attn_implementation
        for n in range(7):
            with monitor.step() if watched else warnings.catch_warnings():
                loss = model(**batch(2, 8, n)).last_hidden_state.square().mean()
                loss.backward()
            assert model.config._attn_implementation == before
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(n, []).append(loss.item())
        ends[watched] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert [step for step, _ in got] == [0, 3, 6]
    assert len({tuple(r.entropy for r in readings) for _, readings in got}) == 3
    for with_out, with_in in losses.values():
        assert with_in == pytest.approx(with_out, rel=1e-5)
    torch.testing.assert_close(ends[True], ends[False], rtol=1e-4, atol=1e-6)


def test_step_numbers_may_be_given():
    model = Small()
    got, log = collect()
    monitor = xt.lens.TrainingMonitor(model, every=4, log=log)
    for number in (8, None, None, None, None, 20):
        with monitor.step(number):
            model(torch.randn(1, 3, 8))
    assert [step for step, _ in got] == [8, 12, 20]


def test_an_exception_leaves_the_model_as_it_was():
    model = bert()
    got, log = collect()
    monitor = xt.lens.TrainingMonitor(model, log=log)
    before = model.config._attn_implementation

    def stumble():
        with monitor.step():
            model(**batch(1, 4, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks
    assert got == []


def test_warnings_come_once_a_head_until_it_recovers():
    model = Small()
    x = torch.eye(8)[None] * 2
    monitor = xt.lens.TrainingMonitor(model, every=1, log=lambda *_: None, max_logit=10.0, min_entropy=0.5)
    # Head 1 sees scores of gain · 4 / √4 on its diagonal for the four rows that are its own, none elsewhere:
    # mean entropy of 8 rows falls.
    told = []
    for gain in (1.0, 6.0, 7.0, 1.0, 6.0):
        model.gain = [1.0, gain]
        with warnings.catch_warnings(record=True) as seen, monitor.step():
            warnings.simplefilter("always")
            model(x)
        told.append([str(w.message) for w in seen])
        assert all(w.category is ExptiltWarning for w in seen)
    assert [len(texts) for texts in told] == [0, 1, 0, 0, 1]
    assert told[1] == ["TrainingMonitor: step 1, layer 0 (inner), head 1: largest logit 12 has passed 10"]
    assert "step 4" in told[4][0]


def test_collapse_warns_with_layer_and_head():
    model = Small()
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)).sign() * torch.tensor(
        [1, 1, 1, 1, 1, 0.1, 0.1, 0.1]
    )
    monitor = xt.lens.TrainingMonitor(model, every=1, log=lambda *_: None, max_logit=None, min_entropy=1.0)
    model.gain = [300.0, 0.01]
    with pytest.warns(ExptiltWarning) as seen, monitor.step():
        model(x)
    (only,) = seen
    entropy = monitor.readings[0].entropy
    place = "TrainingMonitor: step 0, layer 0 (inner), head 0"
    assert str(only.message) == f"{place}: entropy has collapsed to {entropy:.4g} nats, below 1"
    quiet = xt.lens.TrainingMonitor(model, every=1, log=lambda *_: None, max_logit=None, min_entropy=None)
    with quiet.step():
        model(x)


def test_what_is_not_finite_is_told_of():
    model = Small()
    model.gain = [1.0, math.nan]
    monitor = xt.lens.TrainingMonitor(model, every=1, log=lambda *_: None)
    with (
        pytest.warns(ExptiltWarning, match=r"layer 0 \(inner\), head 1: scores are no longer finite") as seen,
        monitor.step(),
    ):
        model(torch.ones(1, 3, 8))
    assert len(seen) == 1
    assert [math.isinf(r.score_max) for r in monitor.readings] == [False, True]


def readings(*values):
    return [HeadReading(0, "a, b", head, 10, value, value / 2, -value) for head, value in enumerate(values)]


def rows(folder):
    with (folder / "attention.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv(tmp_path):
    folder = tmp_path / "new" / "place"
    log = CsvLog(folder)
    log(0, readings(1.5, math.inf))
    log(50, readings(2.25, 0.1))
    got = rows(folder)
    assert list(got[0]) == list(COLUMNS)
    assert [
        (
            r["step"],
            r["name"],
            r["head"],
            float(r["score_max"]),
            float(r["entropy"]),
            float(r["log_normalizer"]),
        )
        for r in got
    ] == [
        ("0", "a, b", "0", 1.5, 0.75, -1.5),
        ("0", "a, b", "1", math.inf, math.inf, -math.inf),
        ("50", "a, b", "0", 2.25, 1.125, -2.25),
        ("50", "a, b", "1", 0.1, 0.05, -0.1),
    ]
    CsvLog(folder)(100, readings(3.0))  # a run that goes on
    assert [r["step"] for r in rows(folder)] == ["0", "0", "50", "50", "100"]


def test_csv_goes_on_after_a_crash(tmp_path):
    log = CsvLog(tmp_path)
    for step in (0, 50, 100):
        log(step, readings(1.0, 2.0))
    path = tmp_path / "attention.csv"
    path.write_text(path.read_text()[:-9])  # the last line is cut short
    with pytest.warns(ExptiltWarning, match=r"begins at step 50; took 4 lines .* out of"):
        CsvLog(tmp_path)(50, readings(7.0, 8.0))
    assert [(r["step"], r["score_max"]) for r in rows(tmp_path)] == [
        ("0", "1.0"),
        ("0", "2.0"),
        ("50", "7.0"),
        ("50", "8.0"),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["attention.csv"]


def test_csv_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "attention.csv").write_text("time,price\n1,2\n")
    with pytest.raises(ArgumentError, match="another program's file"):
        CsvLog(tmp_path)(0, readings(1.0))
    assert (tmp_path / "attention.csv").read_text() == "time,price\n1,2\n"


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for step in (0, 50, 100):
        log(step, readings(1.5 + step, 2.5 + step))
    log.close()
    again = TensorBoardLog(tmp_path)  # from a checkpoint at 50
    again(50, readings(7.0, 8.0))
    again.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert len(found.Tags()["scalars"]) == 6
    for statistic, factor in (("score_max", 1.0), ("entropy", 0.5), ("log_normalizer", -1.0)):
        for head in range(2):
            events = found.Scalars(f"attention_{statistic}/layer_00_head_{head:02d}")
            assert [(e.step, e.value) for e in events] == [
                (0, factor * (1.5 + head)),
                (50, factor * (7.0 + head)),
            ]


def test_weights_and_biases(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BackendError, match="pip install wandb"):
        xt.lens.TrainingMonitor(Small(), log="wandb")
    done = []
    fake = types.SimpleNamespace(
        run=None,
        init=lambda **given: done.append(("init", given)),
        define_metric=lambda name, **given: done.append((name, given)),
        log=lambda values: done.append(("log", values)),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    model = Small()
    monitor = xt.lens.TrainingMonitor(model, every=1, log="wandb", folder=tmp_path)
    for _ in range(2):
        with monitor.step():
            model(torch.ones(1, 3, 8))
    assert [name for name, _ in done] == [
        "init",
        "attention_score_max/*",
        "attention_entropy/*",
        "attention_log_normalizer/*",
        "log",
        "log",
    ]
    assert done[0] == ("init", {"dir": str(tmp_path)})
    assert done[1][1] == {"step_metric": "attention_step"}
    assert [values["attention_step"] for name, values in done if name == "log"] == [0, 1]
    assert done[-1][1]["attention_entropy/layer_00_head_01"] == monitor.readings[1].entropy
    assert len(done[-1][1]) == 7
    done.clear()
    fake.run = object()  # started by someone else
    other = xt.lens.TrainingMonitor(model, every=1, log="wandb", folder=tmp_path)
    with other.step():
        model(torch.ones(1, 3, 8))
    assert "init" not in [name for name, _ in done]


def test_files_appear_only_when_there_is_something_to_write(tmp_path):
    monitor = xt.lens.TrainingMonitor(Small(), log="csv", folder=tmp_path / "log")
    assert not (tmp_path / "log").exists()
    with monitor.step():
        monitor.model(torch.ones(1, 3, 8))
    assert len(rows(tmp_path / "log")) == 2
    monitor.close()


def test_bad_model():
    with pytest.raises(ArgumentError, match="model is a str"):
        xt.lens.TrainingMonitor("gpt2")
    monitor = xt.lens.TrainingMonitor(nn.Linear(2, 2), log=lambda *_: None)
    with pytest.warns(ExptiltWarning, match="no reading of this step .NothingSeenError"), monitor.step():
        monitor.model(torch.ones(1, 2))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        monitor.nothing  # noqa: B018


def test_record_study_and_monitor_tell_one_number_by_one_name():
    torch.manual_seed(0)
    layer, x, calls = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(1, 10, 16), []
    with torch.no_grad(), xt.lens.watch(layer, key_mass=True, observe=calls.append) as seen:
        layer(x, x, x, need_weights=False)
    (call,) = calls
    text = text_statistics(call.query, call.key, call.options, call.tilted).by_name
    known = [name for name in FIELDS if name not in ("relative_queries", "log_normalizer_variance")]
    assert set(known) < set(_COLUMNS)
    for name in known:
        torch.testing.assert_close(
            torch.tensor(seen.record.by_head(name)[0]), text[name], rtol=1e-5, atol=1e-6
        )
    assert set(STATISTICS) <= set(FIELDS) & set(HEADS)
    for head, reading in enumerate(read_heads(seen.record, {0: ""})):
        for name in STATISTICS:
            assert getattr(reading, name) == pytest.approx(float(text[name][head]), rel=1e-5)


def test_a_monitor_never_ends_a_training_run(tmp_path):
    """Neither a log that fails, nor a step without attention, nor a model that cannot be watched."""
    model, x = Small(), torch.randn(1, 3, 8)

    def broken(step, readings):
        raise OSError("No space left on device")

    monitor = xt.lens.TrainingMonitor(model, every=1, log=broken)
    with pytest.warns(ExptiltWarning, match=r"OSError: No space left"), monitor.step():
        model(x)
    assert len(monitor.readings) == 2
    with pytest.warns(ExptiltWarning, match="NothingSeenError"), monitor.step():
        pass
    with pytest.raises(ZeroDivisionError), monitor.step():
        raise ZeroDivisionError  # an error of the training itself is not the monitor's


@pytest.mark.parametrize("inside", [True, False])
def test_a_monitor_of_a_compiled_model(inside):
    model, x = Small(), torch.randn(1, 3, 8)
    compiled = torch.compile(model, backend="eager")
    got, log = collect()
    monitor = xt.lens.TrainingMonitor(model if inside else compiled, every=2, log=log)
    for _ in range(3):
        with monitor.step():
            compiled(x)
    assert [(step, len(readings)) for step, readings in got] == [(0, 2), (2, 2)]
