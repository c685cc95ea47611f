"""Finds the images that don't belong: semi-supervised anomaly detection on dirty data with a handful of labels."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. They are imported on first use, because torch alone takes seconds to import and
# `elsa --help` needs none of it.
_HOMES = {
    "DETECTORS": "elsa.detectors",
    "Elsa": "elsa.elsa",
    "ElsaHead": "elsa.head",
    "UserError": "elsa.errors",
    "load": "elsa.saved",
}

__all__ = ["DETECTORS", "Elsa", "ElsaHead", "UserError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'elsa' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
