"""`elsa explain`: why one image got its score, as one picture."""

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from elsa.data.images import BrokenImageError, Decoding, decode, quiet_pillow
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.errors import UserError
from elsa.jobs import DEFAULT_FALSE_ALARMS, choose_device
from elsa.output import check_writable, write_whole
from elsa.progress import Progress
from elsa.report.heat import overlay, strength_of
from elsa.saved import open_model
from elsa.trust.calibrate import p_values, score_threshold, verdicts
from elsa.trust.explain import Explanation, Known, Neighbour, explain, know, most_telling, space_of

LARGE, SMALL, GAP, MARGIN = 300, 128, 16, 28
INK, SOFT, PAPER = "#1d2126", "#5d6670", "#ffffff"


def explain_image(
    model: Path,
    image: Path,
    out: Path,
    *,
    source: Path | None,
    labels: Path | None,
    device: str,
    progress: Progress,
) -> list[str]:
    """Write the picture that explains the score of IMAGE; what to tell the user about it."""
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: the explanation is written as .png; end the name with it")
    if labels is not None and source is None:
        raise UserError(
            "--labels names labels of the training images: add --source SOURCE, the images MODEL learned from"
        )
    check_writable(out)
    detector, about = open_model(model, choose_device(device), progress)
    if not about["preprocessing"]:
        raise UserError(f"{model} was fitted on vectors, in which there are no places to show; give a MODEL of images")
    how = Decoding(**about["preprocessing"])
    try:
        with quiet_pillow():
            pixels = torch.from_numpy(decode(image, how).copy())  # Pillow lends its memory to be read
    except BrokenImageError as error:
        raise UserError(f"IMAGE {image}: {error}; give an image that can be read") from error
    space = space_of(detector)
    with tempfile.TemporaryDirectory(prefix="elsa-") as cache:  # used only where memory does not hold the images
        known, note = None, ""
        if space is None:
            note = f"{about['class']} has no prototypes: the picture shows where its score comes from and nothing else"
        elif source is None:
            note = "Name the training images with --source SOURCE to see those around the prototype"
        else:
            known, note = _known(space, source, labels, about["preprocessing"], Path(cache), progress)
        found = explain(detector, pixels, known)
    words = verdict_words(found.score, detector.calibration_)
    drawn = draw(found, image.name, words, note, strength_of(found.score, detector.calibration_))
    buffer = io.BytesIO()
    drawn.save(buffer, format="PNG", optimize=True)
    write_whole(out, buffer.getvalue())
    return [f"{image.name}: {'; '.join(words)}", *_told(found), *([note] if note else []), f"Written: {out}"]


def _known(
    space: Any, source: Path, labels: Path | None, preprocessing: dict[str, Any], cache: Path, progress: Progress
) -> tuple[Known, str]:
    opened = open_source(source, labels=labels)
    chosen = most_telling(opened.labels)
    note = f"Compared with {len(chosen):,} of the {len(opened):,} training images" if len(chosen) < len(opened) else ""
    loaded = load_images(opened.subset(chosen), **preprocessing, cache=cache, progress=progress)
    return know(space, loaded.names, loaded.labels, loaded.images), note


def verdict_words(score: float, calibration: Tensor) -> list[str]:
    """The score, its p-value and the verdict at the usual false-alarm rate, or why there is none."""
    p_value = p_values(torch.tensor([score]), calibration).item()
    words = [f"score {score:.3f}", f"p-value {p_value:.4f}"]
    try:
        limit = score_threshold(calibration, DEFAULT_FALSE_ALARMS)
    except UserError:
        return [*words, "no verdict: too few images were held out to calibrate on"]
    verdict = verdicts(torch.tensor([score]), limit)[0]
    return [*words, f"{verdict} at {DEFAULT_FALSE_ALARMS:.0%} false alarms (threshold {limit:.3f})"]


def _told(found: Explanation) -> list[str]:
    lines = []
    if found.prototype is not None:
        share = "" if found.share is None else f", nearest also to {found.share:.1%} of the training images"
        lines.append(f"nearest prototype: {found.prototype}{share}")
    for title, neighbours in _rows(found)[1:]:
        lines += [f"{title.lower()}: {one.name} ({one.similarity:.3f})" for one in neighbours[:1]]
    return lines


def _rows(found: Explanation) -> list[tuple[str, tuple[Neighbour, ...]]]:
    share = "" if found.share is None else f", nearest to {found.share:.1%} of the training images"
    return [
        (f"At the centre of its prototype ({found.prototype}{share})", found.around),
        ("Training images most like it", found.nearest),
        ("Nearest labelled anomalies", found.anomalies),
    ]


def draw(found: Explanation, name: str, words: Sequence[str], note: str, strength: float) -> Image.Image:
    """The picture: the image, its heat map, what is known about it, and the training images it is held against."""
    rows = [(title, neighbours) for title, neighbours in _rows(found) if neighbours]
    title_font, font, small = (ImageFont.load_default(size) for size in (24, 17, 13))
    width = 2 * MARGIN + 6 * SMALL + 5 * GAP
    top = MARGIN + 44
    height = top + LARGE + 34 + len(rows) * (SMALL + 88) + (40 if note else 0) + MARGIN
    page = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((MARGIN, MARGIN - 6), fitting(name, title_font, width - 2 * MARGIN), fill=INK, font=title_font)
    half = (width - 2 * MARGIN - GAP) // 2
    side = min(LARGE, half)
    page.paste(picture(found.image, side), (MARGIN, top))
    page.paste(picture(overlay(found.image, found.heat, strength), side), (MARGIN + side + GAP, top))
    pen.text((MARGIN, top + side + 6), "the image as the model sees it", fill=SOFT, font=small)
    pen.text(
        (MARGIN + side + GAP, top + side + 6),
        "red: without this place the score would fall most",
        fill=SOFT,
        font=small,
    )
    left = MARGIN + 2 * (side + GAP)
    below = top
    for line in words:
        for piece in wrapped(line, font, width - MARGIN - left):
            pen.text((left, below), piece, fill=INK, font=font)
            below += 26
        below += 8
    below = top + LARGE + 44
    for title, neighbours in rows:
        pen.text((MARGIN, below), fitting(title, font, width - 2 * MARGIN), fill=INK, font=font)
        for place, one in enumerate(neighbours):
            x = MARGIN + place * (SMALL + GAP)
            page.paste(picture(one.image, SMALL), (x, below + 28))
            pen.text((x, below + 32 + SMALL), fitting(one.name, small, SMALL), fill=INK, font=small)
            says = f"{one.similarity:.3f} {one.label}".strip()
            pen.text((x, below + 49 + SMALL), says, fill=SOFT, font=small)
        below += SMALL + 88
    if note:
        pen.text((MARGIN, height - MARGIN - 14), fitting(note, small, width - 2 * MARGIN), fill=SOFT, font=small)
    return page


def picture(image: Tensor, side: int) -> Image.Image:
    """A tensor uint8 [C, H, W] as a picture of that side; small ones keep their pixels."""
    array = image.permute(1, 2, 0).numpy()
    shown = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")
    how = Image.Resampling.NEAREST if max(shown.size) < 64 else Image.Resampling.BICUBIC
    return shown.resize((side, side), how)


def fitting(text: str, font: Any, width: float) -> str:
    """The text, its beginning cut where it is too long: the end of a file name tells more."""
    text = text.encode(errors="backslashreplace").decode()
    if font.getlength(text) <= width:
        return text
    while text and font.getlength("..." + text) > width:
        text = text[1:]
    return "..." + text


def wrapped(text: str, font: Any, width: float) -> list[str]:
    """The words of a text in lines that fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
