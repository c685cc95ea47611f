"""How often the intervals of elsa.workspace.estimates contain the truth when most labels were asked for, not drawn.

A pile of 2,000 images, a share of them anomalies whose scores are normal with the given shift; a simulated labeller
answers rounds of 10 questions of the mix, 2 of which are the audit. The model learns meanwhile: every round moves all
scores a little. Prints, for each pile, number of rounds and figure, in percent: the share of 95% intervals that contain
the truth of the pile, in brackets their mean width, and the mean of the estimate less the truth; `-` where fewer than
half of the trials state the figure. The column `taken as random` is the mean error of the share of anomalies if all
labels were counted alike.

    python -m benchmarks.label_coverage --trials 200
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from elsa.trust.metrics import auroc
from elsa.workspace.estimates import Estimates, estimate
from elsa.workspace.events import LabelEvent, Labels
from elsa.workspace.queries import MIX, State, ask

IMAGES, BATCH, THRESHOLD = 2000, 10, 1.64
PILES = [(0.1, 1.5), (0.1, 2.5), (0.05, 2.0)]
COLUMNS = ("above", "below", "width", "error", "stated")
FIGURES = ("share", "gamma_p", "auroc", "false_alarms", "misses")
NAMES = [f"{number}.png" for number in range(IMAGES)]


def label(share: float, shift: float, rounds: int, seed: int) -> tuple[NDArray, NDArray, list[LabelEvent], Labels]:
    """Scores, truth, and what a labeller has said after so many rounds of the mix."""
    generator = np.random.default_rng(seed)
    anomaly = generator.random(IMAGES) < share
    scores = generator.standard_normal(IMAGES) + shift * anomaly
    prototypes = generator.integers(20, size=IMAGES)
    labelled, events = np.zeros(IMAGES, bool), list[LabelEvent]()
    for turn in range(rounds):
        now = scores + 0.3 * generator.standard_normal(IMAGES)  # the model of this round
        for one in ask(State(now, labelled.copy(), THRESHOLD, prototypes), MIX, BATCH, seed=seed * 1000 + turn):
            labelled[one.index] = True
            word = "anomaly" if anomaly[one.index] else "normal"
            number = len(events) + 1
            events.append(
                LabelEvent(
                    "ann", NAMES[one.index], word, str(number), strategy=one.strategy, probability=one.probability,
                    id=number,
                )
            )  # fmt: skip
    labels = Labels()
    labels.take(events)
    return scores, anomaly, events, labels


def truths(scores: NDArray, anomaly: NDArray, events: list[LabelEvent]) -> dict[str, float]:
    """The figures of the whole pile."""
    asked = {event.image for event in events}
    left = np.array([name not in asked for name in NAMES])
    return {
        "share": float(anomaly.mean()),
        "gamma_p": float(anomaly[left].mean()),
        "auroc": auroc(scores, anomaly),
        "false_alarms": float((scores[~anomaly] > THRESHOLD).mean()),
        "misses": float((scores[anomaly] <= THRESHOLD).mean()),
    }


def trial(share: float, shift: float, rounds: int, seed: int) -> tuple[dict[str, float], Estimates]:
    """The truth of one pile, and what is estimated of it."""
    scores, anomaly, events, labels = label(share, shift, rounds, seed)
    return truths(scores, anomaly, events), estimate(NAMES, scores, THRESHOLD, events, labels.of, seed=seed)


def coverage(share: float, shift: float, rounds: int, trials: int) -> dict[str, dict[str, float]]:
    """Per figure: how many stated intervals lie above and below the truth, mean width, mean error, share stated."""
    sums = {name: np.zeros(5) for name in [*FIGURES, "taken as random"]}
    for seed in range(trials):
        truth, found = trial(share, shift, rounds, seed)
        sums["taken as random"][3] += found.anomalies / (found.anomalies + found.normals) - truth["share"]
        sums["taken as random"][4] += 1
        for name in FIGURES:
            figure = getattr(found, name)
            if figure.value is not None:
                error = figure.value - truth[name]
                sums[name] += [truth[name] < figure.low, truth[name] > figure.high, figure.high - figure.low, error, 1]
    return {
        name: dict(zip(COLUMNS, [*(total[:4] / max(total[4], 1)), total[4] / trials], strict=True))
        for name, total in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--rounds", nargs="*", type=int, default=[5, 10, 30, 100])
    options = parser.parse_args()
    print("| share, shift | rounds | " + " | ".join(FIGURES) + " | taken as random |")
    print("|" + "---|" * (3 + len(FIGURES)))
    for share, shift in PILES:
        for rounds in options.rounds:
            found = coverage(share, shift, rounds, options.trials)
            cells = [_cell(found[name]) for name in FIGURES] + [f"{100 * found['taken as random']['error']:+.0f}"]
            print(f"| {share}, {shift} | {rounds} | " + " | ".join(cells) + " |", flush=True)


def _cell(one: dict[str, float]) -> str:
    if one["stated"] < 0.5:
        return "-"
    return f"{100 * (1 - one['above'] - one['below']):.0f} ({100 * one['width']:.0f}) {100 * one['error']:+.1f}"


if __name__ == "__main__":
    main()
