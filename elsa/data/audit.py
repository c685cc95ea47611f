"""What is wrong with a data set, before hours of training are spent on it: the work of `elsa data check`."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from elsa.data.duplicates import fine_thumbnail, gradient_hash, near_groups
from elsa.data.images import (
    PIXEL_LIMIT,
    BrokenImageError,
    Payload,
    is_16_bit,
    miniature,
    open_image,
    orientation,
    quiet_pillow,
)
from elsa.data.parallel import ordered_map
from elsa.data.sources import Source
from elsa.errors import UserError
from elsa.progress import Progress, silent

HUGE_PIXELS = 50_000_000
ODD_ASPECT = 3.0
EXAMPLES = 5
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One kind of trouble, how often it occurs, and what to do about it."""

    kind: str
    severity: str
    """error: results will be wrong; warning: they may be; note: handled, good to know"""
    count: int
    explanation: str
    examples: list[str]


@dataclass(frozen=True)
class Audit:
    """The result of a check; findings come worst first."""

    source: str
    images: int
    labels: dict[str, int]
    """How many images are normal, anomaly and unlabelled."""
    findings: list[Finding]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Plain text, one finding after the other."""
        counts = ", ".join(f"{count:,} {word}" for word, count in self.labels.items())
        lines = [f"{self.source}: {self.images:,} images ({counts})"]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.kind}: {finding.count:,}. {finding.explanation}")
            lines += [f"    {example}" for example in finding.examples]
        if not self.findings:
            lines.append("nothing to complain about")
        return lines


@dataclass(frozen=True)
class Facts:
    """What one look at an image tells."""

    trouble: str = ""
    """Kind of BrokenImageError, or empty."""
    reason: str = ""
    width: int = 0
    height: int = 0
    traits: frozenset[str] = frozenset()
    content: bytes = b""
    """sha256 of the file or the pixels"""
    gradient: int = 0
    thumbnail: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))


# kind, severity, explanation of what a single image can show
TROUBLES = [
    ("empty", "error", "Files without content. Fetch them again or delete them."),
    ("truncated", "error", "Files that end too early; they are left out. Fetch them again."),
    (
        "unreadable",
        "error",
        "Files that are no images or are damaged; they are left out. Fetch them again or delete them.",
    ),
    (
        "bomb",
        "error",
        "Images with more pixels than the limit; they are left out unread. Shrink them if they are genuine.",
    ),
]
TRAITS = [
    ("huge", "warning", f"More than {HUGE_PIXELS // 10**6} megapixels: slow to read. Shrink them once if you can."),
    ("odd-aspect", "warning", f"One side is over {ODD_ASPECT:g} times the other; made square they are distorted. "
     "Consider --resize pad, or cut them into tiles."),
    ("animated", "note", "Only the first frame is used."),
    ("cmyk", "note", "Printing colours, converted to RGB without the printer's profile: colours shift a little."),
    ("16-bit", "note", "Scaled to 8 bits, 65535 to 255. If the camera fills only the low bits, scale them up first."),
    ("alpha", "note", "Transparent parts are shown on white."),
    ("palette", "note", "Colours come from a palette, converted to RGB; photos lose shades that way."),
    ("exif-rotated", "note", "Turned upright as their EXIF data says; other programs may show them on their side."),
]  # fmt: skip


def audit(
    source: Source, progress: Progress = silent, *, pixel_limit: int = PIXEL_LIMIT, workers: int | None = None
) -> Audit:
    """Read every image once and report what would spoil training or evaluation."""
    if source.kind == "vectors":
        raise UserError(f"SOURCE {source.path} holds vectors: only images can be checked; give those they were made of")
    facts: list[Facts] = []
    with quiet_pillow():
        payloads = source.payloads(range(len(source)))
        for done, seen in enumerate(ordered_map(lambda payload: look_at(payload, pixel_limit), payloads, workers), 1):
            facts.append(seen)
            if done % 64 == 0 or done == len(source):
                progress("check images", done, len(source), {})
    findings = _single_findings(source, facts) + _size_findings(facts) + _duplicate_findings(source, facts)
    words = Counter(source.labels)
    return Audit(
        source=str(source.path),
        images=len(source),
        labels={"normal": words["normal"], "anomaly": words["anomaly"], "unlabelled": words[""]},
        findings=sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)),
    )


def look_at(payload: Payload, pixel_limit: int) -> Facts:
    """Decode one image, at reduced scale where the format allows, and note what is odd about it."""
    if isinstance(payload, np.ndarray):
        pixels = np.ascontiguousarray(payload)
        traits = {"alpha"} if pixels.ndim == 3 and pixels.shape[2] == 4 else set()
        image = Image.fromarray(pixels)
        content = hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).digest()
        return _facts(miniature(image), image.size, traits, content)
    try:
        with open_image(payload, pixel_limit) as image:
            size, traits = image.size, _traits(image)
            turned = orientation(image) > 1  # Pillow turns TIFF itself while reading and forgets that it did
            small = miniature(image)
            if turned or orientation(image) > 1:  # a PNG may tell it behind the pixels
                traits.add("exif-rotated")
            if orientation(image) >= 5:
                size = size[::-1]
            return _facts(small, size, traits, _content_hash(payload))
    except BrokenImageError as error:
        return Facts(trouble=error.kind, reason=str(error))


def _content_hash(payload: Path | bytes | None) -> bytes:
    if isinstance(payload, Path):
        with open(payload, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    return hashlib.sha256(payload or b"").digest()


def _facts(small: Image.Image, size: tuple[int, int], traits: set[str], content: bytes) -> Facts:
    width, height = size
    if width * height > HUGE_PIXELS:
        traits.add("huge")
    if max(width, height) > ODD_ASPECT * min(width, height):
        traits.add("odd-aspect")
    return Facts("", "", width, height, frozenset(traits), content, gradient_hash(small), fine_thumbnail(small))


def _traits(image: Image.Image) -> set[str]:
    traits = set()
    if getattr(image, "is_animated", False):  # only formats that can hold several frames have the attribute
        traits.add("animated")
    if image.mode == "CMYK":
        traits.add("cmyk")
    if is_16_bit(image):
        traits.add("16-bit")
    if image.mode in ("P", "PA"):
        traits.add("palette")
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        traits.add("alpha")
    return traits


def _single_findings(source: Source, facts: list[Facts]) -> list[Finding]:
    findings = []
    for kind, severity, explanation in TROUBLES:
        records = [i for i, seen in enumerate(facts) if seen.trouble == kind]
        if records:
            examples = [f"{source.names[i]}: {facts[i].reason}" for i in records[:EXAMPLES]]
            findings.append(Finding(kind, severity, len(records), explanation, examples))
    for kind, severity, explanation in TRAITS:
        records = [i for i, seen in enumerate(facts) if kind in seen.traits]
        if records:
            examples = [f"{source.names[i]} ({facts[i].width} x {facts[i].height})" for i in records[:EXAMPLES]]
            findings.append(Finding(kind, severity, len(records), explanation, examples))
    return findings


def _size_findings(facts: list[Facts]) -> list[Finding]:
    sizes = Counter((seen.width, seen.height) for seen in facts if not seen.trouble)
    if len(sizes) < 2:
        return []
    examples = [f"{width} x {height}: {count} images" for (width, height), count in sizes.most_common(EXAMPLES)]
    explanation = (
        "Different sizes in one set; all are brought to one. If size goes with the label, it may be learned instead."
    )
    return [Finding("mixed-sizes", "note", len(sizes), explanation, examples)]


def _duplicate_findings(source: Source, facts: list[Facts]) -> list[Finding]:
    sound = [i for i, seen in enumerate(facts) if not seen.trouble]
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for i in sound:
        by_content[facts[i].content].append(i)
    exact = [group for group in by_content.values() if len(group) > 1]
    # Near duplicates are sought among one of each exact group: a thousand copies of a file are one finding, not two.
    single = [group[0] for group in by_content.values()]
    near: list[list[int]] = []
    if single:
        gradients = np.array([facts[i].gradient for i in single], np.uint64)
        thumbnails = np.stack([facts[i].thumbnail for i in single])
        near = [[single[k] for k in group] for group in near_groups(gradients, thumbnails)]
    findings = _group_finding(
        source, exact, "exact-duplicates", "warning",
        "Surplus files with the very same content; they count double in training. Keep one of each.",
        surplus=True,
    )  # fmt: skip
    findings += _group_finding(
        source, near, "near-duplicates", "warning",
        "Surplus images that look the same: resized, recompressed, or frames of one scene. Keep one of each, unless "
        "the subject really looks like that.",
        surplus=True,
    )  # fmt: skip
    findings += _group_finding(
        source, [group for group in exact if _contradict(source, group)], "contradictory-labels", "error",
        "Groups of identical images, one labelled normal and one anomaly. Decide which is right.",
    )  # fmt: skip
    # A label of one copy holds for its exact copies, so those join the groups of look-alikes.
    copies = {group[0]: group for group in exact}
    whole = [[copy for i in group for copy in copies.get(i, [i])] for group in near]
    findings += _group_finding(
        source, [group for group in whole if _contradict(source, group)], "contradictory-look-alikes", "warning",
        "Groups of images that look the same and are labelled both ways. Right if the defect is tiny; else correct it.",
    )  # fmt: skip
    if "split" in source.extra:
        leaks = [group for group in exact if _crosses(source, group)]
        findings += _group_finding(
            source, leaks, "leakage", "error",
            "Groups of identical images in more than one of train, val and test; the evaluation will flatter. "
            "Take them out of one.",
        )  # fmt: skip
        findings += _group_finding(
            source, [group for group in whole if _crosses(source, group)], "near-leakage", "warning",
            "Groups of images that look the same in more than one of train, val and test; the evaluation may flatter.",
        )  # fmt: skip
    return findings


def _contradict(source: Source, group: list[int]) -> bool:
    return {"normal", "anomaly"} <= {source.labels[i] for i in group}


def _crosses(source: Source, group: list[int]) -> bool:
    return len({str(source.extra["split"][i]) for i in group} - {"", "None"}) > 1


def _group_finding(
    source: Source, groups: list[list[int]], kind: str, severity: str, explanation: str, surplus: bool = False
) -> list[Finding]:
    if not groups:
        return []
    named = [name + (f" [{label}]" if label else "") for name, label in zip(source.names, source.labels, strict=True)]
    examples = [_shown(named[i] for i in group) for group in groups[:EXAMPLES]]
    count = sum(len(group) - 1 for group in groups) if surplus else len(groups)
    return [Finding(kind, severity, count, explanation, examples)]


def _shown(names: Iterable[str]) -> str:
    names = list(names)
    return " = ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
