"""What each plot of docs/results.md is drawn from: plain numbers out of the lines, or nothing if none were measured."""

import hashlib
import json
import statistics
from collections.abc import Callable
from typing import Any

from elsa.bench.plans import PLANS, POLLUTIONS, PROTOTYPE_COUNTS, WATCHED
from elsa.bench.report_tables import (
    Lines,
    Row,
    early_stop_correlations,
    find,
    matrix_rows,
    paper,
    prototype_cells,
)

Data = dict[str, Any]


def digest(data: Data) -> str:
    """Names the data behind a figure."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def matrices(lines: Lines) -> Data | None:
    """Nine matrices of 10 by 10; None where a cell has not been run, and on the diagonal."""
    classes, found = paper()["classes"], []
    for row in matrix_rows():
        have = {(cell.normal, cell.labelled): lines[cell]["auroc"] for cell in row.cells if cell in lines}
        rows = [[have.get((normal, labelled)) for labelled in classes] for normal in classes]
        found.append({"title": f"{row.name} ({len(have)} of {len(row.cells)})", "rows": rows})
    return {"classes": classes, "matrices": found}


def _first_watched(lines: Lines) -> dict[str, Any] | None:
    """The first line of a watched fit, in the order of the plan: figures of one fit are all of this one."""
    return next((lines[cell] for cell in PLANS["ablations"]() if cell.variant == WATCHED and cell in lines), None)


def energy_by_epoch(lines: Lines) -> Data | None:
    """Histograms of test energies by epoch of fine-tuning."""
    line = _first_watched(lines)
    return line and {"epochs": line["watched"]["histograms"]}


def per_prototype(lines: Lines) -> Data | None:
    """Training images nearest to each prototype."""
    line = _first_watched(lines)
    return line and line["watched"]["prototypes"]


def by_prototype_count(lines: Lines) -> Data | None:
    """AUROC by prototype count at three pollutions."""
    series, any_found = [], False
    for gamma_p in POLLUTIONS:
        points = []
        for count in PROTOTYPE_COUNTS:
            found = find(Row("", prototype_cells(count, gamma_p), None), lines)
            if found.mean is not None:
                points.append([count, round(found.mean, 3), round(found.error or 0.0, 3)])
                any_found |= count != 100
        series.append({"title": f"γ_p {gamma_p:g}", "points": points})
    return {"series": series} if any_found else None


def early_stop(lines: Lines) -> Data | None:
    """Early-stop score against test AUROC, epoch by epoch, of one fit; correlations of all of them."""
    line = _first_watched(lines)
    if line is None:
        return None
    correlations = [round(value, 4) for value in early_stop_correlations(lines).values()]
    title = f"{line['normal']}, labelled {line['labelled']}, γ_p {line['gamma_p']:g}"
    seen = line["watched"]["test_auroc"]
    return {"title": title, "early_stop": line["early_stop"], "test_auroc": seen, "correlations": correlations}


def embedding(lines: Lines) -> Data | None:
    """CSI's embedding and that of elsa+ of one class, in two dimensions."""
    line = _first_watched(lines)
    if line is None:
        return None
    found = line["watched"]["embedding"]
    return {
        "is_anomaly": found["is_anomaly"],
        "panels": [{"title": name, **found[name]} for name in ("csi", "elsa+")],
    }


def pretraining(lines: Lines) -> Data | None:
    """Uniformity and energies while contrastive pre-training goes on."""
    line = next((lines[cell] for cell in PLANS["theory"]() if cell in lines), None)
    return line and {"epochs": line["watched"]["pretraining"]}


def correlation_with_uniformity(lines: Lines) -> float | None:
    """Between uniformity and mean energy of the training images over the epochs of pre-training."""
    data = pretraining(lines)
    if data is None or len(data["epochs"]) < 3:
        return None
    pairs = [(entry["uniformity"], entry["energy of normal training images"]) for entry in data["epochs"]]
    return statistics.correlation(*zip(*pairs, strict=True))


FIGURES: dict[str, Callable[[Lines], Data | None]] = {
    "matrices": matrices,
    "energy-by-epoch": energy_by_epoch,
    "images-per-prototype": per_prototype,
    "prototype-counts": by_prototype_count,
    "early-stop": early_stop,
    "embedding": embedding,
    "pretraining": pretraining,
}
