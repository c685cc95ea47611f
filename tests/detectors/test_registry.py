import subprocess
import sys

import pytest

from elsa.detectors import DETECTORS, build
from elsa.errors import UserError


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(UserError, match="'ocsvm': use one of elsa, elsa\\+, elsa-head, oc-svm, isolation-forest, kde"):
        build("ocsvm")


def test_an_unknown_setting_is_refused_with_the_settings_there_are():
    with pytest.raises(UserError, match="'gama' of detector oc-svm: use one of seed, device, progress, nu, gamma"):
        build("oc-svm", gama=1)


def test_settings_reach_the_detector():
    assert build("knn", k=3, seed=7).k == 3
    assert build("knn", k=3, seed=7).seed == 7


@pytest.mark.parametrize("name", ["elsa", "elsa+"])
def test_elsa_and_elsa_plus_are_one_class_told_apart_by_the_method(name):
    assert build(name).method == name


def test_names_cost_no_import_of_torch():
    assert all(path.count(":") == 1 for path in DETECTORS.values())
    code = "import sys, elsa.detectors; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
