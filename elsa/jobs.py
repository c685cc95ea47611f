"""What the commands do: open a source, decode it, fit or score a detector, write the result."""

import hashlib
import math
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from elsa import __version__, distributed
from elsa.config import ElsaConfig, parse_settings
from elsa.data.load import ImageSet, load_images
from elsa.data.shards import Shards
from elsa.data.sources import Source, open_source
from elsa.data.vectors import holds_vectors
from elsa.detectors import build as build_detector
from elsa.detectors import detector_class
from elsa.elsa import Elsa
from elsa.encoders import PRETRAINED
from elsa.errors import UserError
from elsa.output import check_writable
from elsa.progress import Progress, silent
from elsa.saved import Detector, open_model, save_model
from elsa.ship.bulk import check_views, is_folder, score_in_bulk
from elsa.ship.bulk_table import SCORED, Judge, Summary, write_ranked
from elsa.trust.calibrate import check_fdr, discovery_threshold, least_discoveries, score_threshold
from elsa.trust.metrics import Evaluation
from elsa.trust.metrics import evaluate as evaluate_scores

DEFAULT_FALSE_ALARMS = 0.05
FROM_SCRATCH = ("resnet18", "tiny")
PRETRAINED_AS_ELSA = ("elsa+", "elsa", "csi", "simclr")  # they share encoder, presets and checkpoints
NO_CALIBRATION = "No p-values and verdicts: with fewer views scores are others than those the model was calibrated on"
# Forward and backward of resnet18 at 32 px on the 2 cores of a small cloud machine; others are within a factor of 4.
VIEWS_PER_SECOND_ON_CPU = 40
HASH_BATCH = 1024


def fit_source(
    source: Path,
    labels: Path | None,
    out: Path,
    *,
    method: str | None,
    encoder: str | None,
    size: int | None,
    resize: str,
    settings: Sequence[str],
    seed: int,
    device: str,
    resume: bool,
    command: str,
    progress: Progress,
) -> list[str]:
    """Fit a detector on a SOURCE and write its MODEL folder; what to tell the user about it."""
    began = time.monotonic()
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    _check_model_place(out, checkpoint, resume or distributed.was_restarted())
    opened = open_source(source, labels=labels)
    device = distributed.join(choose_device(device))
    if not distributed.is_first():
        progress = silent
    build = _plan(method, encoder, settings, device, opened, checkpoint)
    detector = build(seed=seed, device=device, progress=progress)  # refuses wrong settings before hours of decoding
    if distributed.num_processes() > 1 and not isinstance(detector, Elsa):
        raise UserError(f"--method {method or 'elsa-head'} trains in one process: start it without torchrun")
    cache = out.with_name(f"{out.name}.cache")
    with distributed.first_before_others():
        loaded = load_images(opened, size=size, resize=resize, cache=cache, progress=progress)
    detector.fit(loaded.images, loaded.labels)
    if not detector.calibration_.isfinite().all():
        checkpoint.unlink(missing_ok=True)  # to go on from there would lead here again
        raise UserError(
            "the training diverged, its scores are not finite numbers: lower the learning rate or leave it at its "
            "default; nothing was written"
        )
    if not distributed.is_first():
        distributed.leave()
        return []
    about = {
        "command": command,
        "seed": seed,
        "preprocessing": asdict(loaded.decoding) if loaded.decoding else {},  # vectors have none
        "data": {"sha256": hash_data(loaded), "images": len(loaded.names), "labels": _count_labels(loaded)},
        "versions": versions(),
        "seconds": round(time.monotonic() - began, 1),
    }
    save_model(detector, out, about)
    checkpoint.unlink(missing_ok=True)
    distributed.leave()
    return [
        *_broken_lines(len(loaded.broken), loaded.broken),
        *_cache_lines(loaded),
        f"Fitted on {len(loaded.names):,} images ({_count_words(loaded)}) in {about['seconds']:.0f} s: {out}",
        f"Next: elsa score {out} SOURCE --out scores.csv",
    ]


