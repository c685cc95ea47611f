"""`elsa report`: what a MODEL, its SOURCE or a WORKSPACE know, gathered for one HTML file."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from elsa.data.audit import audit
from elsa.data.load import load_images
from elsa.data.shards import Shards
from elsa.data.sources import Source, open_source
from elsa.data.tables import read_table
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.head import ElsaHead
from elsa.jobs import choose_device, hash_data
from elsa.output import check_writable, storable
from elsa.progress import Progress
from elsa.report.chart import Chart, Line
from elsa.report.compose import Facts, compose, describe
from elsa.report.page import Table, write_report
from elsa.saved import open_model
from elsa.trust.contamination import LEAST_OF_EACH_KIND, Contamination, estimate_contamination
from elsa.trust.crossfit import crossfit_scores
from elsa.trust.explain import heat_map, most_telling, space_of
from elsa.trust.learning_curve import CurvePoint, learning_curve, will_more_labels_help
from elsa.trust.metrics import Figure, evaluate
from elsa.trust.stress import StressRow, stress

AT_ONCE = 1024
JUDGED = 4000  # images refitted five times to judge the others without having seen them; half a minute of one core
MOST_TYPES = 12  # each takes three fits
KIND_COLUMNS = ("kind", "type", "defect", "class")


def report(
    place: Path,
    out: Path,
    *,
    source: Path | None,
    labels: Path | None,
    plots: Path | None,
    device: str,
    progress: Progress,
) -> list[str]:
    """Write the report on a MODEL or WORKSPACE; what to tell the user about it."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {out}: the report is one HTML file; end the name with .html")
    check_writable(out)
    if plots is not None:
        from elsa.report.plots import check_plots

        check_plots(plots)
    with tempfile.TemporaryDirectory(prefix="elsa-") as cache:  # used only where memory does not hold the images
        if (place / "workspace.json").exists():
            if source is not None or labels is not None:
                raise UserError(
                    f"{place} is a workspace and knows its source and labels: leave out --source and --labels"
                )
            facts = workspace_facts(place, device, progress)
        else:
            facts = model_facts(place, source, labels, Path(cache), device, progress)
        composed = compose(facts)
    write_report(out, composed)
    lines = [f"Written: {out} ({out.stat().st_size / 1e6:.1f} MB)"]
    if plots is not None:
        from elsa.report.plots import write_plots

        lines.append(f"Plots: {', '.join(write_plots(composed, plots))} in {plots}")
    return [*facts.notes, *lines]


def model_facts(
    model: Path, source: Path | None, labels: Path | None, cache: Path, device: str, progress: Progress
) -> Facts:
    """What a MODEL knows and, where its SOURCE is named, what its images show."""
    if labels is not None and source is None:
        raise UserError("--labels names labels of images: add --source SOURCE, the images to report on")
    detector, about = open_model(model, choose_device(device), progress)
    facts = Facts(
        title=f"Report on {model.name}",
        provenance=describe(about),
        calibration=detector.calibration_,
        history=detector.history_ if isinstance(detector, Elsa) else (),
    )
    if source is None:
        return replace(
            facts,
            notes=[
                "A MODEL holds no images. Name some with --source SOURCE (those it was fitted on, or others) to see "
                "them ranked, with heat maps, prototypes, suspects, an audit and, where they have labels, figures."
            ],
        )
    if not about["preprocessing"]:
        raise UserError(f"{model} was fitted on vectors, of which there are no pictures: leave out --source {source}")
    opened = open_source(source, labels=labels)
    found = audit(opened, progress)
    loaded = load_images(opened, **about["preprocessing"], cache=cache, progress=progress)
    learned_from = hash_data(loaded) == about["data"].get("sha256")
    seen = look(detector, loaded.images, progress)
    if learned_from and isinstance(detector, ElsaHead):
        # scored anew, each image would be its own neighbour
        seen = replace(seen, scores=detector.train_scores_.double().numpy())
    notes = broken_notes(loaded.broken)
    if not learned_from:
        notes.append(
            "These are not the images and labels the model was fitted on. If they are the same images with other "
            "labels, the figures flatter."
        )
    facts = replace(
        facts,
        names=loaded.names,
        labels=loaded.labels,
        kinds=kinds_of(loaded.names, loaded.extra, labels),
        learned_from=learned_from,
        pictures=lambda rows: take(loaded.images, rows),
        heat=lambda images: heat_map(detector, images, progress),
        audit=replace(found, source=opened.path.name),
        notes=notes,
    )
    return judged(with_looks(facts, seen, detector), detector, about, progress)


