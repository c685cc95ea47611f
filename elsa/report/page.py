"""One self-contained HTML file: key figures, galleries, histogram, provenance. No script, nothing fetched."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path

from PIL import Image
from torch import Tensor

from elsa.output import write_whole
from elsa.report.histogram import Series, draw_histogram

SMALLEST_SHOWN = 64  # pictures below this many pixels are enlarged with hard edges; smoothing 28 px shows only blur


@dataclass(frozen=True)
class Row:
    """A detector and its figure in percent, with the interval around it."""

    name: str
    value: float
    low: float
    high: float
    note: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Picture:
    """An image uint8[C, H, W], its anomaly score, what is under it, and what the truth said (if anybody knows)."""

    image: Tensor
    score: float
    caption: str
    truth: str = ""


@dataclass(frozen=True)
class Gallery:
    title: str
    explanation: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    tiles: Sequence[tuple[str, str]] = ()
    rows_title: str = "Key figures"
    rows_explanation: str = ""
    rows: Sequence[Row] = ()
    galleries: Sequence[Gallery] = ()
    histogram_explanation: str = ""
    histogram: Sequence[Series] = ()
    findings: Sequence[str] = ()
    provenance: dict[str, str] = field(default_factory=dict)


def write_report(path: Path, report: Report) -> None:
    """Write the report as one HTML file, atomically."""
    write_whole(path, render(report).encode())


def render(report: Report) -> str:
    """The HTML of a report. Every text in it is escaped: file names and labels are other people's input."""
    sections = [
        _rows(report),
        *[_gallery(gallery) for gallery in report.galleries],
        _histogram(report),
        _findings(report),
        _provenance(report),
    ]
    tiles = "".join(
        f'<div class="tile"><strong>{escape(value)}</strong><span>{escape(words)}</span></div>'
        for value, words in report.tiles
    )
    style = files("elsa.report").joinpath("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(report.title)}</h1>\n<p>{escape(report.lead)}</p></header>\n"
        f'<div class="tiles">{tiles}</div>\n' + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _rows(report: Report) -> str:
    if not report.rows:
        return ""
    left = min(50.0, *(row.low for row in report.rows))
    lines = []
    for row in report.rows:
        start, middle, end = ((value - left) / (100 - left) * 100 for value in (row.low, row.value, row.high))
        lines.append(
            f'<tr{" class=ours" if row.ours else ""}><th scope="row">{escape(row.name)}'
            f"{f'<small>{escape(row.note)}</small>' if row.note else ''}</th>"
            f'<td class="value">{row.value:.1f}</td><td class="interval">{row.low:.1f} to {row.high:.1f}</td>'
            f'<td class="bar" aria-hidden="true"><div><i style="left:{start:.2f}%;width:{end - start:.2f}%"></i>'
            f'<b style="left:{middle:.2f}%"></b></div></td></tr>'
        )
    return (
        f"<section><h2>{escape(report.rows_title)}</h2><p>{escape(report.rows_explanation)}</p>\n"
        '<table class="rows"><thead><tr><th scope="col">Detector</th><th scope="col" class="value">AUROC</th>'
        '<th scope="col" class="interval">95% interval</th>'
        f'<th scope="col" class="bar"><span>{left:.0f}</span><span>100</span></th></tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></section>"
    )


def _gallery(gallery: Gallery) -> str:
    figures = []
    for picture in gallery.pictures:
        badge = f'<em class="{escape(picture.truth)}">{escape(picture.truth)}</em>' if picture.truth else ""
        small = ' class="small"' if max(picture.image.shape[-2:]) < SMALLEST_SHOWN else ""
        figures.append(
            f'<figure><img{small} src="{data_uri(picture.image)}" alt="{escape(picture.caption)}" loading="lazy">'
            f'<figcaption><span title="{escape(picture.caption)}">{escape(picture.caption)}</span>{badge}'
            f'<span class="score">{picture.score:.2f}</span></figcaption></figure>'
        )
    return (
        f"<section><h2>{escape(gallery.title)}</h2><p>{escape(gallery.explanation)}</p>\n"
        f'<div class="gallery">{"".join(figures)}</div></section>'
    )


def _histogram(report: Report) -> str:
    if not report.histogram:
        return ""
    keys = "".join(
        f'<span class="key"><i class="{escape(series.kind)}"></i>{escape(series.name)}</span>'
        for series in report.histogram
    )
    return (
        f"<section><h2>Anomaly scores</h2><p>{escape(report.histogram_explanation)}</p>\n"
        f'<div class="keys">{keys}</div>{draw_histogram(report.histogram)}</section>'
    )


def _findings(report: Report) -> str:
    if not report.findings:
        return ""
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in report.findings)
    return f"<section><h2>What the audit found</h2><ul>{items}</ul></section>"


def _provenance(report: Report) -> str:
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.provenance.items())
    return f"<section><h2>Where this comes from</h2><dl>{terms}</dl></section>" if terms else ""


def data_uri(image: Tensor) -> str:
    """An image uint8[C, H, W] with 1 or 3 channels as a PNG inside the page."""
    array = image.permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
