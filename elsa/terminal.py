"""Progress on stderr: a live display on a terminal, plain lines in a log file or a pipe."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from elsa.progress import Progress

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A progress callback that draws bars while the block runs if stderr is a terminal, and prints lines if not."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainLines(stream)
        return
    columns = [
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]left"),
        TimeRemainingColumn(),
    ]
    with RichProgress(*columns, console=Console(file=stream), refresh_per_second=4) as bars:
        yield Bars(bars)


class Bars:
    """One live bar per stage; a stage that begins again takes its bar back."""

    def __init__(self, bars: RichProgress):
        self._bars = bars
        self._tasks: dict[str, tuple[TaskID, int]] = {}

    def __call__(self, stage: str, done: int, total: int, figures: dict[str, float]) -> None:
        task, before = self._tasks.get(stage) or (self._bars.add_task(stage, total=total, figures=""), 0)
        if done < before:
            self._bars.reset(task)
        self._bars.update(task, completed=done, total=total, figures=show_figures(figures))
        self._tasks[stage] = (task, done)


class PlainLines:
    """A line when a stage begins, when it ends, and at most every ten seconds between: a day's log stays readable."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream, clock
        self._began: dict[str, tuple[float, int]] = {}  # a resumed stage begins at its checkpoint, not at 0
        self._before: dict[str, int] = {}
        self._last_line = float("-inf")

    def __call__(self, stage: str, done: int, total: int, figures: dict[str, float]) -> None:
        now = self._clock()
        begins = stage not in self._began or done < self._before[stage]
        if begins:
            self._began[stage] = (now, done)
        ends = done >= total and self._before.get(stage) != done
        self._before[stage] = done
        if begins or ends or now - self._last_line >= SECONDS_BETWEEN_LINES:
            began, done_then = self._began[stage]
            words = [f"{stage} {done}/{total}", show_figures(figures)]
            if ends:
                words.append(f"took {show_seconds(now - began)}")
            elif done > done_then:
                words.append(f"{show_seconds((now - began) / (done - done_then) * (total - done))} left")
            print("  ".join(word for word in words if word), file=self._stream, flush=True)
            self._last_line = now


def show_figures(figures: dict[str, float]) -> str:
    """`loss 5.103  91,000 views/s`: a rate carries its unit behind it, everything else its name before it."""
    return "  ".join(
        f"{value:,.0f} {name}" if name.endswith("/s") else f"{name} {value:.4g}" for name, value in figures.items()
    )


def show_seconds(seconds: float) -> str:
    """`12s`, `3m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