@dataclass(frozen=True)
class Looks:
    """What one pass over the images of a detector gives."""

    scores: NDArray[np.float64]
    vectors: Tensor | None
    """Unit vectors in half precision: 100,000 of 1,280 numbers are 256 MB."""
    prototypes: NDArray[np.int64] | None


def look(detector: Any, images: Any, progress: Progress) -> Looks:
    """Scores, vectors and prototypes of all images, a batch at a time, each image embedded once."""
    space = space_of(detector)
    scores, vectors, prototypes = [], [], []
    for start in range(0, len(images), AT_ONCE):
        part = images[start : start + AT_ONCE]
        if space is None:
            scores.append(detector.anomaly_score(part).double())
        else:
            z_BD = space.vectors(part)
            scores.append(detector.anomaly_score(z_BD if isinstance(detector, ElsaHead) else part).double())
            prototypes.append(space.prototype_of(z_BD))
            vectors.append(z_BD.half())
        progress("score", min(len(images), start + AT_ONCE), len(images), {})
    if space is None:
        return Looks(torch.cat(scores).numpy(), None, None)
    return Looks(torch.cat(scores).numpy(), torch.cat(vectors), torch.cat(prototypes).numpy())


def with_looks(facts: Facts, seen: Looks, detector: Any) -> Facts:
    """The facts with scores, prototypes and vectors of their images."""
    if seen.vectors is None or seen.prototypes is None:
        return replace(facts, scores=seen.scores)
    vectors = seen.vectors
    return replace(
        facts,
        scores=seen.scores,
        prototypes=seen.prototypes,
        num_prototypes=int(seen.prototypes.max()) + 1,
        vectors=lambda rows: normalize(vectors[torch.as_tensor(rows, dtype=torch.long)].float(), dim=1),
    )


def judged(facts: Facts, detector: Any, about: dict[str, Any], progress: Progress) -> Facts:
    """The facts with figures: on images the model has learned from, by heads fitted without the images they judge."""
    words = np.asarray(facts.labels)
    counts = {word: int((words == word).sum()) for word in ("normal", "anomaly", "")}
    assert facts.scores is not None
    if not counts["normal"] + counts["anomaly"]:
        return facts
    if not facts.learned_from:
        return replace(facts, evaluation=evaluate(facts.scores, facts.labels))
    if not isinstance(detector, ElsaHead) or facts.vectors is None:
        note = "The figures are measured on images the model has learned from, and flatter."
        return replace(facts, evaluation=evaluate(facts.scores, facts.labels), notes=[*facts.notes, note])
    if min(counts["normal"], counts["anomaly"]) < LEAST_OF_EACH_KIND:
        return replace(facts, notes=[*facts.notes, _too_few(counts)])
    try:
        return _judged_apart(facts, facts.vectors, about, progress)
    except UserError as error:  # so few images that a head cannot do without a fifth of them
        return replace(facts, notes=[*facts.notes, f"No figures by heads fitted anew: {error}."])


