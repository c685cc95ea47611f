"""Which heat map tells best where an anomaly score comes from: the comparison quoted in docs/explain.md.

Run: python benchmarks/heat_maps.py MODEL FILE.npz [--images 24] [--methods NAME ...]
FILE.npz holds uint8 `normal` and `anomaly` [N, C, S, S], of which the model has seen none; --from-parquet makes both
from an image table: see --help. Two questions, asked of every method:

pasted    a square (35% of the side) of an anomaly is pasted into three times as many normal images; the third whose
          scores rise most is kept. `inside` is the mean AUROC of heat inside the square against heat outside it, in
          percent; `hit` the share of maps whose hottest pixel lies in the square.
deleted   of true anomalies the hottest 10, 20 and 30% of the pixels are blurred; `fall` is the mean fall of the score
          in standard deviations of the normal images' scores. It favours methods that blur, like occlusion.
"""

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elsa.detectors import build
from elsa.elsa import Elsa
from elsa.inference import fold_norms
from elsa.saved import load, save_model
from elsa.trust import explain
from elsa.trust.explain import blurred, enlarged, falls_without, occlusion
from elsa.trust.metrics import auroc

PASTED = 0.35
DELETED = (0.1, 0.2, 0.3)
MASKS = 100
Read = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--from-parquet", type=Path, help="first write FILE.npz and fit MODEL, from this image table")
    parser.add_argument("--normal", help="with --from-parquet: the class that is normal")
    parser.add_argument("--detector", default="elsa-head", help="with --from-parquet: elsa-head or elsa (tiny)")
    options = parser.parse_args()
    if options.from_parquet:
        prepare(options.from_parquet, options.normal, options.detector, options.model, options.file)
    detector = load(options.model)
    with np.load(options.file) as stored:
        normal, anomaly = (torch.from_numpy(stored[word][: 3 * options.images]) for word in ("normal", "anomaly"))
    print(f"{options.model.name}, {options.images} images of {normal.shape[-1]} px")
    compare(detector, normal, anomaly, options.images, options.methods)


def prepare(table: Path, normal_class: str, detector: str, model: Path, file: Path) -> None:
    """400 images of one class and 40 labelled others to learn from; 300 of each kind that the model never sees."""
    import pyarrow.parquet as pq
    from PIL import Image

    from elsa.demo import FROM_SCRATCH
    from elsa.weights import find_mobilenet_v2

    read = pq.read_table(table)
    column = next(name for name in read.schema.names if name != "image")
    words = np.array([str(value) for value in read[column].to_pylist()])
    order = np.random.default_rng(0).permutation(len(words))
    inside, outside = order[words[order] == normal_class][:700], order[words[order] != normal_class][:340]
    if column == "defect_probability":
        outside = order[words[order] == "1.0"][:340]

    def images(index: np.ndarray) -> np.ndarray:
        opened = (Image.open(io.BytesIO(read["image"][int(i)].as_py()["bytes"])) for i in index)
        arrays = [np.asarray(image) for image in opened]
        return np.stack([a[None] if a.ndim == 2 else a.transpose(2, 0, 1) for a in arrays])

    np.savez(file, normal=images(inside[400:]), anomaly=images(outside[40:]))
    settings: dict[str, Any] = {"encoder": f"mobilenet_v2:{find_mobilenet_v2()}"}
    if detector == "elsa":
        settings = FROM_SCRATCH
    fitted = build(detector, seed=0, **settings)
    train = torch.from_numpy(images(np.concatenate([inside[:400], outside[:40]])))
    fitted.fit(train, ["normal"] * 40 + [""] * 360 + ["anomaly"] * 40)
    save_model(fitted, model, {"preprocessing": {"size": train.shape[-1], "channels": train.shape[1]}})


def compare(detector: Any, normal: Tensor, anomaly: Tensor, count: int, methods: list[str]) -> None:
    """Print one line for each method."""
    score = detector.anomaly_score
    normal_scores = score(normal).double()
    pasted, square = paste(normal, anomaly)
    rise = score(pasted).double() - normal_scores
    kept = rise.topk(count).indices
    pasted, square, deviation = pasted[kept], square[kept], normal_scores.std().item()
    print(f"the squares raise the kept scores by {rise[kept].mean() / deviation:.2f} standard deviations")
    print("| heat map | inside | hit | fall | ms an image |\n|---|---|---|---|---|")
    for name in methods:
        began = time.perf_counter()
        heat = METHODS[name](detector, pasted)
        milliseconds = 1000 * (time.perf_counter() - began) / count
        pairs = list(zip(heat.double().numpy(), square.numpy(), strict=True))
        inside = np.mean([auroc(one.ravel(), mask.ravel()) for one, mask in pairs])
        hit = np.mean([mask.ravel()[one.argmax()] for one, mask in pairs])
        fall = fall_of(score, anomaly[:count], METHODS[name](detector, anomaly[:count])) / deviation
        print(f"| {name} | {100 * inside:.1f} | {100 * hit:.0f}% | {fall:.2f} | {milliseconds:.0f} |", flush=True)


