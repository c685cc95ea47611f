"""What the user sees while waiting."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from elsa.terminal import Bars, PlainLines, show_figures, show_progress, show_seconds


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines_of(calls, step):
    stream, clock = io.StringIO(), Clock()
    report = PlainLines(stream, clock)
    for stage, done, total, figures in calls:
        report(stage, done, total, figures)
        clock.now += step
    return stream.getvalue().splitlines()


def test_a_long_stage_prints_its_beginning_its_end_and_one_line_in_ten_seconds():
    lines = lines_of([("pretrain", epoch, 100, {"loss": 100.0 - epoch}) for epoch in range(1, 101)], step=1.0)
    assert lines[0].startswith("pretrain 1/100")
    assert lines[-1] == "pretrain 100/100  loss 0  took 1m39s"
    assert len(lines) == 11
    assert [line.split()[1] for line in lines[1:3]] == ["11/100", "21/100"]


def test_the_time_left_follows_from_the_pace_of_this_run_not_of_the_one_it_resumes():
    # Resumed at epoch 50 of 100, one epoch in 20 seconds: at epoch 60, 40 epochs are left.
    lines = lines_of([("pretrain", epoch, 100, {}) for epoch in range(50, 61)], step=20.0)
    assert lines[-1] == "pretrain 60/100  13m20s left"


def test_every_stage_is_announced_however_short_it_is():
    calls = [("embed", 5, 5, {}), ("head", 1, 2, {}), ("head", 2, 2, {}), ("embed", 3, 7, {}), ("embed", 7, 7, {})]
    assert [line.split("  ")[0] for line in lines_of(calls, step=0.1)] == [
        "embed 5/5",
        "head 1/2",
        "head 2/2",
        "embed 3/7",
        "embed 7/7",
    ]


def test_a_stage_that_reports_its_end_twice_prints_it_once():
    assert len(lines_of([("embed", 0, 5, {}), ("embed", 5, 5, {}), ("embed", 5, 5, {})], step=0.1)) == 2


def test_rates_carry_their_unit_and_figures_their_name():
    assert show_figures({"loss": 5.10349, "views/s": 91234.5}) == "loss 5.103  91,234 views/s"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7_260, "2h01m")]
)
def test_durations_are_short(seconds, shown):
    assert show_seconds(seconds) == shown


def test_a_pipe_gets_plain_lines_and_a_terminal_gets_bars():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        with show_progress(stream) as progress:
            progress("pretrain", 3, 10, {"loss": 5.1})
    assert pipe.getvalue() == "pretrain 3/10  loss 5.1\n"
    assert "pretrain" in terminal.getvalue()
    assert "loss 5.1" in terminal.getvalue()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is given back


def test_a_stage_that_begins_again_takes_its_bar_back():
    bars = RichProgress(console=Console(file=io.StringIO()))
    report = Bars(bars)
    for done, total in [(1, 5), (5, 5), (1, 5)]:
        report("embed", done, total, {})
    [task] = bars.tasks
    assert (task.completed, task.total, task.finished) == (1, 5, False)