def _judged_apart(
    facts: Facts, vectors: Callable[[Sequence[int]], Tensor], about: dict[str, Any], progress: Progress
) -> Facts:
    """Figures, contamination, learning curve and unknown types, all by heads fitted without what they judge."""
    words = np.asarray(facts.labels)
    rows = most_telling(list(facts.labels), JUDGED)
    vectors_ND, kept = vectors(rows), words[rows].tolist()
    settings = about["detector"]["settings"]

    def build() -> ElsaHead:
        return ElsaHead(seed=about["seed"], **settings)

    scores, word_N = crossfit_scores(vectors_ND, kept, build, progress=progress), words[rows]
    only = f" They look at {len(rows):,} of the images, labelled ones first." if len(rows) < len(words) else ""
    note = f"The figures come from five heads fitted anew, each judging images it has not learned from.{only}"
    facts = replace(facts, evaluation=evaluate(scores, kept), judged_apart=True, notes=[*facts.notes, note])
    if (word_N == "").any():
        groups = (scores[word_N == word] for word in ("", "normal", "anomaly"))
        facts = replace(facts, contamination=estimate_contamination(*groups))
    curve = learning_curve(vectors_ND, kept, None, build, progress=progress)
    facts = replace(facts, charts=[*facts.charts, *label_chart(curve)])
    kinds = [facts.kinds[row] for row in rows] if facts.kinds else []
    counted = Counter(kind for kind, word in zip(kinds, kept, strict=False) if kind and word == "anomaly")
    enough = {kind for kind, count in counted.most_common(MOST_TYPES) if count >= LEAST_OF_EACH_KIND}
    if not enough or len(counted) < 2:
        return facts
    asked = [kind if kind in enough else "" for kind in kinds]
    return replace(facts, tables=[stress_table(stress(vectors_ND, kept, asked, build, progress=progress))])


def _too_few(counts: dict[str, int]) -> str:
    return (
        f"No figures: there are {counts['normal']} labelled normal images and {counts['anomaly']} labelled anomalies; "
        f"the model has learned from them. With {LEAST_OF_EACH_KIND} of each, models fitted on the others judge them."
    )


def label_chart(curve: Sequence[CurvePoint]) -> list[Chart]:
    """AUROC over the number of labels, and what its last step shows."""
    stated = [point for point in curve if point.auroc.value is not None]
    if len(stated) < 2:
        return []
    value, low, high = ([100 * getattr(point.auroc, end) for point in stated] for end in ("value", "low", "high"))
    line = Line("AUROC in percent, 95% interval", "accent", [float(p.labels) for p in stated], value, low, high)
    explained = (
        "Fitted with some of the labels and judged on others. " + will_more_labels_help(curve) + ". Nothing is "
        "extrapolated."
    )
    return [Chart("Will more labels help?", explained, "labels learned from", "AUROC in percent", [line])]


def stress_table(rows: Sequence[StressRow]) -> Table:
    """How well each type of anomaly is found by a model never shown it."""

    def told(figure: Figure) -> str:
        if figure.value is None or figure.low is None or figure.high is None:
            return "too few to say"
        return f"{100 * figure.value:.1f} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"

    return Table(
        "Anomalies of a kind the model was never shown",
        f"For each type with {LEAST_OF_EACH_KIND} labelled anomalies or more, a model is fitted without it, the "
        "hardest first. AUROC in percent against labelled normal images, with 95% intervals. Expect the next kind "
        "nobody thought of to fare like the first.",
        ("Type", "Labelled", "Never shown", "Shown"),
        [(row.kind, f"{row.anomalies:,}", told(row.never_shown), told(row.shown)) for row in rows],
    )


