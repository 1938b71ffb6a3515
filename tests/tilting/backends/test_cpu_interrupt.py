"""Ctrl-C while kernels run: it is raised, whenever it comes."""

import signal

import pytest
import torch

import exptilt as xt


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timer that sends signals")
@pytest.mark.parametrize("length", [32, 256])
def test_a_signal_is_never_lost(length):
    """A signal that Python handles while it enters a callback from C is printed as "ignored" and lost."""
    handled = raised = 0

    def interrupt(*_):
        nonlocal handled
        handled += 1
        raise KeyboardInterrupt

    points = torch.randn(2, 4, length, 16, generator=torch.Generator().manual_seed(0))
    threads, before = torch.get_num_threads(), signal.signal(signal.SIGALRM, interrupt)
    try:
        torch.set_num_threads(2)
        xt.attend(points, points, points)
        while handled < 60:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-3 + 1e-4 * (handled % 10))
                while handled == raised:
                    xt.attend(points, points, points)
                break  # handled, and not raised
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_num_threads(threads)
    assert raised == handled == 60
