"""Why an image got its score: where in it the energy comes from, and which training images it is held against.

A heat map says by how much the score would fall if a place were not there. A pretrained encoder that ends in a mean
over places is asked directly: each place of its last feature map is left out of the mean and the rest is scored again,
which costs one forward pass an image. Where only scores are to be had, windows of the image are blurred. Elsa from
scratch is asked both ways. docs/explain.md has the measurements that chose, and what lost.

Shape suffixes: B images, C channels, P places, D features, K prototypes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from elsa.augment import plain, rotations
from elsa.elsa import Elsa
from elsa.encoders import embed, input_size, prepared
from elsa.energy import ENSEMBLES, energy
from elsa.head import ElsaHead
from elsa.inference import fold_norms, project
from elsa.labels import ANOMALY, encode_labels
from elsa.progress import Progress, silent

AT_ONCE = 16  # images in a forward pass, as in encoders.embed
SPREAD = 0.7  # in cells: a place is left out with its neighbours, whose receptive fields overlap its own
CELLS, WINDOW = 7, 0.3  # blurred windows along a side, and the side of one as a share of the image's
SCORED_AT_ONCE = 256
ALIKE = 6  # training images shown around a prototype
SAME = 0.999  # from this cosine on, pixels are compared: an image is no explanation of itself
KNOWN = 4096  # most training images compared with, labelled ones first

Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Neighbour:
    """A training image, and how like something it is: the cosine of the two in the detector's space."""

    name: str
    image: Tensor
    similarity: float
    label: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why one image got its score; what was not known (no training images, no prototypes) is empty."""

    image: Tensor
    heat: Tensor
    score: float
    prototype: int | None = None
    share: float | None = None
    """Of the known training images, how many are nearest to the same prototype."""
    around: tuple[Neighbour, ...] = ()
    """Training images at the centre of that prototype."""
    nearest: tuple[Neighbour, ...] = ()
    """Training images most like this one, labelled anomalies left out."""
    anomalies: tuple[Neighbour, ...] = ()
    """The labelled anomalies most like this one, nearest first."""


@dataclass(frozen=True)
class Space:
    """Where a detector compares images: unit vectors, and the prototype each is nearest to."""

    vectors: Callable[[Any], Tensor]
    """uint8 images [N, C, H, W] to unit vectors [N, D]"""
    prototype_of: Callable[[Tensor], Tensor]
    """unit vectors [N, D] to the index [N] of their prototype"""


@dataclass(frozen=True)
class Known:
    """Training images to compare with; row i of everything belongs to names[i]."""

    names: list[str]
    labels: list[str]
    images: Any
    vectors: Tensor
    """Unit vectors [N, D]."""
    prototypes: Tensor
    """Which one each is nearest to."""


def heat_map(detector: Any, images: Any, progress: Progress = silent) -> Tensor:
    """[B, H, W]: by how much the score would fall without each place; above zero is what makes an image anomalous."""
    parts = [images[start : start + AT_ONCE] for start in range(0, len(images), AT_ONCE)]
    maps = [torch.empty(0, *images.shape[2:])]
    for number, heat_BHW in enumerate(_maps(detector, parts), 1):
        maps.append(heat_BHW.cpu().float())
        progress("heat maps", min(number * AT_ONCE, len(images)), len(images), {})
    return torch.cat(maps)


def _maps(detector: Any, parts: list[Tensor]) -> Iterator[Tensor]:
    if isinstance(detector, ElsaHead) and detector.encoder is not None:
        yield from (_head_map(detector, part) for part in parts)
    elif isinstance(detector, Elsa):
        net, score = _in_fp32(detector), plain_score(detector)
        yield from (both(occlusion(score, part), places_left_out(detector, net, part)) for part in parts)
    else:
        yield from (occlusion(detector.anomaly_score, part) for part in parts)


def _in_fp32(detector: Elsa) -> Any:
    """Its network for inference; what is asked of its feature maps is small differences."""
    return fold_norms(detector.net_, replace(detector.config, precision="fp32"))


def both(windows_BHW: Tensor, places_BHW: Tensor) -> Tensor:
    """The mean of two maps, the second in the spread of the first: where one is blind the other sees."""
    first_B, second_B = (heat.flatten(1).double().std(dim=1) for heat in (windows_BHW, places_BHW))
    scale_B11 = (first_B / second_B.clamp(min=1e-12))[:, None, None]
    return (windows_BHW + places_BHW.double() * scale_B11) / 2


@torch.no_grad()
def places_left_out(detector: Elsa, net: Any, images: Tensor) -> Tensor:
    """On Elsa's own last feature map, in every rotation the energy is summed over; each map is turned back."""
    shifts, tau = detector.config.shifts, detector.config.score_tau

    def score(pooled_ND: Tensor) -> Tensor:
        return energy(normalize(net.projection(pooled_ND), dim=1), detector.prototypes_, tau)

    total_BHW = torch.zeros(len(images), *images.shape[2:])
    for quarter, turned in enumerate(rotations(plain(images.to(detector.device)), shifts).chunk(shifts)):
        map_BCHW, pooled_BC = last_map(net.backbone, turned)
        assert map_BCHW is not None, "every backbone of nets.py ends in a mean over places"
        falls_BHW = enlarged(falls_without(map_BCHW, pooled_BC, score), turned.shape[2:]).cpu()
        total_BHW += torch.rot90(falls_BHW, -quarter, (1, 2))
    return total_BHW


