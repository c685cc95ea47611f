"""Every detector by name. `fit(images, labels)` returns it fitted, `anomaly_score(images)` is higher for anomalies."""

import inspect
from importlib import import_module
from typing import Any

from elsa.errors import UserError

# "module:Class", so that the command's --help and completion need no torch.
DETECTORS = {
    "elsa": "elsa.elsa:Elsa",
    "elsa+": "elsa.elsa:Elsa",
    "elsa-head": "elsa.head:ElsaHead",
    "oc-svm": "elsa.detectors.shallow:OneClassSVMDetector",
    "isolation-forest": "elsa.detectors.shallow:IsolationForestDetector",
    "kde": "elsa.detectors.shallow:KDEDetector",
    "deep-svdd": "elsa.detectors.deep_sad:DeepSVDDDetector",
    "goad": "elsa.detectors.goad:GOADDetector",
    "csi": "elsa.detectors.contrastive:CSIDetector",
    "simclr": "elsa.detectors.contrastive:SimCLRDetector",
    "ss-dgm": "elsa.detectors.ss_dgm:SSDGMDetector",
    "ssad": "elsa.detectors.ssad:SSADDetector",
    "deep-sad": "elsa.detectors.deep_sad:DeepSADDetector",
    "knn": "elsa.detectors.vectors:KNNDetector",
    "logistic": "elsa.detectors.vectors:LogisticDetector",
}


def detector_class(name: str) -> Any:
    """The class of the detector of that name."""
    if name not in DETECTORS:
        raise UserError(f"detector {name!r}: use one of {', '.join(DETECTORS)}")
    module, _, class_name = DETECTORS[name].partition(":")
    return getattr(import_module(module), class_name)


def build(name: str, **settings: Any) -> Any:
    """The detector of that name, not yet fitted; settings go to its constructor, with seed, device and progress."""
    detector = detector_class(name)
    if detector.__name__ == "Elsa":
        settings = {"method": name, **settings}
    allowed = inspect.signature(detector).parameters
    unknown = [setting for setting in settings if setting not in allowed]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in allowed.values())
    if unknown and not takes_any:
        raise UserError(f"setting {unknown[0]!r} of detector {name}: use one of {', '.join(allowed)}")
    return detector(**settings)
