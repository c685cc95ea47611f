"""From what is known of a model and its images to a Report: what to show, in which order, and what to say about it.

Nothing is read or written here, and however many images there are, at most 288 pictures are shown.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa.data.audit import Audit
from elsa.errors import UserError
from elsa.prototypes import spherical_kmeans
from elsa.report.chart import Chart, Line
from elsa.report.heat import overlay, strength_of
from elsa.report.histogram import Series
from elsa.report.page import Gallery, Group, Groups, Picture, Report, Row, Table
from elsa.trust.calibrate import false_alarm_range, score_threshold
from elsa.trust.contamination import Contamination
from elsa.trust.metrics import Evaluation, Figure

SHOWN = 24  # pictures of a gallery
PROTOTYPES, PER_GROUP = 16, 6
KINDS = 8
MOST_OF_A_KIND = 300  # images clustered into kinds, labelled ones and called ones each
CENTRED_ON = 500  # members of a prototype whose mean is its centre
RATES = (0.01, 0.05, 0.10, 0.20)
RATE = 0.05


@dataclass(frozen=True)
class Facts:
    """What a report is made of; row i of names, labels, kinds, scores and prototypes is one image."""

    title: str
    provenance: dict[str, str]
    calibration: Tensor
    """Scores of the held-out images."""
    history: Sequence[dict[str, float]] = ()
    """Loss and early-stop score of each epoch of a fit from scratch."""
    num_prototypes: int = 0
    names: Sequence[str] = ()
    labels: Sequence[str] = ()
    kinds: Sequence[str] = ()
    """What a column of the source says an image shows, such as the kind of defect."""
    scores: NDArray[np.float64] | None = None
    learned_from: bool = False
    """Whether the model was fitted on these images, which flatters every figure measured on them."""
    prototypes: NDArray[np.int64] | None = None
    vectors: Callable[[Sequence[int]], Tensor] | None = None
    """Unit vectors of the images in these rows."""
    pictures: Callable[[Sequence[int]], Tensor] | None = None
    """The images uint8 [B, C, H, W] in these rows."""
    heat: Callable[[Tensor], Tensor] | None = None
    """Their heat maps."""
    evaluation: Evaluation | None = None
    judged_apart: bool = False
    """Whether the evaluation is of models that have not learned from what they judge."""
    contamination: Contamination | None = None
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    audit: Audit | None = None
    notes: Sequence[str] = ()


@dataclass
class Shown:
    """Makes pictures of rows, and remembers their heat maps: an image may stand in several galleries."""

    facts: Facts
    heats: dict[int, Tensor] = field(default_factory=dict)

    def pictures(self, rows: Sequence[int], heated: bool = False) -> list[Picture]:
        """The images of these rows with what is known of them."""
        facts = self.facts
        if not len(rows) or facts.pictures is None or facts.scores is None:
            return []
        images = facts.pictures(rows)
        new = [place for place, row in enumerate(rows) if row not in self.heats]
        if heated and facts.heat is not None and new:
            for place, heat in zip(new, facts.heat(images[new]), strict=True):
                strength = strength_of(float(facts.scores[rows[place]]), facts.calibration)
                self.heats[rows[place]] = overlay(images[place], heat, strength)
        return [
            Picture(
                images[place],
                float(facts.scores[row]),
                self._caption(row),
                facts.labels[row],
                self.heats.get(row) if heated else None,
            )
            for place, row in enumerate(rows)
        ]

    def _caption(self, row: int) -> str:
        kind = self.facts.kinds[row] if self.facts.kinds else ""
        name = self.facts.names[row].encode(errors="backslashreplace").decode()
        return f"{name} ({kind})" if kind else name


def compose(facts: Facts) -> Report:
    """The report; parts about which nothing is known are left out, and a note says how to get them."""
    threshold, no_threshold = _threshold(facts.calibration)
    notes = [*facts.notes, *([f"No verdicts: {no_threshold}"] if threshold is None else [])]
    if facts.contamination is not None:
        line = facts.contamination.line()
        notes.append(f"{line[0].upper()}{line[1:]}.")
    if facts.evaluation is not None:
        figures = (facts.evaluation.auroc, facts.evaluation.aupr, facts.evaluation.fpr_at_95_recall)
        notes += [f"{figure.name} is not stated: {figure.reason}." for figure in figures if figure.value is None]
    shown = Shown(facts)
    return Report(
        title=facts.title,
        lead=_lead(facts),
        tiles=_tiles(facts, threshold),
        notes=notes,
        rows_title="How well the scores separate",
        rows_explanation=_metrics_explained(facts),
        rows_head=("Figure", "percent"),
        rows=_metric_rows(facts.evaluation),
        galleries=_galleries(facts, shown, threshold),
        histogram_explanation=_histogram_explained(facts),
        histogram=_series(facts),
        threshold=threshold,
        tables=[*facts.tables, _thresholds(facts)],
        groups=[_kinds(facts, shown, threshold), _prototypes(facts, shown)],
        charts=[*facts.charts, *_training(facts.history)],
        findings=[] if facts.audit is None else facts.audit.lines(),
        provenance=facts.provenance,
    )


def _threshold(calibration: Tensor) -> tuple[float | None, str]:
    try:
        return score_threshold(calibration, RATE), ""
    except UserError as error:
        return None, str(error)


def _lead(facts: Facts) -> str:
    if facts.scores is None:
        return (
            f"What the model itself can tell. {len(facts.calibration):,} images were held out of its training; their "
            "scores are what a normal image's score is compared with."
        )
    whose = "the images the model learned from" if facts.learned_from else "these images"
    return (
        f"{len(facts.scores):,} images, ranked by how little they look like what is normal among {whose}. "
        "Higher scores are more anomalous. Red in a heat map marks the places without which the score would fall most."
    )


def _tiles(facts: Facts, threshold: float | None) -> list[tuple[str, str]]:
    if facts.scores is None:
        return [(f"{len(facts.calibration):,}", "images held out to calibrate on")]
    words = Counter(facts.labels)
    tiles = [(f"{len(facts.scores):,}", f"images; {words['normal']:,} labelled normal, {words['anomaly']:,} anomaly")]
    if threshold is not None:
        called = int((facts.scores > threshold).sum())
        tiles.append((f"{called:,}", f"called anomalies at a false-alarm rate of {RATE:.0%}"))
    if facts.contamination is not None and facts.contamination.rate is not None:
        found = facts.contamination
        tiles.append(
            (
                f"{100 * facts.contamination.rate:.1f}%",
                f"of the unlabelled images are anomalies ({100 * found.low:.1f}% to {100 * found.high:.1f}%)",
            )
        )
    if facts.evaluation is not None and facts.evaluation.auroc.value is not None:
        auroc = facts.evaluation.auroc
        tiles.append((_percent(auroc.value), f"AUROC in percent ({_percent(auroc.low)} to {_percent(auroc.high)})"))
    return tiles


def _percent(share: float | None) -> str:
    assert share is not None
    return f"{100 * share:.1f}"


def _metrics_explained(facts: Facts) -> str:
    words = Counter(facts.labels)
    text = (
        f"On {words['anomaly']:,} labelled anomalies and {words['normal']:,} labelled normal images, with 95% "
        "intervals. AUROC: the chance that an anomaly scores above a normal image, 50 is guessing. AUPR: precision "
        "averaged over the anomalies. FPR: the share of normal images called when 95% of the anomalies are."
    )
    if facts.learned_from and not facts.judged_apart:
        text += " The model has learned from these labels: expect less on new images."
    return text


def _metric_rows(found: Evaluation | None) -> list[Row]:
    if found is None:
        return []
    notes = {"AUROC": "higher is better", "AUPR": "higher is better", "FPR at 95% recall": "lower is better"}
    figures: list[Figure] = [found.auroc, found.aupr, found.fpr_at_95_recall]
    return [
        Row(figure.name, 100 * figure.value, 100 * figure.low, 100 * figure.high, notes[figure.name])
        for figure in figures
        if figure.value is not None and figure.low is not None and figure.high is not None
    ]


def _histogram_explained(facts: Facts) -> str:
    if facts.scores is None:
        return "The held-out images: what normal looks like, with whatever hides among it."
    return (
        "Each group is drawn to its own highest bin, so that a few anomalies stay visible. Right of the threshold "
        f"images are called anomalies; {RATE:.0%} of normal images are expected there."
    )


def _series(facts: Facts) -> list[Series]:
    if facts.scores is None:
        return [Series("held-out images", "unlabelled", facts.calibration.tolist())]
    groups = (("unlabelled", "", "unlabelled"), ("labelled normal", "normal", "normal"))
    words = np.asarray(facts.labels)
    return [
        Series(f"{name} ({int((words == word).sum()):,})", kind, facts.scores[words == word])
        for name, word, kind in (*groups, ("labelled anomaly", "anomaly", "anomaly"))
        if (words == word).any()
    ]


def _thresholds(facts: Facts) -> Table:
    rows = []
    for rate in RATES:
        try:
            limit = score_threshold(facts.calibration, rate)
        except UserError:
            continue  # so low a rate takes more held-out images than there are
        low, high = false_alarm_range(len(facts.calibration), rate)
        row = [f"{rate:.0%}", f"{limit:.4f}", f"{100 * low:.1f}% to {100 * high:.1f}%"]
        if facts.scores is not None:
            row.append(f"{int((facts.scores > limit).sum()):,}")
        rows.append(row)
    return Table(
        "Thresholds",
        f"From {len(facts.calibration):,} held-out images: the score above which an image is called, and where the "
        "share of false alarms lies with this one calibration set (95%).",
        (
            "False alarms asked for",
            "Threshold",
            "False alarms to expect",
            *(["Images called"] if rows and facts.scores is not None else []),
        ),
        rows,
    )


def _galleries(facts: Facts, shown: Shown, threshold: float | None) -> list[Gallery]:
    if facts.scores is None:
        return []
    order = np.argsort(-facts.scores, kind="stable")
    words = np.asarray(facts.labels)
    hidden = order[words[order] != "anomaly"][:SHOWN].tolist()
    galleries = [
        Gallery(
            "Suspects",
            "Images nobody called an anomaly that score highest: what to look at first, and in a training set what to "
            "label or take out before the next fit.",
            shown.pictures(hidden, heated=True),
        )
    ]
    if (words == "anomaly").any():
        galleries.append(
            Gallery("Most anomalous", "The highest scores of all.", shown.pictures(order[:SHOWN].tolist(), heated=True))
        )
    if threshold is not None:
        near = np.argsort(np.abs(facts.scores - threshold), kind="stable")[:SHOWN]
        near = near[np.argsort(-facts.scores[near], kind="stable")]
        galleries.append(
            Gallery(
                "Nearest to the threshold",
                f"Where the verdict hangs by a hair ({threshold:.3f}); labels here move it most.",
                shown.pictures(near.tolist()),
            )
        )
    galleries.append(Gallery("Most normal", "The lowest scores.", shown.pictures(order[::-1][:SHOWN].tolist())))
    return [gallery for gallery in galleries if gallery.pictures]


def _prototypes(facts: Facts, shown: Shown) -> Groups:
    groups = []
    if facts.prototypes is not None and facts.vectors is not None:
        counts = np.bincount(facts.prototypes, minlength=facts.num_prototypes)
        for number in np.argsort(-counts, kind="stable")[:PROTOTYPES].tolist():
            members = np.flatnonzero(facts.prototypes == number)
            if len(members):
                share = 100 * len(members) / len(facts.prototypes)
                groups.append(
                    Group(
                        f"Prototype {number}",
                        f"nearest to {len(members):,} images ({share:.1f}%)",
                        shown.pictures(central(facts.vectors, members.tolist(), PER_GROUP)),
                    )
                )
    return Groups(
        "What is normal: the prototypes",
        f"The images at the centre of the {len(groups)} largest of {facts.num_prototypes} prototypes. Something here "
        "that is not normal is a sign of pollution.",
        groups,
    )


def central(vectors: Callable[[Sequence[int]], Tensor], members: Sequence[int], most: int) -> list[int]:
    """The members of a group nearest to its mean, nearest first."""
    some = spread_over(members, CENTRED_ON)
    z_ND = vectors(some)
    return [some[i] for i in (z_ND @ z_ND.mean(dim=0)).argsort(descending=True, stable=True)[:most].tolist()]


def spread_over(rows: Sequence[int], most: int) -> list[int]:
    """At most so many of the rows, evenly over all of them."""
    return [rows[i * len(rows) // most] for i in range(most)] if len(rows) > most else list(rows)


def _kinds(facts: Facts, shown: Shown, threshold: float | None) -> Groups:
    """Labelled anomalies and what is called one, in groups of look-alikes: those without a label are new kinds."""
    groups = []
    if facts.scores is not None and facts.vectors is not None:
        words, scores = np.asarray(facts.labels), facts.scores
        known = spread_over(np.flatnonzero(words == "anomaly").tolist(), MOST_OF_A_KIND)
        order = np.argsort(-facts.scores, kind="stable")
        called = order[words[order] == ""]
        if threshold is not None:
            called = called[facts.scores[called] > threshold]
        rows = [*known, *called[:MOST_OF_A_KIND].tolist()]
        for members in look_alikes(facts.vectors, rows):
            labelled = [row for row in members if words[row] == "anomaly"]
            title = "Known" if labelled else "Never labelled"
            told = Counter(facts.kinds[row] for row in labelled if facts.kinds and facts.kinds[row])
            if told:
                title += ": " + ", ".join(word for word, _ in told.most_common(2))
            best = sorted(members, key=lambda row: (words[row] == "anomaly", scores[row]), reverse=True)
            note = f"{len(labelled):,} labelled, {len(members) - len(labelled):,} called by the model"
            groups.append((not labelled, Group(title, note, shown.pictures(best[:PER_GROUP]))))
    groups.sort(key=lambda pair: not pair[0])
    return Groups(
        "Kinds of anomalies",
        "Labelled anomalies and unlabelled images above the threshold, grouped by how alike they look to the model; "
        "groups without any label come first: one label each tells whether a new kind of anomaly is there, or a rare "
        "sort of normal.",
        [group for _, group in groups],
    )


def look_alikes(vectors: Callable[[Sequence[int]], Tensor], rows: Sequence[int]) -> list[list[int]]:
    """The rows in at most eight groups by their vectors, largest first."""
    count = min(KINDS, len(rows) // 5)
    if count < 1:
        return []
    z_ND = vectors(rows)
    centres_KD = spherical_kmeans(z_ND, count, torch.Generator().manual_seed(0))
    group_N = (z_ND @ centres_KD.T).argmax(dim=1)
    found = [[rows[i] for i in (group_N == k).nonzero().flatten().tolist()] for k in range(count)]
    return sorted((members for members in found if members), key=len, reverse=True)


def _training(history: Sequence[dict[str, float]]) -> list[Chart]:
    if len(history) < 2:
        return []
    epochs = [float(number) for number in range(1, len(history) + 1)]
    names = {"loss": ("Loss of the fine-tuning", "accent"), "early_stop": ("Early-stop score", "normal")}
    explained = {
        "loss": "The mean loss of each epoch.",
        "early_stop": "How well held-out images are told from strongly distorted copies of themselves; the epoch with "
        "the highest score was kept. It needs no labels.",
    }
    return [
        Chart(
            title,
            explained[key],
            "epoch",
            title.lower(),
            [Line(title.lower(), kind, epochs, [e[key] for e in history])],
        )
        for key, (title, kind) in names.items()
    ]


def describe(about: dict[str, Any]) -> dict[str, str]:
    """What model.json says of where the model comes from."""
    counts = about.get("data", {})
    labels = ", ".join(f"{count:,} {word}" for word, count in counts.get("labels", {}).items())
    facts = {
        "command": about.get("command", ""),
        "detector": about["class"],
        "fitted on": f"{counts['images']:,} images ({labels})" if counts else "",
        "sha256 of the data": counts.get("sha256", counts.get("key", "")),
        "seed": str(about.get("seed", "")),
        "seconds": str(about.get("seconds", "")),
        "settings": ", ".join(f"{k}={v}" for k, v in about["detector"].get("settings", {}).items()),
        "preprocessing": ", ".join(f"{k}={v}" for k, v in about.get("preprocessing", {}).items()),
        **about.get("versions", {}),
    }
    return {name: text for name, text in facts.items() if text}
