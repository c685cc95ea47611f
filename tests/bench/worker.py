"""A process that fills small plans, for tests that start and kill several: RESULTS FOLDER NAME [PLAN ...]."""

import sys
import time
from pathlib import Path

import torch

from elsa.bench import run as module
from elsa.bench.plans import PLANS, Cell

CELLS = [
    Cell("kde", "cifar10", normal, None, 0.0, 0.1, seed) for seed in (0, 1, 2) for normal in ("Car", "Bird", "Cat")
]


def small_cifar10(_folder):
    """Ten classes of ten images of noise."""
    classes = torch.arange(10).repeat(10)
    images = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images, classes, images[:50], classes[:50]


def main(results, folder, name, plans):
    """Say that it is ready, wait for the word, fill the plan slowly; say when it works and how many cells it added."""
    torch.set_num_threads(1)
    module.load_cifar10, module.LOOK_AGAIN = small_cifar10, 0.1
    PLANS["small"] = lambda: CELLS
    PLANS["other"] = lambda: CELLS[2:5]
    (folder / f"{name}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)

    def slowly(stage, done, total, figures):
        (folder / f"{name}.working").touch()
        time.sleep(0.2)

    added = module.run_plan(plans, results, Path("cifar"), 1e9, "cpu", {}, slowly)
    (folder / f"{name}.added").write_text(str(added))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:] or ["small"])
