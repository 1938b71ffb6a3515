"""Progress where there is no terminal: a line now and then, and nothing where nobody asks."""

import time

from exptilt._support.progress import announce_if_slow, told_in_lines, track


def test_lines_say_what_is_done_and_how_far(capsys):
    seen = []

    def until(text):
        ends = time.monotonic() + 60
        while not any(text in said for said in seen) and time.monotonic() < ends:
            time.sleep(0.01)
            seen.append(capsys.readouterr().err)
        assert any(text in said for said in seen)

    with told_in_lines("exptilt report", every=0.01):
        until("exptilt report (")
        with announce_if_slow("Loading the model ...", after=600):
            until("Loading the model (")
        for number in track(range(3), "studying"):
            if number == 1:
                until("studying: 1 of 3, about ")


def test_without_being_asked_there_are_no_lines(capsys):
    assert list(track(iter(range(3)), "studying")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