def score_source(
    model: Path,
    source: str | Path,
    out: Path,
    *,
    false_alarms: float | None,
    fdr: float | None = None,
    device: str,
    progress: Progress,
    engine: str = "local",
    workers: int | None = None,
    shard_size: int | None = None,
    views: int | None = None,
    resume: bool = False,
) -> list[str]:
    """Score a SOURCE of any size and write the table or the folder of shards; what to tell the user about it."""
    if out.suffix not in (".csv", ".parquet") and not is_folder(out):
        raise UserError(f"--out {out}: the table is written as .csv or .parquet; end the name with one of them")
    check_writable(out)
    device = choose_device(device)
    detector, about = open_model(model, device)
    check_views(detector, views)
    if views is not None and false_alarms is not None:
        raise UserError("--false-alarms with --views: the model was calibrated with all its views; leave out one")
    if fdr is not None and (views is not None or false_alarms is not None):
        other = "--false-alarms" if views is None else "--views"
        raise UserError(f"--fdr with {other}: verdicts follow one rule, at all views of the model; leave out one")
    limit, note = _limit(detector.calibration_, false_alarms) if views is None else (None, [NO_CALIBRATION])
    if fdr is not None:
        check_fdr(fdr)
        limit, note = None, []
    is_vectors = "://" not in str(source) and holds_vectors(Path(source))
    _check_kind(about, source, is_vectors)
    if is_vectors:
        return [*note, *_score_vectors(detector, Path(source), out, limit, fdr)]
    found = score_in_bulk(
        model,
        source,
        out,
        detector=detector,
        about=about,
        limit=limit,
        fdr=fdr,
        device=device,
        views=views,
        engine=engine,
        workers=workers,
        shard_size=shard_size,
        resume=resume,
        progress=progress,
    )
    called = _called(found.anomalies, limit, fdr)
    note += _too_many_for_fdr(found, len(detector.calibration_), fdr)
    return [
        *_broken_lines(found.broken, found.some_broken),
        *note,
        f"Scored {found.scored:,} images, {called}: {out}",
        *[f"  {row['score']:.4f}  {_show_p(row['p_value'])}  {row['path']}" for row in found.highest],
    ]


def _check_kind(about: dict[str, Any], source: str | Path, is_vectors: bool) -> None:
    on_vectors, kinds = not about["preprocessing"], ("images", "vectors")
    if on_vectors != is_vectors:
        held, wanted = kinds[is_vectors], kinds[on_vectors]
        raise UserError(f"SOURCE {source} holds {held}, MODEL was fitted on {wanted}: give those")


def _called(anomalies: int, limit: float | None, fdr: float | None) -> str:
    return "no verdicts" if limit is None and fdr is None else f"{anomalies:,} called anomalies"


def _too_many_for_fdr(found: Summary, num_calibration: int, fdr: float | None) -> list[str]:
    """Why nothing was called, where the held-out images are too few for so many scores."""
    if fdr is None or found.anomalies or not found.scored:
        return []
    least = least_discoveries(num_calibration, found.scored, fdr)
    return [
        f"--fdr {fdr:g} called nothing: {least:,} of {found.scored:,} would have to beat all {num_calibration:,} "
        f"held-out images; use a higher rate, or fit on more images"
    ]


def _score_vectors(detector: Detector, source: Path, out: Path, limit: float | None, fdr: float | None) -> list[str]:
    """Score a SOURCE of vectors, which memory holds, and write the table; what to tell the user about it."""
    opened = open_source(source)
    if is_folder(out):
        raise UserError(f"--out {out}: scores of vectors are written as one table; end the name with .csv or .parquet")
    scored = detector.anomaly_score(load_images(opened).images)
    if fdr is not None:
        limit = discovery_threshold([scored], detector.calibration_, fdr)
    scores = scored.tolist()
    with tempfile.TemporaryDirectory(prefix="elsa-") as folder:
        shard = Path(folder) / "scored.parquet"
        pq.write_table(pa.table([opened.names, scores, [""] * len(scores)], schema=SCORED), shard)
        found = write_ranked(out, [shard], Judge(detector.calibration_, limit), Path(folder))
    called = _called(found.anomalies, limit, fdr)
    return [
        *_too_many_for_fdr(found, len(detector.calibration_), fdr),
        f"Scored {found.scored:,} vectors, {called}: {out}",
        *[f"  {row['score']:.4f}  {_show_p(row['p_value'])}  {row['path']}" for row in found.highest],
    ]