def plain_score(detector: Elsa) -> Score:
    """The energy of images as they are, in every rotation: a tenth of the views that anomaly_score takes."""
    net, config = fold_norms(detector.net_, detector.config), detector.config

    @torch.no_grad()
    def score(images: Tensor) -> Tensor:
        turned = rotations(plain(images.to(detector.device)), config.shifts)
        raw_RBD = project(net, turned, config).unflatten(0, (config.shifts, len(images)))
        return ENSEMBLES[config.ensemble](raw_RBD[None], detector.prototypes_, config.score_tau).cpu()

    return score


def _head_map(head: ElsaHead, images: Tensor) -> Tensor:
    """Over the image and, where the head looks at it too, its flip, whose map is flipped back."""
    assert head.encoder is not None
    with torch.inference_mode():
        net = head.encoder.inference_net.to(head.device)
        pixels = prepared(images.to(head.device), head.size_ or input_size(max(images.shape[2:])))
        map_BCHW, vectors_BD = last_map(net, pixels.contiguous(memory_format=torch.channels_last))
        if map_BCHW is not None and head.config.views == "image and its flip":
            mirrored, of_mirrored_BD = last_map(net, pixels.flip(3).contiguous(memory_format=torch.channels_last))
            map_BCHW = None if mirrored is None else (map_BCHW + mirrored.flip(3)) / 2
            vectors_BD = (vectors_BD + of_mirrored_BD) / 2
    if map_BCHW is None:
        return occlusion(head.anomaly_score, images)
    # out of inference mode, for a score is free to do more than inference allows
    falls = falls_without(map_BCHW.cpu().clone(), vectors_BD.cpu().clone(), head.anomaly_score)
    return enlarged(falls, images.shape[2:])


