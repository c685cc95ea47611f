"""Line charts with bands as inline SVG, drawn from the numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from elsa.report.histogram import ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 720, 240, 52, 12, 10, 44


@dataclass(frozen=True)
class Line:
    """One line over x; kind chooses the colour; low and high are the band around it, if it has one."""

    name: str
    kind: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    title: str
    explanation: str
    x_name: str
    y_name: str
    lines: Sequence[Line]


def draw_chart(chart: Chart) -> str:
    """The chart; every line lies on the same axes."""
    left, right = spread([value for line in chart.lines for value in line.x])
    low, high = spread([value for line in chart.lines for value in (*line.y, *line.low, *line.high)], margin=0.05)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f} {TOP + (high - y) / (high - low) * (HEIGHT - TOP - FOOT):.1f}"

    parts = []
    for value, digits in ticks(low, high):
        y = place(left, value).split()[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="side" x="{LEFT - 7}" y="{float(y) + 4:.1f}">{value:.{digits}f}</text>')
    for value, digits in ticks(left, right):
        parts.append(f'<text x="{place(value, low).split()[0]}" y="{HEIGHT - FOOT + 17}">{value:.{digits}f}</text>')
    for line in chart.lines:
        kind = escape(line.kind)
        if line.low:
            upper = [place(x, y) for x, y in zip(line.x, line.high, strict=True)]
            lower = [place(x, y) for x, y in zip(line.x, line.low, strict=True)]
            parts.append(f'<path class="band {kind}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>')
        points = [place(x, y) for x, y in zip(line.x, line.y, strict=True)]
        parts.append(f'<path class="line {kind}" d="M{"L".join(points)}"/>')
        if len(points) <= 30:
            dots = (point.split() for point in points)
            parts += [f'<circle class="{kind}" cx="{x}" cy="{y}" r="3"/>' for x, y in dots]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}">{escape(chart.x_name)}</text>')
    words = escape(f"{chart.y_name} over {chart.x_name}: {', '.join(line.name for line in chart.lines)}")
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{"".join(parts)}</svg>'


def spread(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    """From the lowest to the highest value, and a share of that more at both ends; never empty."""
    low, high = min(values), max(values)
    if not high > low:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)
