"""`elsa export`: a MODEL as one file that scores as it does, without elsa; refused where it would not."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim, ExportedProgram

from elsa.augment import CACHED
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.head import ElsaHead
from elsa.output import check_writable, write_whole
from elsa.progress import Progress
from elsa.saved import Detector, open_model
from elsa.ship.export_graph import Graph, scoring_module
from elsa.ship.export_onnx import Run, described, quantised, quiet, replace_constant, require_onnx, runner, to_onnx
from elsa.ship.export_parity import answers, check_consistent, compare, generated_images, generated_vectors
from elsa.trust.calibrate import lowest_false_alarms, score_threshold
from elsa.trust.metrics import auroc

FORMATS = {".onnx": "onnx", ".pt2": "torch-export"}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.float32}
USUAL_FALSE_ALARMS = 0.05
FEWEST_TO_CALIBRATE = 50
MOST_COMPARED = 1000
SMALLEST_SIDE = 8


@dataclasses.dataclass(frozen=True)
class Probes:
    """What the exported file and the trained model are compared on."""

    images: Tensor
    kind: str
    """real or generated"""
    labels: list[str]


def export_model(
    model: Path,
    out: Path,
    *,
    format: str | None,
    precision: str,
    calibrate: Path | None,
    views: int | None,
    false_alarms: float | None,
    progress: Progress,
) -> list[str]:
    """Write MODEL as one ONNX or torch.export file, once it answers as MODEL does; what to tell the user about it."""
    format = _format(out, format, precision)
    check_writable(out)
    trained, about = open_model(model, progress=progress)
    if precision != "fp32" and not about["preprocessing"]:
        raise UserError(f"--precision {precision} is that of a network, and MODEL was fitted on vectors: use fp32")
    approximate = precision == "int8" or views is not None
    reference = trained if views is None else _with_views(trained, views)
    probes = _probes(trained, about["preprocessing"], calibrate, approximate, progress)
    rate = false_alarms or max(USUAL_FALSE_ALARMS, lowest_false_alarms(len(trained.calibration_)))
    threshold = score_threshold(trained.calibration_, rate)
    trained_score = trained.anomaly_score(probes.images).double().numpy()

    # 1. the detector's own functions as a graph, whose calibration scores follow where the scores are approximate
    program, name = _traced(reference, about["preprocessing"], precision)
    facts = _facts(about, model, precision, views, rate, len(trained.calibration_))
    calibration = trained.calibration_.double()
    if format == "onnx":
        onnx_model = to_onnx(program, name, threshold)
        if precision == "int8":
            onnx_model = quantised(onnx_model, probes.images.numpy())
        if approximate:
            rough = answers(runner(onnx_model.SerializeToString()), probes.images.numpy())[0]
            calibration = _followed(calibration, trained_score, rough)
            replace_constant(onnx_model, "calibration", calibration.numpy())
            threshold = score_threshold(calibration, rate)
            replace_constant(onnx_model, "threshold", np.array(threshold))
        payload = described(onnx_model, facts | {"threshold": repr(threshold)})
        run = runner(payload)
    else:
        payload, run = _torch_file(program, threshold, facts | {"threshold": repr(threshold)})

    # 2. its answers beside the trained model's
    exported = answers(run, probes.images.numpy())
    reference_score = trained_score if views is None else reference.anomaly_score(probes.images).double().numpy()
    parity = compare(exported, reference_score, threshold, probes.kind, precision)
    check_consistent(exported, calibration, threshold)
    write_whole(out, payload)
    return [
        parity.line(),
        *_cost(exported[0], trained_score, probes.labels),
        f"Exported {len(payload) / 1e6:.1f} MB, threshold {threshold:.6g} (false-alarm rate {rate:.4g}): {out}",
    ]


def _format(out: Path, format: str | None, precision: str) -> str:
    by_suffix = FORMATS.get(out.suffix)
    if by_suffix is None or format not in (None, by_suffix):
        raise UserError(f"--out {out}: name it .onnx for --format onnx or .pt2 for --format torch-export")
    if by_suffix == "torch-export" and precision == "int8":
        raise UserError("--precision int8 is made for ONNX Runtime: use --format onnx, or --precision fp32 or fp16")
    if by_suffix == "onnx":
        require_onnx()
    return by_suffix


def _with_views(detector: Detector, views: int) -> Detector:
    """The same detector with so many weak views to a score."""
    if not isinstance(detector, Elsa):
        raise UserError("--views: only models learned from scratch (elsa+, elsa) average over views; leave it out")
    tensors, about = detector.state()
    return Elsa.from_state(tensors, {**about, "settings": {**about["settings"], "views": views}})


def _probes(
    detector: Detector, preprocessing: dict[str, Any], calibrate: Path | None, approximate: bool, progress: Progress
) -> Probes:
    if calibrate is not None:
        opened = open_source(calibrate)
        some = np.unique(np.linspace(0, len(opened) - 1, MOST_COMPARED).round().astype(int)).tolist()
        loaded = load_images(opened.subset(some), **preprocessing, progress=progress)
        if approximate and len(loaded) < FEWEST_TO_CALIBRATE:
            raise UserError(f"--calibrate {calibrate}: {len(loaded)} images, at least {FEWEST_TO_CALIBRATE} are needed")
        return Probes(loaded.images[0 : len(loaded)], "real", loaded.labels)
    if approximate:
        raise UserError(
            "--precision int8 and --views change the scores: name a SOURCE of images like those to be scored with "
            "--calibrate, for ranges and p-values to follow"
        )
    if isinstance(detector, ElsaHead) and detector.encoder is None:
        return Probes(generated_vectors(detector.memory_MD_), "generated", [])
    return Probes(generated_images(preprocessing["channels"], preprocessing["size"]), "generated", [])


def _traced(detector: Detector, preprocessing: dict[str, Any], precision: str) -> tuple[ExportedProgram, str]:
    """The graph for batches of any length, and for images of any size where they are stretched; its input's name."""
    score = scoring_module(detector, TYPES[precision])
    # augmentation works on more images than fit its cache in parts: the graph is that of fewer, and serves any number
    batch = {0: Dim("batch", min=1, max=CACHED if isinstance(detector, Elsa) else None)}
    if isinstance(detector, ElsaHead) and detector.encoder is None:
        graph, name = Graph(score, detector.calibration_, None), "vectors"
        sample = torch.zeros(3, detector.memory_MD_.shape[1])
    else:
        size, stretch, name = preprocessing["size"], preprocessing["resize"] == "stretch", "images"
        graph = Graph(score, detector.calibration_, size if stretch else None)
        height, width = (size + 16, size + 8) if stretch else (size, size)
        sample = torch.zeros(3, preprocessing["channels"], height, width, dtype=torch.uint8)
        if stretch:
            batch |= {2: Dim("height", min=SMALLEST_SIDE), 3: Dim("width", min=SMALLEST_SIDE)}
    with quiet(), torch.no_grad():
        threshold = torch.zeros((), dtype=torch.float64)
        return torch.export.export(graph.eval(), (sample, threshold), dynamic_shapes=(batch, None)), name