def last_map(net: nn.Module, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
    """The feature map [B, C, H, W] whose mean over places is the network's output, and that output.

    Without a map where the network ends in anything else (attention, flattened places), which only scores can explain.
    """
    found: list[Tensor] = []

    def note(module: nn.Module, given: Any, made: Any) -> None:
        if isinstance(made, Tensor) and made.ndim == 4 and made.shape[2] * made.shape[3] > 1:
            found[:] = [made]

    hooks = [module.register_forward_hook(note) for module in net.modules()]
    try:
        vectors_BD = net(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not found or found[0].shape[:2] != vectors_BD.shape:
        return None, vectors_BD
    is_mean = torch.allclose(found[0].mean(dim=(2, 3)), vectors_BD, rtol=1e-3, atol=1e-4)
    return (found[0] if is_mean else None), vectors_BD


def falls_without(map_BCHW: Tensor, vectors_BD: Tensor, score: Score, spread: float = SPREAD) -> Tensor:
    """[B, H, W] in places: the score of the mean over all places less that of the mean without each and its nearest."""
    height, width = map_BCHW.shape[2:]
    kept_PP = weights_without(height, width, spread).to(map_BCHW)
    without_BPD = torch.einsum("bcq,pq->bpc", map_BCHW.flatten(2), kept_PP)
    scores = torch.cat([score(part) for part in without_BPD.flatten(0, 1).split(SCORED_AT_ONCE)])
    return (score(vectors_BD)[:, None] - scores.view(len(map_BCHW), -1)).detach().view(-1, height, width)


def weights_without(height: int, width: int, spread: float) -> Tensor:
    """Row p [P, P]: what each place weighs in the mean that leaves out place p; near it little, and all sum to 1."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    place_P2 = torch.stack([y.flatten(), x.flatten()], dim=1).double()
    kept_PP = 1 - torch.exp(-torch.cdist(place_P2, place_P2).square() / (2 * spread**2))
    return kept_PP / kept_PP.sum(dim=1, keepdim=True)


def occlusion(score: Score, images: Tensor, cells: int = CELLS, window: float = WINDOW) -> Tensor:
    """[B, H, W]: the mean fall of the score over the blurred windows that cover each pixel; works with any score."""
    count, _, height, width = images.shape
    hidden, base_B = blurred(images), score(images).double()
    fall_BHW = torch.zeros(count, height, width, dtype=torch.float64)
    covered_HW = torch.zeros(height, width, dtype=torch.float64)
    boxes = [(rows, columns) for rows in windows(height, cells, window) for columns in windows(width, cells, window)]
    at_once = max(1, SCORED_AT_ONCE // count)
    for start in range(0, len(boxes), at_once):
        some = boxes[start : start + at_once]
        changed = images.repeat(len(some), 1, 1, 1)
        for place, (rows, columns) in enumerate(some):
            mine = slice(place * count, (place + 1) * count)
            changed[mine, :, rows, columns] = hidden[:, :, rows, columns]
        scores = score(changed).double().view(len(some), count)
        for place, (rows, columns) in enumerate(some):
            fall_BHW[:, rows, columns] += (base_B - scores[place])[:, None, None].cpu()
            covered_HW[rows, columns] += 1
    return fall_BHW / covered_HW


def windows(side: int, cells: int, window: float) -> list[slice]:
    """Evenly spread stretches of a side that together cover all of it."""
    length = min(side, max(round(window * side), -(-side // cells)))
    starts = torch.linspace(0, side - length, min(cells, side - length + 1)).round().int().tolist()
    return [slice(start, start + length) for start in starts]


def blurred(images: Tensor) -> Tensor:
    """uint8 images with their details gone and their large shapes left, so that hiding adds no edge of its own."""
    side = images.shape[2:]
    small = interpolate(images.float(), tuple(max(2, length // 8) for length in side), mode="area")
    return interpolate(small, side, mode="bilinear").round().to(torch.uint8)


def enlarged(map_BHW: Tensor, side: Any) -> Tensor:
    """A map of places at the size of the image."""
    return interpolate(map_BHW[:, None].float(), tuple(side), mode="bilinear")[:, 0]


def space_of(detector: Any) -> Space | None:
    """Where the detector compares images; None for one without prototypes."""
    if isinstance(detector, Elsa):
        return Space(
            lambda images: _projections(detector, images), lambda z: (z @ detector.prototypes_.cpu().T).argmax(1)
        )
    if isinstance(detector, ElsaHead) and detector.encoder is not None:
        return Space(lambda images: _embeddings(detector, images), detector.prototype_of)
    return None


@torch.no_grad()
def _projections(detector: Elsa, images: Any) -> Tensor:
    net = _in_fp32(detector)
    parts = [images[start : start + SCORED_AT_ONCE] for start in range(0, len(images), SCORED_AT_ONCE)]
    raw = [net(plain(part.to(detector.device)))[0].float().cpu() for part in parts]
    return normalize(torch.cat([detector.prototypes_.new_empty(0, detector.prototypes_.shape[1]).cpu(), *raw]), dim=1)


def _embeddings(head: ElsaHead, images: Any) -> Tensor:
    assert head.encoder is not None
    size, views = head.size_ or None, head.config.views
    return normalize(
        embed(head.encoder, images, size=size, views=views, device=head.device, progress=head.progress), dim=1
    )


def most_telling(labels: list[str], most: int = KNOWN) -> list[int]:
    """At most so many places of a training set: all labelled images that fit, the rest spread evenly."""
    labelled = [i for i, word in enumerate(labels) if word]
    rest = [i for i, word in enumerate(labels) if not word]
    labelled = _spread(labelled, most)
    return sorted(labelled + _spread(rest, most - len(labelled)))


def _spread(places: list[int], most: int) -> list[int]:
    if len(places) <= most:
        return places
    return [places[i * len(places) // most] for i in range(most)]


def know(space: Space, names: list[str], labels: list[str], images: Any) -> Known:
    """The training images in the detector's space."""
    vectors_ND = space.vectors(images)
    return Known(names, labels, images, vectors_ND, space.prototype_of(vectors_ND))


def explain(detector: Any, image: Tensor, known: Known | None = None) -> Explanation:
    """Why one image uint8 [C, H, W] got its score; `known` training images say what it is held against."""
    one, space = image[None], space_of(detector)
    heat, score = heat_map(detector, one)[0], detector.anomaly_score(one).item()
    if space is None:
        return Explanation(image, heat, score)
    vector_1D = space.vectors(one)
    prototype = int(space.prototype_of(vector_1D))
    if known is None:
        return Explanation(image, heat, score, prototype)
    anomaly_N = encode_labels(known.labels) == ANOMALY
    like_N = (known.vectors @ vector_1D.T).flatten()
    itself_N = torch.zeros(len(known.names), dtype=torch.bool)
    for i in (like_N > SAME).nonzero().flatten().tolist():
        itself_N[i] = torch.equal(_image(known, i), image)
    members_N = (known.prototypes == prototype) & ~anomaly_N
    return Explanation(
        image,
        heat,
        score,
        prototype,
        share=members_N.sum().item() / max(1, int((~anomaly_N).sum())),
        around=central(known, members_N),
        nearest=_nearest(known, like_N, ~anomaly_N & ~itself_N, ALIKE),
        anomalies=_nearest(known, like_N, anomaly_N & ~itself_N, ALIKE),
    )


def central(known: Known, member_N: Tensor, most: int = ALIKE) -> tuple[Neighbour, ...]:
    """The members of a group nearest to its centre."""
    if not member_N.any():
        return ()
    centre_D = normalize(known.vectors[member_N].mean(dim=0), dim=0)
    return _nearest(known, known.vectors @ centre_D, member_N, most)


def _nearest(known: Known, like_N: Tensor, allowed_N: Tensor, most: int) -> tuple[Neighbour, ...]:
    places = allowed_N.nonzero().flatten()
    best = places[like_N[places].argsort(descending=True, stable=True)][:most].tolist()
    return tuple(Neighbour(known.names[i], _image(known, i), float(like_N[i]), known.labels[i]) for i in best)


def _image(known: Known, place: int) -> Tensor:
    """One image, whether they lie in memory or in shards."""
    return known.images[place : place + 1][0]