def evaluate_source(
    model: Path, source: Path, labels: Path | None, *, device: str, progress: Progress
) -> tuple[Evaluation, list[str]]:
    """How well a MODEL separates the labelled images of a SOURCE, and what to tell the user about that."""
    opened = open_source(source, labels=labels)
    if not any(opened.labels):
        raise UserError(f"no image of {source} has a label; name a table of labels with --labels FILE")
    detector, about = open_model(model, choose_device(device), progress)
    _check_kind(about, source, opened.kind == "vectors")
    labelled = opened.subset([record for record, word in enumerate(opened.labels) if word])
    with tempfile.TemporaryDirectory(prefix="elsa-") as cache:  # used only where memory does not hold the images
        loaded = load_images(labelled, **about["preprocessing"], cache=Path(cache), progress=progress)
        scores = detector.anomaly_score(loaded.images)
    found = evaluate_scores(scores.numpy(), loaded.labels)
    notes = _broken_lines(len(loaded.broken), loaded.broken)
    if len(opened) == about["data"]["images"]:
        notes.append(
            f"The model was fitted on {len(opened):,} images, as many as SOURCE holds: if they are these, the figures "
            f"flatter; judge on others, or see `elsa report`"
        )
    return replace(found, unlabelled=len(opened) - len(labelled)), notes


