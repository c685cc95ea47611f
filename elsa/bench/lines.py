"""Lines of results: written so that a crash costs none, read back as the cells they finish, with their origin."""

import dataclasses
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elsa.bench.plans import Cell


def read_lines(results: Path) -> list[dict[str, Any]]:
    """All whole lines; one without its end was cut by a crash, and append_line removes it."""
    text = results.read_text() if results.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def cell_of(line: dict[str, Any]) -> Cell:
    """The cell a line belongs to; lines older than variants have none."""
    return Cell(**{field.name: line[field.name] for field in dataclasses.fields(Cell) if field.name in line})


def finished_cells(results: Path, plan: str) -> set[Cell]:
    """The cells that have a line of this plan."""
    return {cell_of(line) for line in read_lines(results) if line["plan"] == plan}


def append_line(results: Path, line: dict[str, Any]) -> None:
    """Add one line so that it survives a crash, in place of one that a crash had cut; one process at a time."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with open(results, "ab+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # or the line another process is writing would look cut
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def provenance(device: str) -> dict[str, Any]:
    """Where a line comes from: command, commit, versions, card."""
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    return {
        "command": shlex.join(["python", "-m", "elsa.bench", *(_public(word) for word in sys.argv[1:])]),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "card": card,
    }


def _public(word: str) -> str:
    """A word of the command without the folders of this machine, which say nothing to a reader of the line."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}DIR/{Path(value).name}" if Path(value).is_absolute() else word


def commit() -> str:
    """The checkout's commit; where the files travelled without their history, what ELSA_COMMIT says."""
    if "ELSA_COMMIT" in os.environ:
        return os.environ["ELSA_COMMIT"]
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return found.stdout.strip() or "unknown"
