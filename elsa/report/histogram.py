"""Score histograms as inline SVG, drawn from the numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT, FOOT, BINS = 720, 220, 26, 48


@dataclass(frozen=True)
class Series:
    """Scores of one group of images; kind ('normal', 'anomaly', 'unlabelled') chooses the colour."""

    name: str
    kind: str
    scores: Sequence[float]


def score_range(series: Sequence[Series], threshold: float | None = None) -> tuple[float, float]:
    """The axis: all scores but the last half percent at either end, and the threshold."""
    everything = np.concatenate([np.asarray(group.scores, dtype=float) for group in series])
    # One far outlier would squeeze everything else into one bin: what lies outside is drawn at the edge.
    low, high = np.percentile(everything, [0.5, 99.5]).tolist()
    if threshold is not None:
        low, high = min(low, threshold), max(high, threshold)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def draw_histogram(series: Sequence[Series], threshold: float | None = None) -> str:
    """Overlaid histograms on one axis, each scaled to its own highest bin so that a rare group stays visible."""
    low, high = score_range(series, threshold)
    edges = np.linspace(low, high, BINS + 1)
    paths = []
    for group in series:
        counts = np.histogram(np.clip(group.scores, low, high), bins=edges)[0]
        tops = HEIGHT - FOOT - counts / max(counts.max(), 1) * (HEIGHT - FOOT - 8)
        points = [f"M0 {HEIGHT - FOOT}"]
        for position, top in enumerate(tops):
            points.append(f"L{position * WIDTH / BINS:.1f} {top:.1f}H{(position + 1) * WIDTH / BINS:.1f}")
        points.append(f"V{HEIGHT - FOOT}Z")
        paths.append(f'<path class="{escape(group.kind)}" d="{"".join(points)}"/>')
    numbers = "".join(
        f'<text x="{(value - low) / (high - low) * WIDTH:.1f}" y="{HEIGHT - 6}">{value:.{digits}f}</text>'
        for value, digits in ticks(low, high)
    )
    limit = ""
    if threshold is not None:
        x = (threshold - low) / (high - low) * WIDTH
        limit = f'<line class="threshold" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT - FOOT}"/>'
    names = " and ".join(group.name for group in series)
    return (
        f'<svg class="histogram" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Histogram of anomaly scores: '
        f'{escape(names)}">{"".join(paths)}<line x1="0" x2="{WIDTH}" y1="{HEIGHT - FOOT}" y2="{HEIGHT - FOOT}"/>'
        f"{limit}{numbers}</svg>"
    )


def ticks(low: float, high: float) -> list[tuple[float, int]]:
    """About five round numbers well inside the axis, with the decimals they need."""
    raw = (high - low) / 5
    power = 10.0 ** np.floor(np.log10(raw))
    step = float(power * min((1, 2, 5, 10), key=lambda factor: abs(factor * power - raw)))
    digits = max(0, -int(np.floor(np.log10(step))))
    margin = (high - low) * 0.03  # a number at the very edge would be cut
    first = np.ceil((low + margin) / step)
    last = np.floor((high - margin) / step)
    return [(float(number * step) + 0.0, digits) for number in np.arange(first, last + 1)]  # + 0.0: or it reads "-0"
