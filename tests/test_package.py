"""What `import elsa` offers, and what it costs."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import elsa

ROOT = Path(__file__).parent.parent


def requirements():
    """What a development install asks for: elsa's own and those of every extra that `dev` names."""
    from packaging.requirements import Requirement

    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = about["optional-dependencies"]
    waiting, found = about["dependencies"] + extras["dev"], []
    for requirement in map(Requirement, waiting):
        if requirement.name == "elsa":
            found += [Requirement(one) for extra in requirement.extras for one in extras[extra]]
        else:
            found.append(requirement)
    assert "fastapi" in {one.name for one in found}
    return found


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these_and_all_of_them_exist():
    assert elsa.__all__ == ["DETECTORS", "Elsa", "ElsaHead", "UserError", "__version__", "load"]
    assert dir(elsa) == sorted(elsa.__all__)
    assert all(getattr(elsa, name) is not None for name in elsa.__all__)


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'elsa' has no attribute 'Elza'"):
        elsa.Elza  # noqa: B018


def test_import_and_help_cost_no_torch():
    code = (
        "import sys, elsa, elsa.detectors; from elsa.cli import cli\n"
        "for arguments in (['--help'], ['fit', '--help'], ['--version']): cli.main(arguments, standalone_mode=False)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'sklearn', 'pyarrow', 'rich'}))"
    )
    assert python(code).splitlines()[-1] == "[]"


def test_help_is_there_in_half_a_second():
    # The best of three: a busy machine is not the command's fault.
    code = (
        "import subprocess, sys, time\n"
        "def run():\n"
        "    began = time.perf_counter()\n"
        "    subprocess.run([sys.executable, '-m', 'elsa', '--help'], check=True, stdout=subprocess.DEVNULL)\n"
        "    return time.perf_counter() - began\n"
        "print(min(run() for _ in range(3)))"
    )
    assert float(python(code)) < 0.5


def test_importing_any_module_of_elsa_touches_no_global_state():
    code = (
        "import importlib, json, pkgutil, elsa, numpy, torch\n"
        "look = lambda: [torch.initial_seed(), torch.get_num_threads(), torch.get_default_dtype() == torch.float32,\n"
        "                torch.is_grad_enabled(), numpy.random.get_state()[1].tolist()]\n"
        "before = look()\n"
        "names = [m.name for m in pkgutil.walk_packages(elsa.__path__, 'elsa.') if m.name != 'elsa.__main__']\n"
        "for name in names: importlib.import_module(name)\n"
        "print(json.dumps([len(names), before == look()]))"
    )
    count, untouched = json.loads(python(code))
    assert count > 30
    assert untouched


def test_every_requirement_is_pinned_and_the_pins_satisfy_the_ranges():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    for requirement in requirements():
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
    assert all("/" not in line and "@" not in line for line in lines[1:])  # no download addresses
    assert pins["torch"] == "2.13.0"


def test_every_installed_package_here_has_a_pin():
    """A transitive requirement without a pin would be a different version tomorrow."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    seen: set[str] = set()
    waiting = [root.name for root in requirements()]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            needed = map(Requirement, requires(name) or [])
            here = [one for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
            waiting += [one.name.lower().replace("_", "-") for one in here]
    assert seen <= pins, seen - pins