def paste(normal: Tensor, anomaly: Tensor) -> tuple[Tensor, Tensor]:
    """Normal images with a square of an anomaly in them, and where it is."""
    rng, side = np.random.default_rng(0), normal.shape[-1]
    length = round(PASTED * side)
    images, square = normal.clone(), torch.zeros(len(normal), side, side, dtype=torch.bool)
    for i, image in enumerate(images):
        top, left, from_top, from_left = rng.integers(0, side - length + 1, 4)
        other = anomaly[i % len(anomaly), :, from_top : from_top + length, from_left : from_left + length]
        image[:, top : top + length, left : left + length] = other
        square[i, top : top + length, left : left + length] = True
    return images, square


def fall_of(score: Callable[[Tensor], Tensor], images: Tensor, heat: Tensor) -> float:
    """The mean fall of the score once the hottest pixels are blurred."""
    hidden, base, falls = blurred(images), score(images).double(), []
    for share in DELETED:
        limit = heat.flatten(1).quantile(1 - share, dim=1)
        hot = (heat > limit[:, None, None])[:, None]
        falls.append((base - score(torch.where(hot, hidden, images)).double()).mean().item())
    return float(np.mean(falls))


def random_places(detector: Any, images: Tensor) -> Tensor:
    """Smooth nonsense: what a map must beat."""
    return enlarged(torch.rand(len(images), 5, 5, generator=torch.Generator().manual_seed(0)), images.shape[2:])


def on_features(read: Read) -> Callable[[Any, Tensor], Tensor]:
    """A heat map that reads the last feature map in its own way."""

    def heat(detector: Any, images: Tensor) -> Tensor:
        original = explain.falls_without
        explain.falls_without = read  # type: ignore[assignment]
        try:
            if isinstance(detector, Elsa):
                return explain.places_left_out(detector, fold_norms(detector.net_, detector.config), images)
            return explain.heat_map(detector, images)
        finally:
            explain.falls_without = original

    return heat


def gradient_times_map(map_BCHW: Tensor, vectors_BD: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Grad-CAM's product with its sign kept: the first-order estimate of what leaving a place out would change."""
    with torch.enable_grad():
        leaf = map_BCHW.clone().requires_grad_()
        score(leaf.mean(dim=(2, 3))).sum().backward()
    assert leaf.grad is not None
    return (leaf.grad * (map_BCHW - map_BCHW.mean(dim=(2, 3), keepdim=True))).sum(dim=1)


def each_place_alone(map_BCHW: Tensor, vectors_BD: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The score each place would have if it were the whole image."""
    count, _, height, width = map_BCHW.shape
    return score(map_BCHW.flatten(2).transpose(1, 2).flatten(0, 1)).view(count, height, width)


def random_masks(detector: Any, images: Tensor) -> Tensor:
    """RISE: the mean score over random smooth masks that show a pixel, less the mean over all masks."""
    generator, hidden = torch.Generator().manual_seed(0), blurred(images)
    shown = enlarged((torch.rand(MASKS, 5, 5, generator=generator) < 0.5).float(), images.shape[2:])
    total = torch.zeros(len(images), *images.shape[2:])
    for mask in shown:
        mixed = (images * mask + hidden * (1 - mask)).round().to(torch.uint8)
        total += cheap(detector)(mixed)[:, None, None].float() * (mask - shown.mean(dim=0))
    return total / MASKS


def cheap(detector: Any) -> Callable[[Tensor], Tensor]:
    """The score to ask many times: of the image as it is, where the detector's own takes tens of views."""
    return explain.plain_score(detector) if isinstance(detector, Elsa) else detector.anomaly_score


METHODS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nothing: random places": random_places,
    "places left out, each alone": on_features(lambda m, v, s: falls_without(m, v, s, spread=0.01)),
    "places left out, spread .7": on_features(lambda m, v, s: falls_without(m, v, s, spread=0.7)),
    "places left out, spread 1": on_features(lambda m, v, s: falls_without(m, v, s, spread=1.0)),
    "gradient times map": on_features(gradient_times_map),
    "each place alone": on_features(each_place_alone),
    "windows blurred, a third of the side": lambda d, x: occlusion(cheap(d), x, window=0.3),
    "windows blurred, two fifths": lambda d, x: occlusion(cheap(d), x, window=0.4),
    "random masks": random_masks,
    "the library's": explain.heat_map,
}

if __name__ == "__main__":
    main()