def choose_device(asked: str) -> str:
    """The torch device for --device; auto is the first GPU, or the CPU."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=asked)
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # torch raises each of them for a missing device
        raise UserError(f"--device {asked} is not to be had here; use auto, cpu, cuda, cuda:1 or mps") from error
    return asked


def versions() -> dict[str, str]:
    """What this run was made with."""
    packages = ("torch", "numpy", "pillow", "scikit-learn")
    return {"elsa": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def hash_data(loaded: ImageSet) -> str:
    """sha256 over names, labels and pixels, in their order: says whether two models saw the same data."""
    digest = hashlib.sha256()
    for name, label in zip(loaded.names, loaded.labels, strict=True):
        digest.update(f"{name}\0{label}\0".encode(errors="surrogateescape"))
    for start in range(0, len(loaded.images), HASH_BATCH):
        digest.update(loaded.images[start : start + HASH_BATCH].numpy().tobytes())
    return digest.hexdigest()


def _check_model_place(out: Path, checkpoint: Path, resume: bool) -> None:
    """Refuse a place for MODEL before hours of work end there."""
    if out.exists() and not (out / "model.json").exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not a MODEL folder; choose a new name")
    if checkpoint.exists() and not resume:
        raise UserError(f"{checkpoint} is left from an interrupted fit; go on with --resume, or delete it")
    check_writable(out)


def _plan(
    method: str | None, encoder: str | None, settings: Sequence[str], device: str, source: Source, checkpoint: Path
) -> Any:
    """What to call for the detector the options ask for."""
    kind, _, file = (encoder or "").partition(":")
    pretrained = kind in PRETRAINED and (bool(file) or kind == "mobilenet_v2")
    if encoder is not None and not pretrained and (kind not in FROM_SCRATCH or file):
        raise UserError(f"--encoder {encoder}: use {', '.join(FROM_SCRATCH)} or {', '.join(PRETRAINED.values())}")
    is_vectors = source.kind == "vectors"
    if is_vectors and (encoder is not None or method in PRETRAINED_AS_ELSA):
        raise UserError(f"SOURCE {source.path} holds vectors, not images: leave out --encoder, use --method elsa-head")
    method = method or ("elsa-head" if pretrained or is_vectors else "elsa+")
    own_network = method not in (*PRETRAINED_AS_ELSA, "elsa-head")
    wrong_encoder = not is_vectors and pretrained != (method == "elsa-head")
    if wrong_encoder or (own_network and encoder is not None):
        given = f"with --encoder {encoder}" if encoder else "without --encoder"
        raise UserError(
            f"--method {method} {given}: elsa-head takes mobilenet_v2:FILE or another pretrained one, "
            f"{', '.join(PRETRAINED_AS_ELSA)} take resnet18 or tiny, other methods no --encoder; change one of the two"
        )
    if method == "elsa-head":
        from elsa.head import ElsaHead, HeadConfig
        from elsa.weights import find_mobilenet_v2

        chosen = _parsed(HeadConfig, settings)
        name = None if is_vectors else encoder if file else f"mobilenet_v2:{find_mobilenet_v2()}"
        return lambda **common: ElsaHead(encoder=name, **common, **chosen)

    if own_network:
        chosen = _parsed(detector_class(method).settings_class, settings)
        return lambda **common: build_detector(method, **common, **chosen)

    presets = [word.removeprefix("preset=") for word in settings if word.startswith("preset=")]
    chosen = _parsed(ElsaConfig, [word for word in settings if not word.startswith("preset=")])
    if encoder is None and device == "cpu" and not presets and "encoder" not in chosen:
        raise UserError(_no_gpu(len(source)))
    if encoder is not None:
        chosen["encoder"] = kind
    preset = presets[-1] if presets else "cpu" if chosen.get("encoder") == "tiny" and device == "cpu" else "paper"
    return lambda **common: build_detector(method, preset=preset, checkpoint=checkpoint, **common, **chosen)


def _parsed(config_class: type, settings: Sequence[str]) -> dict[str, Any]:
    try:
        return parse_settings(config_class, settings)
    except UserError as error:
        raise UserError(f"Invalid value for --set: {error}") from error


def _no_gpu(num_images: int) -> str:
    paper = ElsaConfig()
    views = num_images * 2 * paper.shifts * paper.pretrain_epochs
    hours = views / VIEWS_PER_SECOND_ON_CPU / 3600
    time_needed = f"{hours:,.0f} hours" if hours < 100 else f"{hours / 24:,.0f} days"
    return (
        f"no GPU found, and learning resnet18 from scratch on {num_images:,} images of 32 px would take a CPU about "
        f"{time_needed}; choose with --encoder: mobilenet_v2:FILE (pretrained, minutes), tiny (from scratch, "
        f"minutes to an hour) or resnet18 (from scratch all the same)"
    )


def _limit(calibration: torch.Tensor, false_alarms: float | None) -> tuple[float | None, list[str]]:
    """The score above which an image is called an anomaly; a rate nobody asked for is left out if it can't be kept."""
    try:
        return score_threshold(calibration, false_alarms or DEFAULT_FALSE_ALARMS), []
    except UserError as error:
        if false_alarms is not None:
            raise
        return None, [f"No verdicts: {error}"]


def _show_p(p: float | None) -> str:
    return "no p" if p is None else f"p {p:.4f}"


def _broken_lines(count: int, some: Sequence[tuple[str, str]]) -> list[str]:
    if not count:
        return []
    shown = "; ".join(f"{name}: {why}" for name, why in some[:3])
    rest = f"; and {count - 3} more" if count > 3 else ""
    return [f"Left out, could not be read ({count}): {shown}{rest}"]


def _cache_lines(loaded: ImageSet) -> list[str]:
    if not isinstance(loaded.images, Shards):
        return []
    size = math.prod(loaded.images.shape) / 1e9
    return [f"The decoded images ({size:.1f} GB) stay in {loaded.images.folder} for the next run; delete it at will"]


def _count_labels(loaded: ImageSet) -> dict[str, int]:
    counts = Counter(word or "unlabelled" for word in loaded.labels)
    return {word: counts[word] for word in ("normal", "anomaly", "unlabelled")}


def _count_words(loaded: ImageSet) -> str:
    return ", ".join(f"{count:,} {word}" for word, count in _count_labels(loaded).items())
