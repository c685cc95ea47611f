"""What an installation brings, and that the list of it is true."""

import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MOST_BESIDE_TORCH = 15


def closure(*roots):
    """Every package that these bring, extras left out."""
    found, waiting = set(), list(roots)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needs = [Requirement(text) for text in distribution(name).requires or []]
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def test_an_installation_brings_few_packages():
    beside_torch = closure("elsa") - closure("torch") - {"elsa"}
    assert len(beside_torch) <= MOST_BESIDE_TORCH, sorted(beside_torch)


def test_the_bill_of_materials_is_what_is_pinned():
    subprocess.run([sys.executable, str(ROOT / "scripts" / "sbom.py"), "--check"], check=True)


def test_the_bill_of_materials_names_every_package_with_its_licence():
    bill = json.loads((ROOT / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    parts = {part["name"]: part for part in bill["components"]}
    assert closure("elsa") - {"elsa"} <= parts.keys()
    for part in parts.values():
        assert part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}"
        assert part["licenses"], part["name"]
