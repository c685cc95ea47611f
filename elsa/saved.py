"""Fitted detectors in MODEL folders: which class wrote it, its state, how its images were made, where it comes from."""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from elsa import __version__
from elsa.errors import UserError
from elsa.model_file import read_model, write_model
from elsa.progress import Progress, silent

SAVED_CLASSES = {
    "Elsa": "elsa.elsa:Elsa",
    "ElsaHead": "elsa.head:ElsaHead",
    "CSIDetector": "elsa.detectors.contrastive:CSIDetector",
    "SimCLRDetector": "elsa.detectors.contrastive:SimCLRDetector",
    "DeepSADDetector": "elsa.detectors.deep_sad:DeepSADDetector",
    "DeepSVDDDetector": "elsa.detectors.deep_sad:DeepSVDDDetector",
    "GOADDetector": "elsa.detectors.goad:GOADDetector",
    "SSADDetector": "elsa.detectors.ssad:SSADDetector",
    "SSDGMDetector": "elsa.detectors.ss_dgm:SSDGMDetector",
}


class Detector(Protocol):
    """A detector that can be saved."""

    calibration_: Tensor

    def fit(self, images: Any, labels: Any) -> Self: ...

    def anomaly_score(self, images: Any) -> Tensor: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...


def save_model(detector: Detector, folder: Path, about: dict[str, Any]) -> None:
    """Write a MODEL folder, atomically; `about` joins the detector's own description in model.json."""
    tensors, state = detector.state()
    write_model(Path(folder), tensors, {**about, "class": type(detector).__name__, "detector": state})


def open_model(folder: Path, device: str = "cpu", progress: Progress = silent) -> tuple[Detector, dict[str, Any]]:
    """The fitted detector of a MODEL folder and everything its model.json says."""
    tensors, about = read_model(Path(folder))
    if not isinstance(about.get("class"), str) or about["class"] not in SAVED_CLASSES:
        raise UserError(
            f"{folder} holds a {about.get('class')!r}, this version knows {', '.join(SAVED_CLASSES)}; update elsa"
        )
    module, name = SAVED_CLASSES[about["class"]].split(":")
    detector_class = getattr(import_module(module), name)
    try:
        detector = detector_class.from_state(tensors, about["detector"], device=device, progress=progress)
    # A tensor or a setting that this version does not have, or has of another kind.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, UserError) as error:
        if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise  # the device's trouble, not the file's
        versions = about.get("versions")
        written_by = versions.get("elsa", "unknown") if isinstance(versions, dict) else "unknown"
        raise UserError(
            f"{folder} holds a {name} with other parts than those of this elsa ({__version__}; it was written by "
            f"{written_by}): use the elsa that wrote it, or fit the model again"
        ) from error
    return detector, about


def load(folder: Path, device: str = "cpu") -> Detector:
    """The fitted detector of a MODEL folder, ready for anomaly_score()."""
    return open_model(folder, device)[0]
