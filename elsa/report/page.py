"""One self-contained HTML file: key figures, galleries, plots, provenance. No script, nothing fetched."""

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
from elsa.report.chart import Chart, draw_chart
from elsa.report.histogram import Series, draw_histogram

SMALLEST_SHOWN = 64  # pictures below this many pixels are enlarged with hard edges; smoothing 28 px shows only blur
LARGEST_SENT = 144  # larger pictures are shrunk: 300 of them are 3 MB
JPEG_QUALITY = 82


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
    heat: Tensor | None = None
    """The same image under its heat map, uint8 [3, H, W]; shown beside it."""


@dataclass(frozen=True)
class Gallery:
    title: str
    explanation: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Group:
    """A few pictures that belong together, in one row."""

    title: str
    note: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Groups:
    """A section of such rows."""

    title: str
    explanation: str
    groups: Sequence[Group]


@dataclass(frozen=True)
class Table:
    """A section with a table of words; the first cell of each row names it."""

    title: str
    explanation: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    tiles: Sequence[tuple[str, str]] = ()
    rows_title: str = "Key figures"
    rows_explanation: str = ""
    rows_head: tuple[str, str] = ("Detector", "AUROC")
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    """What the reader must know before believing a figure, and what is missing and how to get it."""
    galleries: Sequence[Gallery] = ()
    histogram_explanation: str = ""
    histogram: Sequence[Series] = ()
    threshold: float | None = None
    """Drawn into the histogram."""
    tables: Sequence[Table] = ()
    groups: Sequence[Groups] = ()
    charts: Sequence[Chart] = ()
    findings: Sequence[str] = ()
    provenance: dict[str, str] = field(default_factory=dict)


def write_report(path: Path, report: Report) -> None:
    """Write the report as one HTML file, atomically."""
    write_whole(path, render(report).encode())


def render(report: Report) -> str:
    """The HTML of a report. Every text in it is escaped: file names and labels are other people's input."""
    sections = [
        _notes(report),
        _rows(report),
        _histogram(report),
        *[_gallery(gallery) for gallery in report.galleries],
        *[_table(table) for table in report.tables],
        *[_groups(groups) for groups in report.groups],
        *[_chart(chart) for chart in report.charts],
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


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<section class="notes"><h2>Before you read on</h2><ul>{items}</ul></section>' if items else ""


def _rows(report: Report) -> str:
    if not report.rows:
        return ""
    name, figure = report.rows_head
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
        f'<table class="rows"><thead><tr><th scope="col">{escape(name)}</th><th scope="col" class="value">'
        f"{escape(figure)}</th>"
        '<th scope="col" class="interval">95% interval</th>'
        f'<th scope="col" class="bar"><span>{left:.0f}</span><span>100</span></th></tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></section>"
    )


def _gallery(gallery: Gallery) -> str:
    wide = " wide" if any(picture.heat is not None for picture in gallery.pictures) else ""
    return (
        f"<section><h2>{escape(gallery.title)}</h2><p>{escape(gallery.explanation)}</p>\n"
        f'<div class="gallery{wide}">{"".join(map(_figure, gallery.pictures))}</div></section>'
    )


def _figure(picture: Picture) -> str:
    badge = f'<em class="{escape(picture.truth)}">{escape(picture.truth)}</em>' if picture.truth else ""
    shown = _image(picture.image, picture.caption)
    if picture.heat is not None:
        shown = f'<div class="pair">{shown}{_image(picture.heat, f"heat map of {picture.caption}")}</div>'
    return (
        f'<figure>{shown}<figcaption><span title="{escape(picture.caption)}">{escape(picture.caption)}</span>{badge}'
        f'<span class="score">{picture.score:.2f}</span></figcaption></figure>'
    )


def _image(image: Tensor, words: str) -> str:
    small = ' class="small"' if max(image.shape[-2:]) < SMALLEST_SHOWN else ""
    return f'<img{small} src="{data_uri(image)}" alt="{escape(words)}">'


def _groups(section: Groups) -> str:
    if not section.groups:
        return ""
    rows = "".join(
        f'<div class="group"><h3>{escape(group.title)}</h3><small>{escape(group.note)}</small>'
        f'<div class="strip">{"".join(map(_figure, group.pictures))}</div></div>\n'
        for group in section.groups
    )
    return f"<section><h2>{escape(section.title)}</h2><p>{escape(section.explanation)}</p>\n{rows}</section>"


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in table.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>\n'
        for first, *rest in table.rows
    )
    return (
        f"<section><h2>{escape(table.title)}</h2><p>{escape(table.explanation)}</p>\n"
        f'<div class="scroll"><table class="rows plain"><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>'
        "</div></section>"
    )


def _chart(chart: Chart) -> str:
    keys = "".join(
        f'<span class="key"><i class="{escape(line.kind)}"></i>{escape(line.name)}</span>' for line in chart.lines
    )
    return (
        f'<section class="plot"><h2>{escape(chart.title)}</h2><p>{escape(chart.explanation)}</p>\n'
        f'<div class="keys">{keys}</div>{draw_chart(chart)}</section>'
    )


def _histogram(report: Report) -> str:
    if not report.histogram:
        return ""
    keys = "".join(
        f'<span class="key"><i class="{escape(series.kind)}"></i>{escape(series.name)}</span>'
        for series in report.histogram
    )
    if report.threshold is not None:
        keys += f'<span class="key"><i class="threshold"></i>threshold {report.threshold:.3f}</span>'
    return (
        f'<section class="plot"><h2>Anomaly scores</h2><p>{escape(report.histogram_explanation)}</p>\n'
        f'<div class="keys">{keys}</div>{draw_histogram(report.histogram, report.threshold)}</section>'
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
    """An image uint8 [C, H, W] with 1 or 3 channels inside the page: to the pixel if small, else shrunk, as JPEG."""
    array = image.permute(1, 2, 0).numpy()
    shown = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    buffer = io.BytesIO()
    if max(shown.size) < SMALLEST_SHOWN:
        shown.save(buffer, format="PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    shown.thumbnail((LARGEST_SENT, LARGEST_SENT))
    shown.save(buffer, format="JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
