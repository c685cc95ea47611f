"""How often the intervals of elsa.trust.metrics contain the truth, on scores whose truth is known.

Anomaly scores are normal with mean `shift` and spread `spread`, normal images' scores are standard normal. Prints, per
figure and counts, the share of intervals with the truth below and above them, and their mean width, in percent.

    python benchmarks/interval_coverage.py --trials 1000
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
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--percentile", action="store_true", help="also the usual percentile bootstrap (slow)")
    options = parser.parse_args()
    methods = {"ours": bootstrap_intervals}
    if options.percentile:
        methods["percentile"] = percentile_intervals
    print("| method | anomalies | normals | shift, spread | figure | truth | below | above | covered | width |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for anomalies, normals in COUNTS:
        for shift, spread in SHAPES:
            truth = truths(shift, spread, anomalies, normals)
            for method, intervals in methods.items():
                found = coverage(intervals, shift, spread, anomalies, normals, options.trials)
                for name, (below, above, width) in found.items():
                    print(
                        f"| {method} | {anomalies} | {normals} | {shift:g}, {spread:g} | {name} | "
                        f"{100 * truth[name]:.1f} | {100 * below:.1f} | {100 * above:.1f} | "
                        f"{100 * (1 - below - above):.1f} | {100 * width:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
