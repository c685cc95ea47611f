"""A model as the service holds it: how images are prepared for it, and what it says about them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsa.data.images import Decoding
from elsa.encoders import BATCH, embed
from elsa.errors import UserError
from elsa.head import ElsaHead
from elsa.saved import Detector, open_model
from elsa.trust.calibrate import p_values, score_threshold, verdicts
from elsa.trust.explain import heat_map, space_of

DEFAULT_FALSE_ALARMS = 0.05


@dataclass(frozen=True)
class Findings:
    """What a model says about images; row i belongs to image i."""

    scores: list[float]
    p_values: list[float]
    verdicts: list[str] | None
    """None where the model was calibrated on too few images for the rate of false alarms."""
    prototypes: list[int] | None
    """None for a detector without prototypes."""
    heat: Tensor | None = None
    """float32 [B, H, W] if asked for."""

    def part(self, start: int, stop: int) -> "Findings":
        """The findings of some of the images."""
        words, nearest, heat = self.verdicts, self.prototypes, self.heat
        return Findings(
            self.scores[start:stop],
            self.p_values[start:stop],
            None if words is None else words[start:stop],
            None if nearest is None else nearest[start:stop],
            None if heat is None else heat[start:stop],
        )


@dataclass(frozen=True, eq=False)
class Loaded:
    """A fitted detector with everything an answer needs."""

    name: str
    id: str
    detector: Detector
    decoding: Decoding
    false_alarms: float
    threshold: float | None
    look: Callable[[Tensor], tuple[Tensor, Tensor | None]]

    @torch.no_grad()
    def find(self, images: Tensor, heat: Tensor | None = None) -> Findings:
        """Scores and all that follows from them; `heat` is a mask of the images whose heat map is asked for.

        Images are scored in chunks that are filled up to one size: convolutions round differently in batches of other
        sizes (by up to 3e-5 of a score), and an image's score must not depend on the company it came in.
        """
        filled = torch.cat([images, images[-1:].expand(-len(images) % BATCH, -1, -1, -1)])
        looks = [self.look(chunk) for chunk in filled.split(BATCH)]
        scores = torch.cat([score for score, _ in looks])[: len(images)]
        nearest = [prototype for _, prototype in looks if prototype is not None]
        maps = None
        if heat is not None and heat.any():
            maps = torch.zeros(len(images), *images.shape[2:])
            maps[heat] = heat_map(self.detector, images[heat]).float()
        return Findings(
            scores=scores.tolist(),
            p_values=p_values(scores, self.detector.calibration_).tolist(),
            verdicts=None if self.threshold is None else verdicts(scores, self.threshold),
            prototypes=torch.cat(nearest)[: len(images)].tolist() if nearest else None,
            heat=maps,
        )


def load_for_service(folder: Path, false_alarms: float | None, max_pixels: int, device: str = "cpu") -> Loaded:
    """The model of a MODEL folder, tried out once, so that a model that cannot score is never switched to."""
    detector, about = open_model(folder, device)
    threshold = None
    try:
        threshold = score_threshold(detector.calibration_, false_alarms or DEFAULT_FALSE_ALARMS)
    except UserError:
        if false_alarms is not None:  # a rate nobody asked for costs the verdicts, not the service
            raise
    if about.get("preprocessing") == {}:
        raise UserError(f"MODEL {folder} was fitted on vectors, and the service takes images: give a MODEL of images")
    if "preprocessing" not in about:
        raise UserError(f"{folder} does not say how its images were prepared: fit the model again with `elsa fit`")
    decoding = Decoding(**about["preprocessing"])
    loaded = Loaded(
        name=Path(folder).resolve().name,
        id=about["sha256_json"][:16],
        detector=detector,
        decoding=dataclasses.replace(decoding, pixel_limit=min(decoding.pixel_limit, max_pixels)),
        false_alarms=false_alarms or DEFAULT_FALSE_ALARMS,
        threshold=threshold,
        look=look_with(detector),
    )
    loaded.find(torch.zeros(1, decoding.channels, decoding.size, decoding.size, dtype=torch.uint8))
    return loaded


def look_with(detector: Any) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """A function from uint8 images to their scores and the prototypes they are nearest to, if there are any."""
    if isinstance(detector, ElsaHead) and detector.encoder is not None:
        encoder, size, views = detector.encoder, detector.size_ or None, detector.config.views

        def look_once(images: Tensor) -> tuple[Tensor, Tensor | None]:
            """Through the encoder once for both: it is nearly all of the time."""
            vectors = embed(encoder, images, size=size, views=views, device=detector.device)
            return detector.anomaly_score(vectors), detector.prototype_of(vectors)

        return look_once
    space = space_of(detector)
    if space is None:
        return lambda images: (detector.anomaly_score(images), None)
    return lambda images: (detector.anomaly_score(images), space.prototype_of(space.vectors(images)))