def workspace_facts(folder: Path, device: str, progress: Progress) -> Facts:
    """What a labelling workspace knows: nothing is embedded or scored again."""
    from elsa.workspace.estimates import estimate
    from elsa.workspace.session import read_view
    from elsa.workspace.store import open_store

    about = _read_json(folder / "workspace.json")
    images = _read_json(folder / "images.json")
    names = images["names"]
    with open_store(about["store"] or folder) as store:
        model, said, events = store.current_model(), store.labels(), store.events()
    if model is None:
        raise UserError(f"{folder} holds no model yet: run `elsa label` until it has fitted one")
    view = read_view(folder, model, len(names))
    detector, model_about = open_model(folder / model.folder, choose_device(device), progress)
    shards = Shards(folder / images["shards"], images["counts"], tuple(images["image_shape"]))
    opened, notes = _source_of(about)
    given = {} if opened is None else dict(zip(map(storable, opened.names), opened.labels, strict=True))
    words = [given.get(name, "") for name in names]
    for row, name in enumerate(names):
        label = said.get(name)
        if label is not None and label.event.sha256 in ("", images["sha256"][row]):
            words[row] = label.training_word
    vectors = np.load(folder / "embeddings.npy", mmap_mode="r")
    people = sorted({event.who for event in events})
    conflicts = sum(label.conflict for label in said.values())
    if conflicts:
        notes.append(f"{conflicts:,} images are labelled differently by different people; they count as unlabelled.")
    facts = Facts(
        title=f"Report on {folder.name}",
        provenance={
            **describe(model_about),
            "model": model.folder,
            "labels": f"{len(events):,} events by {', '.join(people)}" if events else "none said on the page",
        },
        calibration=detector.calibration_,
        names=names,
        labels=words,
        kinds=[] if opened is None else _kinds_by_name(opened, about["labels"] and Path(about["labels"]), names),
        scores=view.scores,
        learned_from=True,
        prototypes=view.prototypes.astype(np.int64),
        num_prototypes=model_about["workspace"]["prototypes"],
        vectors=lambda rows: normalize(torch.from_numpy(np.array(vectors[np.asarray(rows)])).float(), dim=1),
        pictures=lambda rows: take(shards, rows),
        heat=lambda images: heat_map(detector, images, progress),
        audit=None if opened is None else replace(audit(opened, progress), source=opened.path.name),
        notes=[*notes, *broken_notes([(name, why) for name, why in images["broken"]])],
    )
    facts = judged(facts, detector, model_about, progress)
    # asked labels say nothing about the rest; the audit among them does
    found = estimate(names, view.scores, view.threshold, events, said, [given.get(name, "") for name in names])
    if facts.evaluation is not None:
        note = "Labels were asked for, not drawn: the figures are of the images that were asked for."
        facts = replace(facts, notes=[*facts.notes, note])
    if found.gamma_p.value is None or found.gamma_p.low is None or found.gamma_p.high is None:
        return replace(facts, notes=[*facts.notes, f"{found.gamma_p.line(found.confidence)}."])
    how = f"from an audit of {found.audits:,} images drawn at random"
    share = Contamination(found.gamma_p.value, found.gamma_p.low, found.gamma_p.high, how)
    return replace(facts, contamination=share)


def take(images: Any, rows: Sequence[int]) -> Tensor:
    """The images in these rows, in memory or in shards."""
    return images[torch.as_tensor(rows, dtype=torch.long)]


def kinds_of(names: Sequence[str], extra: dict[str, list[Any]], labels: Path | None) -> list[str]:
    """What a column of the table of labels, or else of the source, says each image shows; empty without one."""
    columns = {} if labels is None else read_table(labels)
    of = dict(zip(map(str, columns.get("path", [])), _kind_column(columns), strict=False))
    if of:
        return [of.get(name, "") for name in names]
    return _kind_column(extra)


def _kind_column(columns: dict[str, list[Any]]) -> list[str]:
    column = next((name for name in KIND_COLUMNS if name in columns), None)
    return [] if column is None else ["" if value is None else str(value) for value in columns[column]]


def broken_notes(broken: Sequence[tuple[str, str]]) -> list[str]:
    """What could not be read."""
    if not broken:
        return []
    shown = "; ".join(f"{name}: {why}" for name, why in broken[:3])
    rest = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
    return [f"Left out, could not be read ({len(broken):,}): {shown}{rest}."]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): run `elsa label` until the images are embedded") from error


def _source_of(about: dict[str, Any]) -> tuple[Source | None, list[str]]:
    """The source a workspace was made for, if it still lies there."""
    labels = about["labels"]
    try:
        return open_source(Path(about["source"]), labels=Path(labels) if labels else None), []
    except UserError as error:
        return None, [f"No audit, and no labels but those said on the page: {error}."]


def _kinds_by_name(opened: Source, labels: Path | None, names: Sequence[str]) -> list[str]:

    kinds = kinds_of(opened.names, opened.extra, labels)
    of = dict(zip(map(storable, opened.names), kinds, strict=True)) if kinds else {}
    return [of.get(name, "") for name in names] if of else []
