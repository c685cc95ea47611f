"""Does cost grow linearly with the number of images, and does memory stay flat when they are streamed from disk?

Run: python benchmarks/scaling.py [--images 1000 4000 16000 64000] [--results FILE]
Each size is a process of its own: one epoch of pre-training, one of fine-tuning and a score of every image, plain Elsa
with the tiny network at 32 px, images in shards on disk. Seconds are CPU seconds of one thread, which what else the
machine does touches least. Then a line is fitted, and what it says of a million images is printed as what it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from elsa.bench.run import append_line, provenance

SIZES = (1000, 4000, 16000, 64000)
ALL = 1_000_000
STAGES = ("pretrain", "finetune", "score")

WORK = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from elsa.data.images import Decoding
from elsa.data.shards import build_shards
from elsa.elsa import Elsa
from elsa.memory import peak_memory_mb
torch.set_num_threads(1)
count, folder = int(sys.argv[1]), Path(sys.argv[2])
rng = np.random.default_rng(0)
kinds = rng.integers(0, 256, (64, 3, 32, 32), dtype=np.uint8)
def decoded(records):
    return (kinds[i % 64] ^ np.uint8(i % 7) for i in records)
stored = build_shards(folder, "x", [str(i) for i in range(count)], Decoding(32, 3), decoded, lambda done: None)
marks = {}
def progress(stage, done, total, figures):
    marks[stage] = time.process_time()
settings = dict(encoder="tiny", pretrain_epochs=1, finetune_epochs=1, pretrain_batch=128, pretrain_optimizer="adam",
                pretrain_lr=1e-3, views=1)
model = Elsa(method="elsa", progress=progress, **settings)
labels = ["anomaly"] * 20 + [""] * (count - 20)
before, began = peak_memory_mb(), time.process_time()
model.fit(stored.shards, labels)
fitted = time.process_time()
model.anomaly_score(stored.shards)
seconds = {"pretrain": marks["pretrain"] - began, "finetune": marks["finetune"] - marks["pretrain"],
           "score": time.process_time() - fitted}
print(json.dumps({"images": count, "seconds": seconds, "peak_mb": peak_memory_mb(), "start_mb": before}))
"""


def measure(count: int) -> dict[str, Any]:
    """One size in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", WORK, str(count), f"{folder}/shards"], check=True, capture_output=True, text=True
        )
    return json.loads(done.stdout)


def fit_line(counts: list[int], values: list[float]) -> tuple[float, float, float]:
    """(at zero, per image, largest relative residual) of the line that fits best relative to each value."""
    x, y = np.array(counts, float), np.array(values)
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    return float(start), float(slope), float(np.abs((start + slope * x) / y - 1).max())


def main() -> None:
    """Measure every size, fit, print, append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--results", type=Path, default=Path("results/scaling.jsonl"))
    given = parser.parse_args()
    found = []
    for count in given.images:
        found.append(measure(count))
        append_line(given.results, {**found[-1], **provenance("cpu")})
        print(json.dumps(found[-1]), flush=True)
    counts = [line["images"] for line in found]
    for stage in STAGES:
        start, slope, residual = fit_line(counts, [line["seconds"][stage] for line in found])
        print(
            f"{stage}: {start:.1f} s + {1e6 * slope:.0f} us an image (within {100 * residual:.0f}%); "
            f"a million images, extrapolated: {(start + slope * ALL) / 60:.0f} CPU minutes"
        )
    start, slope, residual = fit_line(counts, [line["peak_mb"] for line in found])
    print(f"memory: {start:.0f} MB + {1e3 * slope:.2f} kB an image (within {100 * residual:.0f}%)")


if __name__ == "__main__":
    main()
