"""The plot of `elsa bench speed`: each stage beside the plain loop and the machine's own limit. Needs matplotlib."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from elsa.output import write_whole

if TYPE_CHECKING:
    from elsa.bench.speed import Measured

STAGES = ("augment", "pretrain", "finetune", "score")
LIMIT_OF = {"pretrain": "train", "finetune": "train", "score": "score"}


def write_speed_plot(figures: Sequence["Measured"], path: Path, device: str) -> str:
    """Draw medians with lowest and highest, write an SVG; what to tell the user."""
    found = {(figure.what, figure.variant): figure for figure in figures}
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for offset, (variant, colour) in enumerate((("elsa", "#1b7837"), ("plain", "#999999"))):
        for place, stage in enumerate(STAGES):
            measured = found.get((stage, variant))
            if measured is None:
                continue
            below, above = measured.value - measured.low, measured.high - measured.value
            x = place + 0.36 * (offset - 0.5)
            label = {"elsa": "elsa", "plain": "the loop people write"}[variant] if place == 0 else None
            axes.bar(x, measured.value, 0.34, yerr=[[below], [above]], color=colour, capsize=3, label=label)
            axes.annotate(
                f"{measured.value:,.0f}", (x, measured.value), (0, 6), textcoords="offset points", ha="center"
            )
    for place, stage in enumerate(STAGES):
        if stage in LIMIT_OF:
            limit = found["limit", LIMIT_OF[stage]].value
            label = "matrix limit of this machine" if stage == "pretrain" else ""
            axes.hlines(limit, place - 0.4, place + 0.4, colors="#b2182b", linestyles="dashed", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(STAGES)), STAGES)
    axes.set_ylabel("views/s")
    axes.set_title(f"{device}: median of the turns, bars from lowest to highest", fontsize=9)
    axes.legend(fontsize=8, loc="upper left")
    axes.margins(y=0.2)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    write_whole(path, file.getvalue(), "--results")
    return f"plot: {path}"
