"""The plots of a report as PNG and SVG files, for slides and papers: the same numbers, drawn by matplotlib."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from elsa.errors import UserError
from elsa.output import check_writable, write_whole
from elsa.report.chart import Chart
from elsa.report.histogram import BINS, score_range
from elsa.report.page import Report

COLOURS = {"normal": "#2f7d6d", "anomaly": "#c8432b", "unlabelled": "#7c8793", "accent": "#20506b"}


def check_plots(folder: Path) -> None:
    """Refuse before the work what could not be drawn or written after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plots needs matplotlib: pip install elsa[report]") from error
    check_writable(folder / "scores.png", option="--plots")


def write_plots(report: Report, folder: Path) -> list[str]:
    """Write every plot of the report as NAME.png and NAME.svg; the names."""
    from matplotlib.figure import Figure

    drawn: dict[str, Any] = {}

    def new(height: float = 3.2) -> tuple[Any, Any]:
        figure = Figure(figsize=(7.2, height), layout="constrained")  # no pyplot: no display, no global state
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        return figure, axes

    if report.histogram:
        drawn["scores"], axes = new()
        _histogram(axes, report)
    if report.rows:
        drawn["metrics"], axes = new(0.9 + 0.5 * len(report.rows))
        _metrics(axes, report)
    for chart in report.charts:
        drawn[_file_name(chart.title)], axes = new()
        _chart(axes, chart)
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            # no date in the file: the same report gives the same bytes
            figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            write_whole(folder / f"{name}.{kind}", buffer.getvalue(), option="--plots")
    return list(drawn)


def _histogram(axes: Any, report: Report) -> None:
    low, high = score_range(report.histogram, report.threshold)
    edges = np.linspace(low, high, BINS + 1)
    for series in report.histogram:
        counts = np.histogram(np.clip(series.scores, low, high), bins=edges)[0]
        axes.stairs(
            counts / max(counts.max(), 1), edges, fill=True, alpha=0.45, color=COLOURS[series.kind], label=series.name
        )
    if report.threshold is not None:
        axes.axvline(
            report.threshold, color="#1d2126", linestyle="--", linewidth=1, label=f"threshold {report.threshold:.3f}"
        )
    axes.set_xlabel("anomaly score")
    axes.set_ylabel("share of its highest bin")
    axes.legend(frameon=False)


def _metrics(axes: Any, report: Report) -> None:
    for place, row in enumerate(reversed(report.rows)):
        axes.plot([row.low, row.high], [place, place], color=COLOURS["accent"], alpha=0.4, linewidth=4)
        axes.plot([row.value], [place], "o", color=COLOURS["accent"])
    axes.set_yticks(range(len(report.rows)), [row.name for row in reversed(report.rows)])
    axes.set_ylim(-0.6, len(report.rows) - 0.4)
    axes.set_xlabel("percent, 95% interval")


def _chart(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        axes.plot(line.x, line.y, color=COLOURS[line.kind], label=line.name, marker="o" if len(line.x) <= 30 else "")
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=COLOURS[line.kind], alpha=0.18, linewidth=0)
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    axes.legend(frameon=False)


def _file_name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
