"""Pictures and a model fitted on them by the command itself, made once."""

import pytest
from tiny_folder import QUICK, make_photos

from elsa.cli import run


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("tiny") / "photos")


@pytest.fixture(scope="session")
def labels(photos):
    return photos.parent / "labels.csv"


@pytest.fixture(scope="session")
def model(photos, labels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "model"
    assert run(["fit", str(photos), "--labels", str(labels), "--out", str(folder), *QUICK]) == 0
    return folder
