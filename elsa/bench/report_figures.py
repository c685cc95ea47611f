"""The plots of docs/results.md. Each is drawn from plain numbers, whose digest the file carries: no image is compared.

The one module that imports matplotlib, which is in the extra elsa[bench].
"""

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from elsa.bench.report_data import Data, digest

GOOD, BAD, PLAIN = "#1b7837", "#b2182b", "#555555"
MISSING_COLOUR = "#e0e0e0"


def draw(name: str, data: Data) -> bytes:
    """The SVG of a figure, the same bytes for the same data; its description holds the digest of the data."""
    settings: Any = {"svg.hashsalt": "elsa", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 8}
    file = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the reader's own matplotlibrc says
        matplotlib.rcParams.update(settings)
        DRAWN[name](data).savefig(file, format="svg", metadata={"Date": None, "Description": f"data {digest(data)}"})
    return file.getvalue()


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    return figure, list(axes.flat)


def _matrices(data: Data) -> Figure:
    figure, axes = _figure(13, 13, 3, 3)
    classes = data["classes"]
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=MISSING_COLOUR)
    for place, matrix in zip(axes, data["matrices"], strict=True):
        values = [[float("nan") if value is None else value for value in row] for row in matrix["rows"]]
        drawn = place.imshow(values, cmap=colours, vmin=60, vmax=100)
        for row, line in enumerate(matrix["rows"]):
            for column, value in enumerate(line):
                if value is not None:
                    ink = "white" if value < 85 else "black"
                    place.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=5.5, color=ink)
                elif row == column:
                    place.text(column, row, "–", ha="center", va="center", fontsize=6)
        place.set_xticks(range(10), classes, rotation=90)
        place.set_yticks(range(10), classes)
        place.set_title(matrix["title"])
    figure.colorbar(drawn, ax=axes, shrink=0.4, label="AUROC, %")
    figure.supxlabel("labelled anomaly class (grey: not run yet)")
    figure.supylabel("normal class")
    return figure


def _histograms(data: Data) -> Figure:
    figure, axes = _figure(2.6 * len(data["epochs"]), 2.4, 1, len(data["epochs"]))
    for place, (epoch, found) in zip(axes, data["epochs"].items(), strict=True):
        for kind, colour in (("normal", GOOD), ("anomalous", BAD)):
            total = sum(found[kind])
            share = [count / total for count in found[kind]]
            place.stairs(share, found["edges"], fill=True, alpha=0.5, color=colour, label=kind)
        place.set_title(f"epoch {epoch}")
        place.set_xlabel("energy")
    axes[0].set_ylabel("share of test images")
    axes[0].legend()
    return figure


def _prototypes(data: Data) -> Figure:
    figure, [place] = _figure(6, 2.6)
    order = sorted(range(len(data["images"])), key=lambda k: -data["images"][k])
    places = range(len(order))
    place.bar(places, [data["images"][k] for k in order], color=GOOD, label="training images")
    place.bar(places, [data["hidden"][k] for k in order], color=BAD, label="hidden anomalies among them")
    place.set_xlabel("prototype, by size")
    place.set_ylabel("images nearest to it")
    place.legend()
    return figure


def _prototype_counts(data: Data) -> Figure:
    figure, [place] = _figure(4.5, 3)
    for series, colour in zip(data["series"], (GOOD, PLAIN, BAD), strict=True):
        points = series["points"]
        counts, means, errors = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [])
        place.errorbar(counts, means, errors, marker="o", capsize=2, color=colour, label=series["title"])
    place.set_xscale("log")
    place.set_xlabel("prototypes")
    place.set_ylabel("AUROC, % (Plane)")
    place.legend()
    return figure


def _early_stop(data: Data) -> Figure:
    figure, [place, beside] = _figure(8, 3, 1, 2)
    place.scatter(data["early_stop"], data["test_auroc"], s=9, c=range(len(data["early_stop"])), cmap="viridis")
    place.set_xlabel("early-stop score of an epoch")
    place.set_ylabel("test AUROC, %")
    place.set_title(f"{data['title']} (dark: early epochs)")
    beside.hist(data["correlations"], bins=[step / 10 for step in range(-10, 11)], color=GOOD)
    beside.set_xlabel("correlation within a fit")
    beside.set_ylabel("fits")
    return figure


def _embedding(data: Data) -> Figure:
    figure, axes = _figure(7, 3.4, 1, 2)
    for place, panel in zip(axes, data["panels"], strict=True):
        for kind, colour, word in ((0, GOOD, "normal"), (1, BAD, "anomalous")):
            points = [
                point
                for point, is_anomaly in zip(panel["points"], data["is_anomaly"], strict=True)
                if is_anomaly == kind
            ]
            place.scatter([x for x, _ in points], [y for _, y in points], s=5, color=colour, label=word)
        place.set_title(f"{panel['title']}: uniformity {panel['uniformity']:.2f}")
        place.set_aspect("equal")
    axes[0].legend()
    return figure


def _pretraining(data: Data) -> Figure:
    figure, [place, beside] = _figure(8, 3, 1, 2)
    epochs = [entry["epoch"] for entry in data["epochs"]]
    uniform = [entry["uniformity"] for entry in data["epochs"]]
    energies = [name for name in data["epochs"][0] if name.startswith("energy")]
    place.scatter(uniform, [entry["energy of normal training images"] for entry in data["epochs"]], c=epochs, s=12)
    place.set_xlabel("uniformity of the training embeddings")
    place.set_ylabel("their mean contrastive energy")
    for name, colour, style in zip(energies, (GOOD, BAD, GOOD, BAD), ("-", "-", "--", "--"), strict=False):
        beside.plot(epochs, [entry[name] for entry in data["epochs"]], style, color=colour, label=name)
    beside.set_xlabel("epoch of pre-training")
    beside.set_ylabel("mean contrastive energy")
    beside.legend(fontsize=6)
    return figure


DRAWN: dict[str, Callable[[Data], Figure]] = {
    "matrices": _matrices,
    "energy-by-epoch": _histograms,
    "images-per-prototype": _prototypes,
    "prototype-counts": _prototype_counts,
    "early-stop": _early_stop,
    "embedding": _embedding,
    "pretraining": _pretraining,
}
