"""Threads: the caller's setting is kept, forked workers and concurrent callers are safe, the first call says that it compiles."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import exptilt as xt
from exptilt._support import threads


def example(seed=0, length=300):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 4, length, 32, generator=g) for _ in range(3)]


@pytest.fixture(params=["team", "pool"])
def team(request, monkeypatch):
    """Both kinds of threads."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "_on_team", lambda labour, count: False)
    elif threads._open_team() is None:
        pytest.fail("torch's OpenMP team was not found; every x86 Linux build of torch has one")
    return request.param


@pytest.mark.parametrize("setting", [1, 2, 3])
def test_setting_is_used_and_kept(setting, team, monkeypatch):
    before = torch.get_num_threads()
    seen = set()
    inner = threads.run_chunks

    def spy(work, total, scratch, threads=None):
        meeting = threading.Barrier(setting)

        def spied(start, stop, own):
            if threading.get_ident() not in seen:
                seen.add(threading.get_ident())
                meeting.wait(60)  # nobody goes on before all have come
            work(start, stop, own)

        inner(spied, total, scratch, threads=threads)

    monkeypatch.setattr("exptilt.tilting.cpu.launch.run_chunks", spy)
    try:
        torch.set_num_threads(setting)
        expected = xt.attend(*example(length=2000), backend="tiled").output
        assert torch.allclose(xt.attend(*example(length=2000)).output, expected, atol=1e-5)
        assert torch.get_num_threads() == setting
    finally:
        torch.set_num_threads(before)
    assert len(seen) == setting


def test_two_python_threads_at_once(team):
    inputs = [example(seed) for seed in range(6)]
    expected = [xt.attend(*x).output for x in inputs]
    found = [[None] * 20 for _ in inputs]

    def repeat(which):
        for i in range(20):
            found[which][i] = xt.attend(*inputs[which]).output

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for results, output in zip(found, expected, strict=True):
        assert all(torch.equal(x, output) for x in results)


class Attending(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return xt.attend(*example(i)).output


def test_forked_workers():
    """After the parent has used its own pool, workers forked from it must still work."""
    expected = [xt.attend(*example(i)).output for i in range(4)]
    loader = DataLoader(Attending(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    for found, output in zip(loader, expected, strict=True):
        assert torch.allclose(found, output, atol=1e-6)


def test_an_error_in_a_worker_is_raised(team):
    def work(start, stop, own):
        if start >= 3:
            raise RuntimeError("broken chunk")

    with pytest.raises(RuntimeError, match="broken chunk"):
        threads.run_chunks(work, 16, lambda: None, threads=2)


def test_first_call_says_that_it_compiles_and_the_next_process_does_not(tmp_path):
    program = "import torch, exptilt as xt; x = torch.randn(1, 4, 8); print(float(xt.attend(x, x, x).entropy.sum()) > 0)"
    runs = []
    for _ in range(2):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        runs.append(run)
    assert [run.stdout for run in runs] == ["True\n"] * 2
    assert "compiling the forward kernel for float32" in runs[0].stderr
    assert "compiling" not in runs[1].stderr


def test_falling_back_to_tiled_is_said_once(monkeypatch):
    from exptilt._support.errors import ExptiltWarning
    from exptilt.tilting import operators

    operators._say_once.cache_clear()
    monkeypatch.delattr("exptilt.tilting.cpu.launch.tangent")
    x = torch.randn(1, 4, 8)

    def push():
        return torch.func.jvp(lambda y: xt.attend(y, x, x).output, (x,), (x,))[1]

    with pytest.warns(ExptiltWarning, match="'cpu' backend has no tangent sweep; 'tiled'"):
        first = push()
    assert torch.equal(push(), first)  # a second warning would be an error here
    operators._say_once.cache_clear()
