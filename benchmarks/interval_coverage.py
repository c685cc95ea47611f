"""How often the intervals of elsa.trust.metrics contain the truth, on scores whose truth is known.

Anomaly scores are normal with mean `shift` and spread `spread`, normal images' scores are standard normal. Prints, for
each pair of counts, the lowest share of 95% intervals that contain the truth over four pairs of shift and spread, and
in brackets the mean width of the interval, all in percent, beside those of the usual percentile bootstrap.

    python -m benchmarks.interval_coverage --trials 300
"""

import argparse
import math

import numpy as np
from scipy.stats import norm

from elsa.trust.metrics import _auroc, average_precision, bootstrap_intervals, fpr_at_recall

COUNTS = [(5, 5), (10, 10), (10, 100), (20, 20), (20, 200), (40, 200), (72, 10), (72, 72), (72, 300), (200, 1000)]
SHAPES = [(0.0, 1.0), (1.0, 1.0), (2.0, 1.5), (3.0, 1.0)]


def truths(shift: float, spread: float, anomalies: int, normals: int) -> dict[str, float]:
    """The figures of infinitely many images, the share of anomalies being that of the sample."""
    share = anomalies / (anomalies + normals)
    recall = (np.arange(200_000) + 0.5) / 200_000
    false = norm.sf(norm.isf(recall, shift, spread))
    return {
        "auroc": float(norm.cdf(shift / math.hypot(1, spread))),
        "aupr": float((share * recall / (share * recall + (1 - share) * false)).mean()),
        "fpr": float(norm.sf(norm.isf(0.95, shift, spread))),
    }


def percentile_intervals(a, n, confidence, seed, replicates) -> dict[str, tuple[float, float]]:
    """The usual bootstrap, for comparison: images drawn with replacement, percentiles of the plain figures."""
    generator = np.random.default_rng(seed)
    draws = [(generator.choice(a, len(a)), generator.choice(n, len(n))) for _ in range(replicates)]
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    formulas = {"auroc": _auroc, "aupr": average_precision, "fpr": fpr_at_recall}
    return {name: tuple(np.quantile([f(*draw) for draw in draws], tails)) for name, f in formulas.items()}


def coverage(intervals, shift, spread, anomalies, normals, trials, replicates=300, seed=0) -> dict[str, np.ndarray]:
    """Per figure: shares of trials with the truth below and above the interval, and the interval's mean width."""
    generator = np.random.default_rng(seed)
    truth = truths(shift, spread, anomalies, normals)
    sums = {name: np.zeros(3) for name in truth}
    for trial in range(trials):
        a, n = shift + spread * generator.standard_normal(anomalies), generator.standard_normal(normals)
        for name, (low, high) in intervals(a, n, 0.95, trial, replicates).items():
            sums[name] += [truth[name] < low, truth[name] > high, high - low]
    return {name: total / trials for name, total in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    trials = parser.parse_args().trials
    methods = {"ours": bootstrap_intervals, "percentile": percentile_intervals}
    figures = ("auroc", "aupr", "fpr")
    columns = [f"{figure} {method}" for figure in figures for method in methods]
    print("| anomalies | normals | " + " | ".join(columns) + " |")
    print("|" + "---|" * (2 + len(columns)))
    for anomalies, normals in COUNTS:
        cells = []
        found = {
            method: [coverage(intervals, *shape, anomalies, normals, trials) for shape in SHAPES]
            for method, intervals in methods.items()
        }
        for figure in figures:
            for method in methods:
                below, above, width = np.array([result[figure] for result in found[method]]).T
                cells.append(f"{100 * (1 - below - above).min():.0f} ({100 * width.mean():.0f})")
        print(f"| {anomalies} | {normals} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
