import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "interval_coverage.py"


@pytest.mark.parametrize(
    ("anomalies", "normals", "shift", "spread"),
    [(10, 10, 3.0, 1.0), (20, 200, 0.0, 1.0), (72, 72, 1.0, 1.0)],
)
def test_intervals_contain_the_truth_as_often_as_they_say(anomalies, normals, shift, spread):
    benchmark = runpy.run_path(str(BENCHMARK))
    found = benchmark["coverage"](benchmark["bootstrap_intervals"], shift, spread, anomalies, normals, trials=400)
    for name, (below, above, _) in found.items():
        assert 1 - below - above > 0.93, name  # .95 less two standard errors of 400 trials


def test_the_usual_percentile_bootstrap_would_not():
    benchmark = runpy.run_path(str(BENCHMARK))
    below, above, _ = benchmark["coverage"](benchmark["percentile_intervals"], 3.0, 1.0, 10, 10, trials=200)["auroc"]
    assert 1 - below - above < 0.7
