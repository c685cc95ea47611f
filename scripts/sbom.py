#!/usr/bin/env python3
"""Writes sbom.json: what elsa and its extras bring, with versions and licences, in CycloneDX's format.

python scripts/sbom.py [--check]      --check fails if the file is stale
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILE = ROOT / "sbom.json"
EXTRAS = ("bench", "label", "onnx", "postgres", "pyod", "ray", "report", "serve")  # all but dev and timm


def main() -> int:
    """Write the file, or say that it is stale."""
    text = json.dumps(bill(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text)
        return 0
    if FILE.read_text() != text:
        print("sbom.json is stale: run `make format`", file=sys.stderr)
        return 1
    return 0


def bill() -> dict[str, Any]:
    """The bill of materials: pinned packages that an installation with every extra brings."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    versions = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    parts = [component(name, versions[name]) for name in sorted(closure())]
    about = {"type": "library", "name": "elsa", "version": distribution("elsa").version, "licenses": licences("MIT")}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": about},
        "components": parts,
    }


def component(name: str, version: str) -> dict[str, Any]:
    """One package."""
    about = distribution(name).metadata
    classifiers = about.get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: OSI Approved :: ")]
    said = (about.get("License") or "").strip()
    licence = about.get("License-Expression") or "; ".join(named) or said.partition("\n")[0]
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": licences(licence),
    }


def licences(text: str) -> list[dict[str, Any]]:
    """A licence as CycloneDX has it."""
    return [{"license": {"name": text}}] if text else []


def closure() -> set[str]:
    """Every package that elsa with all extras brings on this kind of machine."""
    found: set[str] = set()
    waiting = [("elsa", EXTRAS)]
    while waiting:
        name, extras = waiting.pop()
        name = name.lower().replace("_", "-")
        if name in found and not extras:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in distribution(name).requires or []]
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed: run `make test` once, or pip install '.[dev]'") from None
        for need in needs:
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((need.name, tuple(need.extras)))
    return found - {"elsa"}


if __name__ == "__main__":
    sys.exit(main())
