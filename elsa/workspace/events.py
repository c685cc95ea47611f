"""What people said about images: events that are only ever added, and the words that follow from them.

A word is normal, anomaly, unsure or "" (withdrawn). Each person has one word per image, the last one said; an undo
takes the last event back. Where people disagree the image has no word until somebody settles it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from elsa.errors import UserError

WORDS = ("normal", "anomaly", "unsure", "")
SETTLE = "settle"  # the strategy of a label that ends a conflict: it stands above all words said before it
UNDO = "undo"


@dataclass(frozen=True)
class LabelEvent:
    """One person's word about one image; `id` and `at` are the store's to fill in."""

    who: str
    image: str
    label: str
    request: str
    """Made by the client, unique to this event: sent twice, it is stored once."""
    sha256: str = ""
    """Of the image's bytes as the person saw them; "" where nobody looked."""
    model: int | None = None
    score: float | None = None
    """What the person was shown beside the image."""
    strategy: str = ""
    """Why the image was asked for; "" if it was not."""
    probability: float | None = None
    """The chance with which the strategy asks for this image; None if nobody knows."""
    undoes: int | None = None
    at: str = ""
    id: int = 0


@dataclass(frozen=True)
class Label:
    """What stands about an image after all events."""

    image: str
    word: str
    """The word everybody who is sure agrees on; "" in a conflict."""
    conflict: bool
    people: dict[str, str]
    """Each person's word; withdrawn ones are left out."""
    event: LabelEvent
    """The last event that still counts."""

    @property
    def training_word(self) -> str:
        """normal, anomaly or "": what a detector learns from."""
        return self.word if self.word in ("normal", "anomaly") else ""


def check_event(event: LabelEvent) -> None:
    """Refuse, in one line, what no store may hold."""
    if event.label not in WORDS:
        raise UserError(
            f"label {event.label!r} of {event.image!r}: use 'normal', 'anomaly', 'unsure' or '' (withdrawn)"
        )
    for name in ("who", "image", "request", "sha256", "strategy"):
        text = getattr(event, name)
        if not text and name in ("who", "image", "request"):
            raise UserError(f"a label of {event.image!r} has an empty `{name}`: give it a value")
        if "\0" in text or (not text.isascii() and text != text.encode(errors="replace").decode()):
            raise UserError(f"{name} {text!r} is not text that UTF-8 can hold: rename it")
    if event.score is not None and not math.isfinite(event.score):
        raise UserError(f"score {event.score} of {event.image!r}: give a finite number, or none")
    if event.probability is not None and not 0 < event.probability <= 1:
        raise UserError(f"probability {event.probability} of {event.image!r}: must be above 0 and at most 1, or none")


@dataclass
class Labels:
    """The labels that follow from events, kept up to date as more of them arrive in the order of their ids."""

    of: dict[str, Label] = field(default_factory=dict)
    last: int = 0
    _standing: dict[str, dict[int, LabelEvent]] = field(default_factory=dict)

    def take(self, events: Iterable[LabelEvent]) -> None:
        """Add events; those already taken are skipped."""
        touched = set()
        for event in events:
            if event.id <= self.last:
                continue
            self.last = event.id
            standing = self._standing.setdefault(event.image, {})
            if event.undoes is None:
                standing[event.id] = event
            else:
                del standing[event.undoes]
            touched.add(event.image)
        for image in touched:
            label = _label(image, list(self._standing[image].values()))
            if label is None:
                self.of.pop(image, None)
            else:
                self.of[image] = label


def _label(image: str, standing: list[LabelEvent]) -> Label | None:
    """The label that events about one image, oldest first, amount to; None if all is withdrawn."""
    seen = next((event.sha256 for event in reversed(standing) if event.sha256), "")
    # Under an old name there may be a new image: what was said about other bytes is no word about these.
    last_of = {event.who: event for event in standing if event.sha256 in ("", seen)}
    said = {who: event for who, event in last_of.items() if event.label}
    if not said:
        return None
    settled = max((event.id for event in said.values() if event.strategy == SETTLE), default=0)
    counting = [event.label for event in said.values() if event.id >= settled]
    sure = set(counting) - {"unsure"}
    return Label(
        image=image,
        word="" if len(sure) > 1 else (sure or {"unsure"}).pop(),
        conflict=len(sure) > 1,
        people={who: event.label for who, event in said.items()},
        event=max(said.values(), key=lambda event: event.id),
    )