def _followed(calibration_N: Tensor, trained: NDArray, approximate: NDArray) -> Tensor:
    """The calibration scores as the approximate graph would give them, by a line through what it made of normal images.

    Without it the same image would get another p-value: 8-bit embeddings lie further from all remembered ones.
    """
    usual = trained <= float(calibration_N.max())
    if usual.sum() < 2 or np.ptp(trained[usual]) == 0:
        raise UserError(
            "--calibrate: fewer than 2 of its images score like normal ones; name a SOURCE with normal images"
        )
    slope, offset = np.polyfit(trained[usual], approximate[usual], 1)
    return calibration_N * slope + offset


def _torch_file(program: ExportedProgram, threshold: float, facts: dict[str, str]) -> tuple[bytes, Run]:
    """A .pt2 archive with the facts in its extra file elsa.json, and what runs it after reading it back."""
    file = io.BytesIO()
    with quiet():
        torch.export.save(program, file, extra_files={"elsa.json": json.dumps(facts)})
        file.seek(0)
        module = torch.export.load(file).module()
    at = torch.tensor(threshold, dtype=torch.float64)

    def run(images: NDArray) -> tuple[NDArray, ...]:
        with torch.inference_mode():
            return tuple(answer.numpy() for answer in module(torch.from_numpy(images), at))

    return file.getvalue(), run


def _facts(
    about: dict[str, Any], model: Path, precision: str, views: int | None, rate: float, num_calibration: int
) -> dict[str, str]:
    """What travels in the file beside the graph."""
    provenance = {name: about[name] for name in ("command", "seed", "data", "versions") if name in about}
    return {
        "higher_is": about["higher_is"],
        "detector": about["class"],
        "preprocessing": json.dumps(about["preprocessing"]),
        "precision": precision,
        "views": json.dumps(views),
        "false_alarms": repr(rate),
        "calibration_images": str(num_calibration),
        "provenance": json.dumps(provenance),
        "model_sha256": about["sha256"],
    }


def _cost(exported: NDArray, trained: NDArray, labels: list[str]) -> list[str]:
    """What the export costs in AUROC, where --calibrate has both kinds of labels."""
    labelled = np.array([bool(word) for word in labels], dtype=bool)
    is_anomaly = np.array([word == "anomaly" for word in labels], dtype=bool)[labelled]
    if not is_anomaly.any() or is_anomaly.all():
        return []
    before, after = (100 * auroc(score[labelled], is_anomaly) for score in (trained, exported))
    return [f"AUROC on the {labelled.sum():,} labelled images: {after:.2f}%, the trained model's is {before:.2f}%"]
