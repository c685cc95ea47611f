"""A tiny folder of pictures, and options that fit a model on it in two seconds."""

from pathlib import Path

import numpy as np
from PIL import Image

# Enough to run every stage, too little to learn.
QUICK = [
    "--encoder", "tiny", "--device", "cpu", "--set", "pretrain_epochs=1", "--set", "finetune_epochs=1",
    "--set", "num_prototypes=8", "--set", "views=1",
]  # fmt: skip


def make_photos(folder: Path, count: int = 48) -> Path:
    """Pictures of one disc on grey, every eighth with a red scratch; the second half unlabelled."""
    noise = np.random.default_rng(0)
    y, x = np.mgrid[:40, :48]
    lines = ["path,label"]
    folder.mkdir(parents=True)
    for number in range(count):
        scratched = number % 8 == 0
        pixels = np.full((40, 48, 3), 60) + noise.integers(0, 20, (40, 48, 3))
        pixels[(y - 20) ** 2 + (x - 24) ** 2 < 150] += [120, 80, 10]
        if scratched:
            pixels[5:30, 10:14] = [200, 20, 20]
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.png")
        if number < count // 2:
            lines.append(f"{number:03}.png,{'anomaly' if scratched else 'normal' if number % 2 else ''}")
    (folder.parent / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder
