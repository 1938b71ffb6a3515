"""Threads: the caller's setting is kept, forked workers and concurrent callers are safe."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import exptilt as xt
from exptilt._support import threads as regions
from exptilt.tilting.backends import layout


def example(seed=0, length=300):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 4, length, 32, generator=g) for _ in range(3)]


@pytest.fixture(params=["team", "pool"])
def team(request, monkeypatch):
    """Both kinds of threads, two of them unless a test says otherwise."""
    if request.param == "pool":
        monkeypatch.setattr(regions, "team", lambda: None)
    elif regions.team() is None:
        pytest.skip("this build of torch has no GNU OpenMP team to join")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("setting", [1, 2, 3])
def test_setting_is_used_and_kept(setting, team, monkeypatch):
    asked = []

    def spy(address, argument, threads):
        asked.append(threads)
        regions.run_region(address, argument, threads)

    monkeypatch.setattr(layout, "run_region", spy)
    torch.set_num_threads(setting)
    expected = xt.attend(*example(length=700), backend="tiled").output
    assert torch.allclose(xt.attend(*example(length=700)).output, expected, atol=1e-5)
    assert torch.get_num_threads() == setting
    assert asked == ([setting] if setting > 1 else [])  # one thread: the sweep is called directly


def test_team_and_pool_do_the_same(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = xt.attend(*example(length=700), key_mass=True)
        monkeypatch.setattr(regions, "team", lambda: None)
        second = xt.attend(*example(length=700), key_mass=True)
    finally:
        torch.set_num_threads(before)
    for name in ("output", "log_normalizer", "entropy", "key_mass"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


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
    """After the parent has used its own threads, workers forked from it must still work."""
    expected = [xt.attend(*example(i)).output for i in range(4)]
    loader = DataLoader(
        Attending(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for found, output in zip(loader, expected, strict=True):
        assert torch.allclose(found, output, atol=1e-6)


FORKED = """
import os, torch, exptilt
torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 32)
# torch's threads are awake; nobody has attended yet
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q).numpy()
child = os.fork()
if child == 0:  # torch's own operations would hang here
    found = exptilt.attend(q, q, q).output.numpy()
    os._exit(0 if abs(found - expected).max() < 1e-4 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_before_the_first_call():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


FORK = """
import os, sys, threading
import numpy as np
import torch
import exptilt as xt
torch.set_num_threads(2)
torch.ones(10**7).sum()
x = torch.randn(600, 600)
x @ x
{before}
for n in (8, 700):
    child = os.fork()
    if child == 0:
        q = torch.randn(4, n, 16)
        a = xt.attend(q, q, q, causal=True)
        os._exit(0 if np.isfinite(a.output.numpy()).all() else 3)  # torch's own threads hang in a child
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    "before", ["", "xt.attend(x[None], x[None], x[None])"], ids=["never attended", "attended"]
)
def test_a_forked_child_attends(before):
    """The parent used torch's threads, then forks; a child that hangs is killed after a minute and a half.

    In such a child torch's own parallel loops hang too (a sum of 10⁷ numbers does), so attend must not run
    any there.
    """
    script = FORK.format(before=before)
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, text = run.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        pytest.fail("attend hangs in a forked child")
    assert run.returncode == 0, text.decode()
