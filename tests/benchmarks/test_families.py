"""What the benchmark of families shows, and the rival in another process.

Its answers arrive, its end is told.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import families as benchmark
from rivals import efax_process


def test_table_shows_everyone_and_the_best_rival() -> None:
    times = {
        "KL: Gamma": {"exptilt": {"best": 0.003}, "torch": {"best": 0.006}, "efax": {"best": 0.012}},
        "Empirical: natural": {
            "exptilt": {"best": 0.1},
            "SciPy L-BFGS": {"best": 0.4},
            "SciPy Newton-CG": {"best": 0.2},
        },
        "maximum entropy: contradictory": {"exptilt": {"best": 2.0}},
    }
    header, rows = benchmark.time_table({"times": times})
    assert header[1:-1] == list(benchmark.SHOWN)
    assert rows[0] == ["KL: Gamma", "3", "6", "", "12", "", "0.50"]
    assert rows[1] == ["Empirical: natural", "100", "", "200", "", "", "0.50"]
    assert rows[2][-1] == ""


def test_worker_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that speaks the worker's language."""
    (tmp_path / "efax_worker.py").write_text(
        "import sys, numpy as np\n"
        "data = np.load(sys.argv[1])\n"
        "print('efax\\t1.0', flush=True)\n"
        "print('KL: Gamma\\tKL: Beta', flush=True)\n"
        "for line in sys.stdin:\n"
        "    order, name, *where = line.rstrip().split('\\t')\n"
        "    if name == 'KL: Beta': print('ValueError: no', flush=True); continue\n"
        "    if order == 'save': np.save(where[0], 2 * data['first Gamma'])\n"
        "    print('done', flush=True)\n"
    )
    monkeypatch.setattr(efax_process, "__file__", str(tmp_path / "efax_process.py"))
    with efax_process.Efax(Path(sys.executable), {"first Gamma": np.arange(6.0).reshape(3, 2)}, 1) as worker:
        assert worker.names == ["KL: Gamma", "KL: Beta"]
        np.testing.assert_array_equal(worker.answer("KL: Gamma"), 2 * np.arange(6.0).reshape(3, 2))
        worker.case("KL: Gamma")()
        with pytest.raises(RuntimeError, match="ValueError: no"):
            worker.case("KL: Beta")()


def test_worker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "efax_worker.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(efax_process, "__file__", str(tmp_path / "efax_process.py"))
    with pytest.raises(RuntimeError, match="exit code 3"):
        efax_process.Efax(Path(sys.executable), {}, 1)
